"""Games in two engines at once, compared by text, admissible commands, rewards and endings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from agentrl.env import Expert
from agentrl.errors import UsageError

RANDOM_WALKS = 3
RANDOM_STEPS = 30
_WILD = 0.15
"""Share of a random walk's commands that may be inadmissible."""
_WILD_COMMANDS = (
    "take {0} from {1}", "move {0} to {1}", "open {0}", "close {1}", "use {0}", "examine {0}", "slice {0} with {1}",
    "heat {0} with {1}", "cool {0} with {1}", "clean {0} with {1}", "go to {0}", "Go to {0}", " look ", "dance",
)  # fmt: skip


class Engine(Protocol):
    """Environment to compare."""

    def reset(self, *, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start a game."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out a command."""

    def admissible_actions(self) -> list[str]:
        """Return the admissible commands."""

    def expert(self) -> Expert:
        """Return a policy that solves games."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference between two engines."""

    game: str
    walk: str
    commands: tuple[str, ...]
    """Commands up to the one whose results differ."""
    what: str
    native: object
    original: object


@dataclass(frozen=True, slots=True, kw_only=True)
class GameParity:
    """Results of the walks through one game."""

    game: str
    steps: int
    solved: bool
    """True if the expert solved it."""
    differences: tuple[Difference, ...]
    """Differences, at most one per walk, which ends there."""


def compare_game(native: Engine, original: Engine, game: str) -> GameParity:
    """Walk through a game in both engines: once with the expert, and several times at random.

    Args:
        native: One engine.
        original: The other engine.
        game: The game's id, which is also the seed of the random walks.
    """
    walks = [_Walk(native, original, game, "expert")]
    walks += [_Walk(native, original, game, f"random {number}") for number in range(RANDOM_WALKS)]
    choices = [_expert_choice(native), *(_random_choice(native, Random(f"{game} {walk.name}")) for walk in walks[1:])]
    for walk, choose in zip(walks, choices, strict=True):
        walk.play(choose, limit=50 if walk.name == "expert" else RANDOM_STEPS)
    differences = tuple(walk.difference for walk in walks if walk.difference is not None)
    steps = sum(len(walk.commands) for walk in walks)
    return GameParity(game=game, steps=steps, solved=walks[0].solved, differences=differences)


class _Walk:
    def __init__(self, native: Engine, original: Engine, game: str, name: str) -> None:
        self.native, self.original, self.game, self.name = native, original, game, name
        self.commands: list[str] = []
        self.difference: Difference | None = None
        self.solved = False

    def play(self, choose: Callable[[str], str | None], limit: int) -> None:
        """Walk until the end, a difference, or `limit` steps."""
        here, there = (engine.reset(options={"game": self.game}) for engine in (self.native, self.original))
        same = self._compare({"reset": here}, {"reset": there}) and self._compare_commands()
        observation, over = here[0], False
        while same and not over and len(self.commands) < limit:
            command = choose(observation)
            if command is None:
                return
            self.commands.append(command)
            one, other = self.native.step(command), self.original.step(command)
            observation, over, self.solved = one[0], one[2] or one[3], one[2]
            same = self._compare(_parts(one), _parts(other)) and self._compare_commands()

    def _compare_commands(self) -> bool:
        one, other = self.native.admissible_actions(), self.original.admissible_actions()
        return self._compare({"admissible commands": one}, {"admissible commands": other})

    def _compare(self, one: dict[str, object], other: dict[str, object]) -> bool:
        for what, value in one.items():
            if value != other[what]:
                self.difference = Difference(
                    game=self.game,
                    walk=self.name,
                    commands=tuple(self.commands),
                    what=what,
                    native=value,
                    original=other[what],
                )
                return False
        return True


def _parts(step: tuple[str, float, bool, bool, dict[str, Any]]) -> dict[str, object]:
    return dict(zip(("observation", "reward", "terminated", "truncated", "info"), step, strict=True))


def _expert_choice(engine: Engine) -> Callable[[str], str | None]:
    expert = engine.expert()

    def choose(observation: str) -> str | None:
        try:
            return expert.act(observation)
        except UsageError:  # an unusual house has confused it
            return None

    return choose


def _random_choice(engine: Engine, random: Random) -> Callable[[str], str | None]:
    """Choose first a verb, then a command that begins with it; otherwise nearly every command would be "go to"."""

    def choose(_observation: str) -> str:
        commands = engine.admissible_actions()
        if random.random() < _WILD:
            names = [" ".join(command.split()[-2:]) for command in commands]
            return random.choice(_WILD_COMMANDS).format(random.choice(names), random.choice(names))
        verb = random.choice(sorted({command.split()[0] for command in commands}))
        return random.choice([command for command in commands if command.split()[0] == verb])

    return choose
