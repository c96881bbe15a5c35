"""The worlds of `minigrid` (MiniGrid and BabyAI) as text."""

from __future__ import annotations

import enum
import functools
import hashlib
import os
from typing import Any

import gymnasium
import numpy as np

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import UsageError
from agentrl.message import Content
from agentrl.registry import Extra
from agentrl.task import seed_tasks

from ..text_adapter import TextAdapter

EXTRA = Extra(name="minigrid", module="minigrid")
DIRECTIONS = ("east", "south", "west", "north")
DOOR_STATES = ("open", "closed", "locked")
UNSEEN, EMPTY, WALL, FLOOR, DOOR = "unseen", "empty", "wall", "floor", "door"
LEGEND = (
    "The grid: ^ you, # wall, . nothing, ? not seen, D door, G goal, ~ lava, X box; other things by their first letter."
)
LETTERS = {UNSEEN: "?", EMPTY: ".", WALL: "#", FLOOR: ".", DOOR: "D", "goal": "G", "lava": "~", "box": "X"}
"""Letter in the grid by kind of object; other kinds are shown by their first letter."""
AHEAD, LEFT, RIGHT = "straight ahead", "to your left", "to your right"


class View(enum.StrEnum):
    """Form of the observations."""

    TEXT = "text"
    """The things in view, each with its distance."""
    GRID = "grid"
    """The same, and the view as a grid of letters, with the agent at its lower edge, facing up."""


class MiniGrid(TextAdapter):
    """A world of MiniGrid: the mission, what the agent carries, and what it sees in front of it.

    Args:
        env_id: An id that `minigrid` registers, of MiniGrid or BabyAI.
        view: ``text`` or ``grid``.
        options: Options of the world.

    Raises:
        UsageError: the package is not installed, or the world is unknown.
    """

    def __init__(self, *, env_id: str = "MiniGrid-Empty-5x5-v0", view: str = View.TEXT, **options: Any) -> None:
        if view not in list(View):
            raise UsageError("unknown view of minigrid", got=repr(view), expected=" or ".join(View))
        self.view = View(view)
        env = _world(env_id, options)
        self._constants = EXTRA.load("minigrid.core.constants")
        self.world: Any = env.unwrapped
        self.name = env_id
        names = [action.name for action in self.world.actions][: int(env.action_space.n)]
        super().__init__(env, actions=names, max_steps=self.world.max_steps)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Start in the world of the seed."""
        text, info = super().reset(seed=seed, options=options)
        self.max_steps = self.world.max_steps  # some worlds set it with the mission
        if self.view is View.GRID:
            text = f"{text}\n{LEGEND}"
        return text, {**info, "success": False, "task_type": self.name}

    def step(self, action: str) -> tuple[Content, float, bool, bool, dict[str, Any]]:
        """Take an action; a reward above 0 means that the mission is done."""
        text, reward, terminated, truncated, info = super().step(action)
        return text, reward, terminated, truncated, {**info, "success": reward > 0, "task_type": self.name}

    def describe(self, observation: Any) -> str:
        """Return the mission, the direction, the carried object, and the things in view."""
        cells = self._cells(observation["image"])
        middle, last = len(cells) // 2, len(cells[0]) - 1
        carried = cells[middle][last]
        lines = [
            f"Your mission: {observation['mission']}",
            f"You face {DIRECTIONS[observation['direction']]} and carry {_article(carried) or 'nothing'}.",
            "You see:",
            *(f"- {line}" for line in _seen(cells, middle, last)),
        ]
        return "\n".join(lines if self.view is View.TEXT else [*lines, _draw_grid(cells, middle, last)])

    def state_key(self) -> str:
        """Return a key of the grid, the agent, the carried object, and the mission."""
        carried = self.world.carrying.encode() if self.world.carrying else None
        state = [self.world.hash(size=64), carried, self.world.mission]
        return hashlib.blake2b(repr(state).encode(), digest_size=16).hexdigest()

    def _cells(self, image: np.ndarray[Any, Any]) -> list[list[str]]:
        """Return the view by column and row, in words: ``red key``, ``locked blue door``, ``wall``."""
        return [[self._words(*map(int, cell)) for cell in column] for column in image]

    def _words(self, kind: int, colour: int, state: int) -> str:
        name: str = self._constants.IDX_TO_OBJECT[kind]
        if name in (UNSEEN, EMPTY, WALL, FLOOR, "lava"):
            return name
        words = f"{self._constants.IDX_TO_COLOR[colour]} {name}"
        return f"{DOOR_STATES[state]} {words}" if name == DOOR else words


def _seen(cells: list[list[str]], middle: int, last: int) -> list[str]:
    """Return the things in view, near ones first, and the nearest walls in the three directions of the agent."""
    found: list[tuple[int, str]] = []
    for column, kinds in enumerate(cells):
        for row, kind in enumerate(kinds):
            right, ahead = column - middle, last - row
            is_wall_aside = kind == WALL and right != 0 and ahead != 0
            if kind not in (UNSEEN, EMPTY, FLOOR) and (right or ahead) and not is_wall_aside:
                found.append((abs(right) + ahead, f"{_article(kind)} {_place(right, ahead)}"))
    walls: dict[str, str] = {}
    things = []
    for _, line in sorted(found):
        if line.startswith("a wall"):
            walls.setdefault(next(side for side in (AHEAD, LEFT, RIGHT) if side in line), line)
        else:
            things.append(line)
    return things + list(walls.values()) or ["nothing"]


def _place(right: int, ahead: int) -> str:
    side = RIGHT if right > 0 else LEFT
    parts = [f"{_steps(ahead)} {AHEAD if not right else 'ahead'}"] if ahead else []
    return " and ".join(parts + ([f"{_steps(abs(right))} {side}"] if right else []))


def _steps(count: int) -> str:
    return f"{count} step{'s' if count > 1 else ''}"


def _article(words: str) -> str:
    """Add an article: ``a red key``, ``an open red door``; empty for an empty cell."""
    if words in (EMPTY, UNSEEN, FLOOR):
        return ""
    return words if words == "lava" else f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _draw_grid(cells: list[list[str]], middle: int, last: int) -> str:
    rows = [[_letter(column[row]) for column in cells] for row in range(last + 1)]
    rows[last][middle] = "^"
    return "\n".join(" ".join(row) for row in rows)


def _letter(words: str) -> str:
    kind = words.rpartition(" ")[2]
    return LETTERS.get(kind, kind[0])


def _world(env_id: str, options: dict[str, Any]) -> Any:
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # suppresses its banner
    EXTRA.load()
    try:
        env = gymnasium.make(env_id, disable_env_checker=True, **options)
    except (gymnasium.error.Error, TypeError, AssertionError) as error:
        raise UsageError(f"the world {env_id} of minigrid cannot be created", got=error) from error
    if not hasattr(env.unwrapped, "agent_view_size"):
        raise UsageError("this is not a world of minigrid", got=env_id, hint="use the environment gymnasium for others")
    return env


SPEC = EnvironmentSpec(
    name="minigrid",
    make=MiniGrid,
    tasks=functools.partial(seed_tasks, "minigrid"),
    description=(
        "The worlds of minigrid (MiniGrid and BabyAI) as text: rooms with keys, doors and a mission, seen from inside."
        " Option env_id: a world's id; view: text or grid; other options are the world's own."
    ),
    instructions=(
        "You are in a world of square cells and have a mission. You see what is in front of you. Each turn,"
        " answer with one action: left or right turns you on the spot, forward takes one step, pickup takes the"
        " object in front of you, drop puts down what you carry, toggle opens or closes what is in front of you (a"
        " locked door needs its key), and done says that the mission is complete. Some worlds have fewer actions."
    ),
    reward_range=(-1.0, 1.0),
    isolation=Isolation.THREAD,
    options={"env_id": "MiniGrid-Empty-5x5-v0", "view": View.TEXT.value},
    extra=EXTRA,
)
