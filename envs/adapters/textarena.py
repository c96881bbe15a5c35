"""The games of `textarena`: for one player, and for several, with scripted opponents or with all players acting."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Mapping
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
"""Function that returns a move, given the text since its last move and a random generator."""
RANDOM, SELF = "random", "self"
MAX_PLAYERS = 8
_MOVES = re.compile(r"(?:available|valid|legal) moves:?(.*)", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]]+\]")
_LONG_NUMBER = re.compile(r"(\d{100})\d+")
"""Numbers to shorten in actions: games parse them as integers, which Python refuses above 4,300 digits."""


class TextArena(gymnasium.Env[str, str]):
    """A game; an observation is the game's text since the player's last move, and the reward comes at the end.

    Args:
        game: A game's id. The policy is player 0.
        opponent: Plays all other players: ``random`` takes any move that the game lists, ``module:attr`` is an
            `Opponent`. With ``self`` all players act, in a loop such as `self_play`.
        options: Options of the game.

    Raises:
        UsageError: the package is not installed, the game is unknown, or its data is missing.
    """

    action_hint = "your move in square brackets, in the form that the game asks for"

    def __init__(self, *, game: str = "GuessTheNumber-v0", opponent: str = RANDOM, **options: Any) -> None:
        self.name = game
        self.observation_space = Text(65536, charset=string.printable)
        self.action_space = Text(256, charset=string.printable)
        self.all_act = opponent == SELF
        self._opponent: Opponent = take_listed_move if opponent in (RANDOM, SELF) else registry.load(opponent)
        self._random, self._rng = GlobalRandom(), Random()
        with self._random.use():
            self._game = _create(game, options)
            self.players = self._count_players()
            if self.all_act and self.players == 1:
                raise UsageError(f"the game {game} is for one player", got="opponent=self", expected="another opponent")
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start the game of the seed."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        self._random.seed(drawn)
        self._rng = Random(f"opponent {drawn}")
        with self._random.use():
            self._game.reset(num_players=self.players, seed=drawn)
            self._over = self._let_others_play(is_over=False)
            players = {"players": [str(player) for player in range(self.players)]} if self.all_act else {}
            return self._take_messages(self._mover()), {**self._info(valid=True), **players}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make a move; the others then make theirs.

        Raises:
            UsageError: the game is over.
        """
        if self._over:
            raise UsageError(f"the game {self.name} is over", expected="reset before the next step")
        with self._random.use():
            mover = self._mover()
            is_over, _ = self._game.step(action=_LONG_NUMBER.sub(r"\1", action))
            refused = not is_over and self._game.state.current_player_id == mover and self._was_refused(mover)
            self._over = self._let_others_play(is_over=bool(is_over))
            text = self._take_messages(self._mover())
            return self._finish(text) if self._over else (text, 0.0, False, False, self._info(valid=not refused))

    def _finish(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        rewards, info = self._game.close()
        if self.all_act:
            return self._finish_for_all(text, rewards or {}, info)
        mine = info.get(0, {})
        reward = float((rewards or {}).get(0, 0.0))
        parts = [part for part in (text, str(mine.get("reason") or "")) if part]
        ending = self._info(valid=not mine.get("invalid_move"), success=reward >= 1)
        return "\n".join(parts) or "The game is over.", reward, True, False, ending

    def _finish_for_all(
        self, text: str, rewards: Mapping[int, float], info: Mapping[int, Mapping[str, Any]]
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reasons = dict.fromkeys(str(details.get("reason") or "") for details in info.values())
        own = {str(player): float(reward) for player, reward in rewards.items()}
        is_valid = not any(details.get("invalid_move") for details in info.values())
        ending = {**self._info(valid=is_valid, success=is_valid and 1.0 in own.values()), "rewards": own}
        return "\n".join(part for part in (text, *reasons) if part) or "The game is over.", 0.0, True, False, ending

    def _info(self, *, valid: bool, success: bool = False) -> dict[str, Any]:
        next_player = {"player": str(self._mover())} if self.all_act else {}
        return {"success": success, "task_type": self.name, "valid": valid, **next_player}

    def _mover(self) -> int:
        """Return the player that acts next, among those that the policy plays."""
        return int(self._game.state.current_player_id) if self.all_act else 0

    def _let_others_play(self, *, is_over: bool) -> bool:
        """Play the opponents' moves until it is the policy's turn; return True if the game is over."""
        while not self.all_act and not is_over and (player := self._game.state.current_player_id) != 0:
            is_over, _ = self._game.step(action=self._opponent(self._take_messages(player), self._rng))
        return is_over

    def _was_refused(self, player: int) -> bool:
        """Return True if the next message for the player says that the move was not allowed."""
        return any(
            "invalid move" in text for _, text, kind in self._game.state.observations[player] if "ADMIN" in str(kind)
        )

    def _take_messages(self, player: int) -> str:
        """Return and clear the new messages for a player, except the player's own."""
        messages = self._game.state.observations[player]
        self._game.state.observations[player] = []
        return "\n".join(text.strip() for author, text, _ in messages if author != player)

    def _count_players(self) -> int:
        """Return the minimum number of players of the game."""
        for players in range(1, MAX_PLAYERS + 1):
            try:
                self._game.reset(num_players=players, seed=0)
            except (AssertionError, ValueError):
                continue
            return players
        raise UsageError(
            f"the game {self.name} does not start with any number of players", expected=f"1 to {MAX_PLAYERS} players"
        )


def take_listed_move(observation: str, rng: Random) -> str:
    """Return a random move of those that the game lists.

    Raises:
        UsageError: it lists none.
    """
    listed: list[list[str]] = [_MOVE.findall(line) for line in _MOVES.findall(observation)]
    if not listed or not listed[-1]:
        raise UsageError(
            "the random opponent found no list of moves in this game",
            got=repr(observation[-200:]),
            hint="set your own opponent: opponent=module:function",
        )
    return rng.choice(listed[-1])


def _create(name: str, options: dict[str, Any]) -> Any:
    """Create a game without the wrappers that repeat the whole history, but with the one that adds missing brackets."""
    textarena = EXTRA.load()
    games = EXTRA.load("textarena.envs.registration").ENV_REGISTRY
    if name not in games:
        raise UsageError(
            "textarena has no game with this name",
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
        raise UsageError(f"the game {name} of textarena cannot be created", got=error) from error
    return brackets(made) if brackets in (games[name].default_wrappers or ()) else made


SPEC = EnvironmentSpec(
    name="textarena",
    make=TextArena,
    tasks=functools.partial(seed_tasks, "textarena"),
    description=(
        "The games of textarena, such as Mastermind-v0, Sudoku-v0, TicTacToe-v0 or Chess-v0. Option game: a game's id;"
        " opponent: random, self, or a function of yours; other options are the game's own."
    ),
    instructions="You play a text game.",
    reward_range=(-1.0, 1.0),
    isolation=Isolation.PROCESS,
    options={"game": "GuessTheNumber-v0"},
    extra=EXTRA,
)
