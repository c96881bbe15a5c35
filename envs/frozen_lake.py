"""Gymnasium's FrozenLake as text: a new map per seed, without slipping, with start and goal in any cells."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import random
from collections import deque
from collections.abc import Mapping
from typing import Any

from agentrl.envs.content_space import ContentSpace
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import UsageError
from agentrl.message import Content, text_of
from agentrl.task import seed_tasks

from .choices import choose
from .pictures import (
    Colour,
    Field,
    Fields,
    ObservationForm,
    Shape,
    legend,
    observation_form,
    shows_images,
    with_picture,
)
from .splits import split_of_checksum, split_of_seed
from .text_adapter import TextAdapter

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Change of row and column by move, in the order of FrozenLake's action numbers."""
AGENT, START, ICE, HOLE, GOAL = "P", "S", "F", "H", "G"
MAX_STEPS = 40
SIZE = 5
MAX_SIZE = 32
HOLES = 0.2
"""Probability that a cell is a hole, as in Gymnasium's maps."""
FIELDS: Fields = {
    AGENT: Field(legend="you are a red disc", ground=Colour.LIGHT_BLUE, shapes=((Shape.DISC, Colour.RED),)),
    "S": Field(legend="the start is a grey frame", ground=Colour.LIGHT_BLUE, shapes=((Shape.FRAME, Colour.GREY),)),
    "F": Field(legend="ice is light blue", ground=Colour.LIGHT_BLUE),
    HOLE: Field(legend="a hole is dark blue", ground=Colour.DARK_BLUE),
    GOAL: Field(
        legend="the goal is a yellow square", ground=Colour.LIGHT_BLUE, shapes=((Shape.SQUARE, Colour.YELLOW),)
    ),
}
_DRAWS = 100
"""Maximum number of maps that are drawn to find one of the wanted split; few maps of two by two cells exist."""


class Layout(enum.StrEnum):
    """Positions of the start and the goal."""

    ANYWHERE = "anywhere"
    """Any two cells whose shortest way has at least `FrozenLake.size` - 1 steps: no fixed sequence of moves fits."""
    CORNERS = "corners"
    """Top left and bottom right, as in Gymnasium. One sequence of six moves solves almost half the maps of size 4."""


class FrozenLake(TextAdapter):
    """Walk over the ice to the goal without falling into a hole; reward 1 at the goal.

    The checksum of a map decides its split, and a seed draws maps until one belongs to the split of its range
    (`SeedTasks`): with sides of four or more cells, no two splits share a map.

    Args:
        size: Rows and columns of the map.
        layout: ``anywhere`` for a start and a goal in any cells, or ``corners`` for Gymnasium's.
        max_steps: Steps after which an episode is truncated.
        observation: ``text``, or ``image`` for a picture of the map.
    """

    inner: FrozenLakeEnv

    def __init__(
        self,
        *,
        size: int = SIZE,
        layout: str = Layout.ANYWHERE,
        max_steps: int = MAX_STEPS,
        observation: str = ObservationForm.TEXT,
    ) -> None:
        self.form = observation_form(observation, of="frozen_lake")
        if not 2 <= size <= MAX_SIZE:
            raise UsageError("the frozen lake has the wrong size", got=size, expected=f"2 to {MAX_SIZE}")
        self.size = size
        self.layout = choose(Layout, layout, "frozen_lake layout")
        self.rows = _draw_map(size, self.layout, seed=0)
        super().__init__(_lake(self.rows), actions=tuple(MOVES), max_steps=max_steps)
        if self.form is ObservationForm.IMAGE:
            self.observation_space = ContentSpace(8192)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Start on the map of the seed."""
        map_seed = int(self.np_random.integers(2**31)) if seed is None else seed
        self.rows = _draw_map(self.size, self.layout, map_seed)
        self.inner = _lake(self.rows)
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[Content, float, bool, bool, dict[str, Any]]:
        """Move one field; the final info says whether the goal was reached."""
        shown, reward, terminated, truncated, info = super().step(action)
        return shown, reward, terminated, truncated, {**info, "success": reward > 0}

    def describe(self, observation: Any) -> str:
        """Return the map, with the agent on it."""
        rows = [list(row) for row in self.rows]
        row, column = divmod(int(observation), self.size)
        rows[row][column] = AGENT
        return "\n".join(" ".join(row) for row in rows)

    def show(self, observation: Any, *, before: str = "") -> Content:
        """Return the map in the chosen form; the first picture comes with a legend."""
        if self.form is ObservationForm.TEXT:
            return super().show(observation, before=before)
        return with_picture(before if self._steps else legend(FIELDS), self.describe(observation), FIELDS)

    def expert(self) -> FrozenLakeExpert:
        """Return a policy that takes a shortest way."""
        return FrozenLakeExpert()

    def state_key(self) -> str:
        """Return a key of map and position."""
        return hashlib.blake2b(json.dumps([self.rows, int(self.inner.s)]).encode(), digest_size=16).hexdigest()

    def snapshot(self) -> dict[str, Any]:
        """Return the episode as JSON types."""
        return {"map": list(self.rows), "position": int(self.inner.s), "steps": self._steps}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        self.rows = list(snapshot["map"])
        self.size = len(self.rows)
        self.inner = _lake(self.rows)
        self.inner.reset()
        self.inner.s = self._observation = snapshot["position"]
        self._steps = snapshot["steps"]


class FrozenLakeExpert:
    """Expert that reads the map and walks a shortest way around the holes."""

    def act(self, observation: Content) -> str:
        """Return the first move of a shortest way.

        Raises:
            UsageError: the text contains no map, or no path leads to the goal.
        """
        way = shortest_way(_read_map(text_of(observation)), AGENT)
        if not way:
            raise UsageError("no path leads to the goal", got=repr(observation))
        return way[0]


def shortest_way(fields: Mapping[tuple[int, int], str], begin: str) -> list[str] | None:
    """Find a shortest way from the field with the letter `begin` to the goal; ``None`` if there is none."""
    start = next((place for place, field in fields.items() if field == begin), None)
    queue = deque([] if start is None else [(start, list[str]())])
    seen = {start}
    while queue:
        (row, column), way = queue.popleft()
        if fields[row, column] == GOAL:
            return way
        for name, (down, right) in MOVES.items():
            place = (row + down, column + right)
            if fields.get(place, HOLE) != HOLE and place not in seen:
                seen.add(place)
                queue.append((place, [*way, name]))
    return None


def _read_map(text: str) -> dict[tuple[int, int], str]:
    rows = [line.split() for line in text.splitlines() if set(line) <= set("PSFHG ")]
    return {(row, column): field for row, fields in enumerate(rows) for column, field in enumerate(fields)}


def _draw_map(size: int, layout: Layout, seed: int) -> list[str]:
    rng, split = random.Random(f"frozen_lake/{seed}"), split_of_seed(seed)
    rows: list[str] = []
    for _ in range(_DRAWS):
        if layout is Layout.CORNERS:
            rows = generate_random_map(size, seed=rng.randrange(2**31))
        else:
            rows = _map_from_anywhere(size, rng)
        if split_of_checksum(hashlib.blake2b("".join(rows).encode()).digest()[0]) == split:
            break
    return rows


def _map_from_anywhere(size: int, rng: random.Random) -> list[str]:
    """Draw a map whose start and goal are at least `size` - 1 steps apart."""
    places = [(row, column) for row in range(size) for column in range(size)]
    while True:
        fields = {place: HOLE if rng.random() < HOLES else ICE for place in places}
        start, goal = rng.sample(places, 2)
        fields |= {start: START, goal: GOAL}
        if len(shortest_way(fields, START) or ()) >= size - 1:
            return ["".join(fields[row, column] for column in range(size)) for row in range(size)]


def _lake(rows: list[str]) -> FrozenLakeEnv:
    return FrozenLakeEnv(desc=rows, is_slippery=False)


SPEC = EnvironmentSpec(
    name="frozen_lake",
    make=FrozenLake,
    tasks=functools.partial(seed_tasks, "frozen_lake"),
    description=(
        "Gymnasium's FrozenLake through the text adapter: find the way over the ice on a new map each time, from any"
        " cell to any other. The best fixed sequence of moves solves about one map in eight. Options: size (2 to 32),"
        " layout (anywhere or corners), observation (text or image)."
    ),
    instructions=(
        "You walk on a frozen lake to the goal. The map shows where you are (P), your start (S), ice (F), holes"
        " (H) and the goal (G). Each turn, move one step left, down, right or up. Walk around the holes: if you"
        " step into one, you lose."
    ),
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.INLINE,
    images_of=shows_images,
    options={"size": SIZE},
    scores={"random": 0.07, "blind": 0.13, "expert": 1.0},
    version=1,
)
