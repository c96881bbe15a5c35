"""Environments of GEM (package `gem-llm`): its games, and its single-turn tasks if their data is available."""

from __future__ import annotations

import functools
import string
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import UsageError, did_you_mean
from agentrl.registry import Extra
from agentrl.task import seed_tasks

from .global_random import GlobalRandom
from .nltk_data import missing_corpus

EXTRA = Extra(name="gem", module="gem")
GAMES = "game:"
"""Prefix of the ids whose `truncated` means that the turns are used up; single-turn tasks always report it."""


class ActionSpace(Text):
    """Space of texts; a sample is a random action of the game instead of random letters."""

    def __init__(self, draw: Callable[[int], str]) -> None:
        super().__init__(4096, charset=string.printable)
        self._draw = draw

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a random action in the current state of the game."""
        return self._draw(int(self.np_random.integers(2**31)))


class Gem(gymnasium.Env[str, str]):
    """An environment of GEM, with its texts, rewards and endings.

    Args:
        game: An id of GEM's registry.
        options: Options of the environment.

    Raises:
        UsageError: the package is not installed, or the environment is unknown or cannot be created.
    """

    action_hint = r"any text; the content of \boxed{} is your action"

    def __init__(self, *, game: str = "game:GuessTheNumber-v0-easy", **options: Any) -> None:
        self.name = game
        self._random = GlobalRandom()
        with self._random.use():
            self._game = _create(game, options)
        self._misread = float(EXTRA.load("gem.utils.constants").LanguageGameReward.format_error_reward)
        self.observation_space = Text(65536, charset=string.printable)
        self.action_space = ActionSpace(self._sample)
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start the episode of the seed."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        self._random.seed(drawn)
        with self._random.use():
            text, _ = self._game.reset(seed=drawn)
        self._over = False
        return text, {"success": False, "task_type": self.name}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action.

        Raises:
            UsageError: the episode is over.
        """
        if self._over:
            raise UsageError(f"the episode of {self.name} is over", expected="reset before the next step")
        with self._random.use():
            text, reward, ended, cut, game_info = self._game.step(action)
        self._over = bool(ended or cut)
        is_cut = bool(cut) and self.name.startswith(GAMES)
        suffix = "" if self._over else game_info.get("suffix", "")
        success = self._over and float(reward) >= 1
        info = {"success": success, "task_type": self.name, "valid": float(reward) != self._misread}
        return f"{text}\n{suffix}".strip(), float(reward), self._over and not is_cut, is_cut, info

    def close(self) -> None:
        """Close the game if it can be closed."""
        close = getattr(self._game, "close", None)
        if callable(close):
            close()

    def _sample(self, seed: int) -> str:
        with GlobalRandom(seed).use():
            try:
                return str(self._game.sample_random_action())
            except NotImplementedError:
                return ""


def _create(name: str, options: dict[str, Any]) -> Any:
    gem = EXTRA.load()
    games = EXTRA.load("gem.envs.registration").ENV_REGISTRY
    if name not in games:
        raise UsageError(
            "gem has no environment with this name",
            got=repr(name),
            expected=f"one of its {len(games)}",
            hint=did_you_mean(name, games),
        )
    try:
        return gem.make(name, **options)
    except LookupError as error:
        raise missing_corpus(f"the game {name}", error) from error
    except (TypeError, ValueError, AssertionError, ImportError, OSError) as error:
        raise UsageError(f"the environment {name} of gem cannot be created", got=error) from error


SPEC = EnvironmentSpec(
    name="gem",
    make=Gem,
    tasks=functools.partial(seed_tasks, "gem"),
    description=(
        "The environments of GEM (gem-llm), such as game:Mastermind-v0-easy or game:Sudoku-v0-easy. Option game: an id"
        " of its registry; other options are the environment's own."
    ),
    instructions=("You play a text game."),
    isolation=Isolation.PROCESS,
    options={"game": "game:GuessTheNumber-v0-easy"},
    extra=EXTRA,
)
