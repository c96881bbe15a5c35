"""Tasks of episodes, and task sources."""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from agentrl.errors import UsageError
from agentrl.message import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task: all data to start an episode, and to start the same one again."""

    id: str
    environment: str
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    """Text before the first observation; if there are `messages`, their texts."""
    messages: tuple[Message, ...] = ()
    """Prompt as messages, which begin the conversation; the last one is the user's."""
    ground_truth: Any = None
    """Correct answer, for reward functions; never shown to the policy."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the task's row, for reward functions; never shown to the policy."""
    type: str | None = None
    """Kind of task, for tables per type."""
    max_turns: int | None = None
    """Maximum number of turns, if lower than the agent's."""


@runtime_checkable
class TaskSource(Protocol):
    """An indexable collection of tasks; the same index is the same task in every process."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...


@runtime_checkable
class RemoteTaskSource(TaskSource, Protocol):
    """A task source on another machine: tasks are fetched before they are indexed, else the index blocks."""

    def holds(self, index: int) -> bool:
        """Return True if a task was fetched."""

    async def fetch(self, indices: Sequence[int]) -> None:
        """Fetch the tasks of some indices; the call may be abandoned."""


async def fetch_tasks(source: TaskSource, indices: Sequence[int]) -> None:
    """Fetch the tasks of some indices if the source is remote, so that indexing them does not block the event loop."""
    if isinstance(source, RemoteTaskSource):
        await source.fetch(indices)


@dataclass(frozen=True, slots=True)
class SeedTasks:
    """Tasks that differ only in their seed: the default for a plain Gymnasium environment.

    Splits do not overlap: each has its own range of `SPLIT_SIZE` seeds.
    """

    environment: str
    split: str = "train"
    size: int = 100_000
    SPLITS = ("train", "valid", "test")
    SPLIT_SIZE = 10_000_000

    def __post_init__(self) -> None:
        if self.split not in self.SPLITS:
            raise UsageError(
                f"environment {self.environment} has no split of this name",
                got=self.split,
                expected=" or ".join(self.SPLITS),
            )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise IndexError(index)
        seed = self.SPLITS.index(self.split) * self.SPLIT_SIZE + index
        return Task(id=f"{self.split}-{index}", environment=self.environment, seed=seed)


def seed_tasks(environment: str, split: str, **_options: Any) -> SeedTasks:
    """Return `SeedTasks`, with the signature of a spec's task source; the environment's options are ignored."""
    return SeedTasks(environment, split)


class TaskCursor:
    """Iterator over a source in a new random order each epoch (in its own order without `shuffle`), with a state."""

    def __init__(self, source: TaskSource, *, seed: int, shuffle: bool = True) -> None:
        if len(source) == 0:
            raise UsageError("the task source is empty", got="0 tasks", expected="at least one")
        self.source = source
        self._remote = source if isinstance(source, RemoteTaskSource) else None
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self._epoch = -1
        self._order: Sequence[int] = ()

    def next(self) -> Task:
        """Return the next task; never ends."""
        self.position += 1
        return self.at(self.position - 1)

    def at(self, position: int) -> Task:
        """Return the task at a position of the endless order, without moving the cursor."""
        return self.source[self._index(position)]

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.source))
        if not self.shuffle:
            return offset
        if epoch != self._epoch:
            self._epoch, self._order = epoch, _shuffle(self.seed, epoch, len(self.source))
        return self._order[offset]

    def misses(self, count: int) -> bool:
        """Return True if some of the next `count` tasks have to be fetched before they are drawn."""
        remote, positions = self._remote, range(self.position, self.position + count)
        return remote is not None and not all(remote.holds(self._index(position)) for position in positions)

    async def fetch(self, positions: Sequence[int]) -> None:
        """Fetch the tasks at some positions of the order if the source is remote."""
        await fetch_tasks(self.source, [self._index(position) for position in positions])

    def state_dict(self) -> dict[str, int]:
        """Return the state for `load_state_dict`."""
        return {"position": self.position, "seed": self.seed, "size": len(self.source)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position of another cursor over the same source."""
        if (state["seed"], state["size"]) != (self.seed, len(self.source)):
            raise UsageError(
                "the saved task cursor belongs to another task source",
                got=f"seed {state['seed']}, {state['size']} tasks",
                expected=f"seed {self.seed}, {len(self.source)} tasks",
            )
        self.position = state["position"]


@functools.lru_cache(maxsize=4)
def _shuffle(seed: int, epoch: int, size: int) -> Sequence[int]:
    """Return the order of an epoch; cached, because shuffling 100,000 tasks takes 0.05 s."""
    order = array("q", range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
