"""The games of `textarena`: those for one player, and those for several against scripted opponents."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

import gymnasium
from gymnasium.spaces import Text

from agentrl import registry
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import UsageError, did_you_mean
from agentrl.registry import Extra
from agentrl.task import seed_tasks

from .global_random import GlobalRandom
from .nltk_data import missing_corpus

EXTRA = Extra(name="textarena", module="textarena")
Opponent: TypeAlias = Callable[[str, Random], str]
"""Its move, given all that it was told since its last one, and a generator."""
RANDOM = "random"
MOST_PLAYERS = 8
_MOVES = re.compile(r"(?:available|valid|legal) moves:?(.*)", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]]+\]")
_LONG_NUMBER = re.compile(r"(\d{100})\d+")
"""Games turn what an action says into integers, which Python refuses above 4,300 digits."""


class TextArena(gymnasium.Env[str, str]):
    """A game: an observation is what the player was told since the last move, and the reward comes at the end.

    Args:
        game: A game's id. The policy is player 0.
        opponent: Plays all others: ``random`` takes any move that the game lists, ``module:attr`` is an `Opponent`.
        options: Of the game.

    Raises:
        UsageError: the package is not installed, or has no such game, or the game needs data that is not there.
    """

    action_hint = "your move in square brackets, in the form that the game asks for"

    def __init__(self, *, game: str = "GuessTheNumber-v0", opponent: str = RANDOM, **options: Any) -> None:
        self.name = game
        self.observation_space = Text(65536, charset=string.printable)
        self.action_space = Text(256, charset=string.printable)
        self._opponent: Opponent = take_listed_move if opponent == RANDOM else registry.load(opponent)
        self._random, self._rng = GlobalRandom(), Random()
        with self._random.installed():
            self._game = _made(game, options)
            self.players = self._count_players()
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start the game that the seed decides."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        self._random.seed(drawn)
        self._rng = Random(f"opponent {drawn}")
        with self._random.installed():
            self._game.reset(num_players=self.players, seed=drawn)
            self._over = self._let_others_play(is_over=False)
            return self._told(), {"success": False, "task_type": self.name}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make a move; the others then make theirs.

        Raises:
            UsageError: the game is over.
        """
        if self._over:
            raise UsageError(f"the game {self.name} is over", expected="reset before the next step")
        with self._random.installed():
            is_over, _ = self._game.step(action=_LONG_NUMBER.sub(r"\1", action))
            refused = not is_over and self._game.state.current_player_id == 0 and self._was_refused()
            self._over = self._let_others_play(is_over=bool(is_over))
            text = self._told()
            return self._ended(text) if self._over else (text, 0.0, False, False, self._info(valid=not refused))

    def _ended(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        rewards, info = self._game.close()
        mine = info.get(0, {})
        reward = float((rewards or {}).get(0, 0.0))
        parts = [part for part in (text, str(mine.get("reason") or "")) if part]
        ending = self._info(valid=not mine.get("invalid_move"), success=reward >= 1)
        return "\n".join(parts) or "The game is over.", reward, True, False, ending

    def _info(self, *, valid: bool, success: bool = False) -> dict[str, Any]:
        return {"success": success, "task_type": self.name, "valid": valid}

    def _let_others_play(self, *, is_over: bool) -> bool:
        """Whether the game is over when it is the policy's turn again."""
        while not is_over and (player := self._game.state.current_player_id) != 0:
            is_over, _ = self._game.step(action=self._opponent(self._told(player), self._rng))
        return is_over

    def _was_refused(self) -> bool:
        """Whether what the player is told next is that the move was not allowed."""
        return any("invalid move" in text for _, text, kind in self._game.state.observations[0] if "ADMIN" in str(kind))

    def _told(self, player: int = 0) -> str:
        """What a player was told since the last time, without the player's own words."""
        told = self._game.state.observations[player]
        self._game.state.observations[player] = []
        return "\n".join(text.strip() for author, text, _ in told if author != player)

    def _count_players(self) -> int:
        """The least number of players that the game can be played by."""
        for players in range(1, MOST_PLAYERS + 1):
            try:
                self._game.reset(num_players=players, seed=0)
            except (AssertionError, ValueError):
                continue
            return players
        raise UsageError(f"the game {self.name} takes no number of players", expected=f"1 to {MOST_PLAYERS}")


def take_listed_move(observation: str, rng: Random) -> str:
    """A random one of the moves that the game lists.

    Raises:
        UsageError: it lists none.
    """
    listed: list[list[str]] = [_MOVE.findall(line) for line in _MOVES.findall(observation)]
    if not listed or not listed[-1]:
        raise UsageError(
            "the random opponent finds no moves listed in this game",
            got=repr(observation[-200:]),
            hint="name an opponent of your own: opponent=module:function",
        )
    return rng.choice(listed[-1])


def _made(name: str, options: dict[str, Any]) -> Any:
    """The game without the wrappers that repeat the whole history, but with the one that adds missing brackets."""
    textarena = EXTRA.load()
    games = EXTRA.load("textarena.envs.registration").ENV_REGISTRY
    if name not in games:
        raise UsageError(
            "textarena has no game of this name",
            got=repr(name),
            expected=f"one of its {len(games)}",
            hint=did_you_mean(name, games),
        )
    brackets = textarena.wrappers.ActionFormattingWrapper
    try:
        made = textarena.make(f"{name}-raw" if f"{name}-raw" in games else name, **options)
    except LookupError as error:
        raise missing_corpus(f"the game {name}", error) from error
    except (TypeError, ValueError, AssertionError, ImportError, OSError, SyntaxError) as error:
        raise UsageError(f"the game {name} of textarena cannot be made", got=error) from error
    return brackets(made) if brackets in (games[name].default_wrappers or ()) else made


SPEC = EnvironmentSpec(
    name="textarena",
    make=TextArena,
    tasks=functools.partial(seed_tasks, "textarena"),
    description=(
        "The games of textarena, such as Mastermind-v0, Sudoku-v0, TicTacToe-v0 or Chess-v0. Option game: a game's id;"
        " opponent: random, or a function of yours; other options are the game's own."
    ),
    instructions="You play a text game.",
    reward_range=(-1.0, 1.0),
    isolation=Isolation.PROCESS,
    options={"game": "GuessTheNumber-v0"},
    extra=EXTRA,
)
