"""Tasks of episodes, and task sources."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
import random
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.message import Message, ToolCall

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
DIGESTED = 10_000
"""Number of tasks in a digest, at equal distances; about ten microseconds each."""


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

    def copy(self) -> Task:
        """Return a copy with containers of its own, for code that may change them; see `copy_containers`."""
        messages = self.messages
        if any(message.tool_calls for message in messages):
            messages = tuple(replace(one, tool_calls=tuple(map(_copy_call, one.tool_calls))) for one in messages)
        options, ground_truth, columns = copy_containers((self.options, self.ground_truth, self.columns))
        return replace(self, messages=messages, options=options, ground_truth=ground_truth, columns=columns)

    def pick(self, count: int) -> int:
        """Return a number below `count` that is the same in all episodes of the task, for a choice between equals.

        It is the seed modulo `count`. Rows of a task file without a seed have seed 0; for these, the id decides.
        """
        return (self.seed or zlib.crc32(self.id.encode())) % count


def _copy_call(call: ToolCall) -> ToolCall:
    return replace(call, arguments=copy_containers(call.arguments))


_ATOMS = frozenset({str, int, float, bool, type(None), bytes})
"""Frequent types whose values cannot change."""
_CONTAINERS = (dict, list, set)


def copy_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Copy options for code that may change them; see `copy_containers`."""
    return copy_containers(dict(options))


def copy_containers(value: _T) -> _T:
    """Copy the dictionaries, lists and sets in a value at any depth; other objects, such as arrays, are shared.

    A container that occurs twice is copied once, so the copy of a circular value is circular.

    >>> given = {"words": ["a", "b"]}
    >>> copy_containers(given)["words"].append("c")
    >>> given
    {'words': ['a', 'b']}
    """
    copies: dict[int, Any] = {}
    unfinished: list[Any] = []

    def start(item: Any) -> Any:
        """Copy a container, whose items are copied later; return any other object itself."""
        if isinstance(item, _CONTAINERS):
            if id(item) not in copies:
                copies[id(item)] = own = copy.copy(item)
                if item and not isinstance(item, set):  # the items of a set cannot change
                    unfinished.append(own)
            return copies[id(item)]
        if isinstance(item, MappingProxyType):
            if id(item) not in copies:
                unfinished.append(own := dict(item))
                copies[id(item)] = MappingProxyType(own)
            return copies[id(item)]
        if isinstance(item, tuple):
            items = [one if type(one) in _ATOMS else start(one) for one in item]
            if any(own is not one for own, one in zip(items, item, strict=True)):
                return item._make(items) if hasattr(item, "_make") else tuple(items)
        return item

    result = start(value)
    while unfinished:
        own = unfinished.pop()
        for key, item in own.items() if isinstance(own, dict) else enumerate(own):
            if type(item) not in _ATOMS:
                own[key] = start(item)
    return result  # type: ignore[no-any-return]


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


class TaskBuffer:
    """Bounded buffer of proposed tasks, by kind. When a kind is full, its oldest task is dropped.

    >>> buffer = TaskBuffer(capacity=2)
    >>> [buffer.add("sum", {"a": a}) for a in (1, 2, 2, 3)]
    [True, True, False, True]
    >>> [buffer.next("sum", random.Random(0)) for _ in range(2)]
    [{'a': 3}, {'a': 2}]

    Args:
        capacity: Maximum number of tasks of a kind.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise UsageError("the capacity of a task buffer is too small", got=capacity, expected="at least 1")
        self.capacity = capacity
        self._tasks: dict[str, dict[str, dict[str, Any]]] = {}
        """Tasks of each kind by their JSON, the oldest first."""
        self._new: dict[str, list[str]] = {}
        """Keys of each kind's tasks that `next` has not returned yet, the oldest first."""

    def __len__(self) -> int:
        return sum(map(len, self._tasks.values()))

    def add(self, kind: str, task: Mapping[str, Any]) -> bool:
        """Add a task; return False for one that the buffer has already."""
        key, tasks, new = _key(task), self._tasks.setdefault(kind, {}), self._new.setdefault(kind, [])
        if key in tasks:
            return False
        if len(tasks) == self.capacity:
            oldest = next(iter(tasks))
            del tasks[oldest]
            if oldest in new:
                new.remove(oldest)
        tasks[key] = dict(task)
        new.append(key)
        return True

    def next(self, kind: str, rng: random.Random) -> dict[str, Any] | None:
        """Return the newest task that was not returned yet, else a random one; ``None`` if the kind has none."""
        new, tasks = self._new.get(kind), self._tasks.get(kind)
        if not tasks:
            return None
        return tasks[new.pop() if new else rng.choice(list(tasks))]

    def sample(self, kind: str, count: int, rng: random.Random) -> list[dict[str, Any]]:
        """Return up to `count` different random tasks of a kind."""
        tasks = list(self._tasks.get(kind, {}).values())
        return rng.sample(tasks, min(count, len(tasks)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict` in plain JSON types."""
        places = {kind: {key: place for place, key in enumerate(tasks)} for kind, tasks in self._tasks.items()}
        return {
            "tasks": {kind: list(tasks.values()) for kind, tasks in self._tasks.items()},
            "new": {kind: [places[kind][key] for key in keys] for kind, keys in self._new.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; a smaller buffer keeps the newest tasks."""
        self._tasks, self._new = {}, {}
        for kind, tasks in state["tasks"].items():
            kept = range(max(0, len(tasks) - self.capacity), len(tasks))
            self._tasks[kind] = {_key(tasks[number]): dict(tasks[number]) for number in kept}
            self._new[kind] = [_key(tasks[number]) for number in state["new"][kind] if number in kept]


def _key(task: Mapping[str, Any]) -> str:
    return json.dumps(task, sort_keys=True)


class ProposedTasks(ABC):
    """A task source that grows by tasks which episodes propose; a run's checkpoint contains its state.

    Every second task is a request for a new task, and the kinds take turns. The others are proposed before: the newest
    that was not a task yet, or else a random one. `agentrl.rollout.task_order.TaskSampler` adds the proposals after
    each training step, so that the tasks of a step do not depend on the speed of its episodes.

    The tasks have no messages, and their fields are plain JSON types.

    Args:
        capacity: Maximum number of proposed tasks of each kind that are kept.
        kinds: Kinds of tasks; with several, each proposal has its ``kind``.
        size: Length of the order of tasks.
    """

    def __init__(self, *, capacity: int, kinds: Sequence[str] = ("task",), size: int = 100_000) -> None:
        self._kinds, self._size = tuple(kinds), size
        self._buffer = TaskBuffer(capacity)
        self._draws = 0

    @abstractmethod
    def request(self, kind: str, rng: random.Random, buffer: TaskBuffer) -> Task:
        """Make a task that asks for a new one; it may show tasks of the buffer."""

    @abstractmethod
    def pose(self, proposal: Mapping[str, Any], rng: random.Random) -> Task:
        """Make a task from one of the objects in ``info["proposals"]``."""

    def stand_in(self, kind: str, rng: random.Random) -> Mapping[str, Any] | None:
        """Return an object to pose while nothing of a kind was proposed; ``None`` to request a task instead."""
        return None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Task:
        """Return the task at an index of the order if nothing was proposed yet."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._make(index, random.Random(f"task {index}"), TaskBuffer(1))

    def draw(self, index: int) -> Task:
        """Draw the next task; the index only varies the random choices."""
        self._draws += 1
        return self._make(self._draws - 1, random.Random(f"draw {self._draws} {index}"), self._buffer)

    def _make(self, number: int, rng: random.Random, buffer: TaskBuffer) -> Task:
        kind = self._kinds[number // 2 % len(self._kinds)]
        if number % 2 and (proposal := buffer.next(kind, rng) or self.stand_in(kind, rng)):
            return self.pose(proposal, rng)
        return self.request(kind, rng, buffer)

    def propose(self, proposals: Sequence[Mapping[str, Any]]) -> int:
        """Add ``info["proposals"]`` of the episodes of a training step; return how many are new.

        Raises:
            UsageError: one of them has an unknown kind.
        """
        return sum([self._buffer.add(self._kind_of(proposal), proposal) for proposal in proposals])

    def _kind_of(self, proposal: Mapping[str, Any]) -> str:
        kind = proposal.get("kind", self._kinds[0])
        if kind not in self._kinds:
            raise UsageError(
                'a task in info["proposals"] has an unknown kind', got=repr(kind), expected=", ".join(self._kinds)
            )
        return str(kind)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict` in plain JSON types."""
        return {"draws": self._draws, "buffer": self._buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._draws = state["draws"]
        self._buffer.load_state_dict(state["buffer"])


def checked_proposals(environment: str, proposals: object) -> list[dict[str, Any]]:
    """Return ``info["proposals"]`` of an environment.

    Raises:
        EnvironmentFailure: it is not a list of objects in JSON types.
    """
    try:
        plain = json.loads(json.dumps(proposals, allow_nan=False))
        if isinstance(plain, list) and plain == proposals and all(isinstance(one, dict) for one in plain):
            return plain
    except (TypeError, ValueError, RecursionError):
        pass
    raise EnvironmentFailure(
        f'info["proposals"] of environment {environment} cannot be stored',
        got=repr(proposals)[:200],
        expected="a list of objects with text keys, of text, numbers, lists and objects",
    )


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


def tasks_digest(source: TaskSource) -> str | None:
    """Return a digest of the contents of a file's tasks, or of a list's; ``None`` for tasks that are generated."""
    own = getattr(source, "digest", None)
    if callable(own):
        return str(own())
    return contents_digest(source, task_contents) if isinstance(source, list | tuple) else None


def contents_digest(tasks: Sequence[_T], contents: Callable[[_T], Mapping[str, Any]]) -> str:
    """Return a digest of the contents of at most twice `DIGESTED` tasks; values that JSON does not have are equal."""
    digest = hashlib.blake2b(digest_size=8)
    for task in tasks[:: max(1, len(tasks) // DIGESTED)]:
        try:
            text = json.dumps(contents(task), default=lambda value: type(value).__name__, skipkeys=True)
        except (ValueError, RecursionError):  # a list of tasks in Python may contain circular or very deep values
            text = "?"
        digest.update(text.encode())
    return digest.hexdigest()


def task_contents(task: Task) -> dict[str, Any]:
    """Return what distinguishes a task from others of its environment, as a record for `contents_digest`."""
    messages = [[message.role, message.text] for message in task.messages]
    fixed = {"id": task.id, "seed": task.seed, "prompt": task.prompt, "messages": messages, "type": task.type}
    given = {"options": task.options, "ground_truth": task.ground_truth, "columns": task.columns}
    return fixed | {name: dict(value) if isinstance(value, Mapping) else value for name, value in given.items()}


class TaskCursor:
    """Iterator over a source in a new random order each epoch (in its own order without `shuffle`), with a state."""

    def __init__(self, source: TaskSource, *, seed: int, shuffle: bool = True) -> None:
        if len(source) == 0:
            raise UsageError("the task source is empty", got="0 tasks", expected="at least one")
        self.source = source
        self._remote = source if isinstance(source, RemoteTaskSource) else None
        self.proposed = source if isinstance(source, ProposedTasks) else None
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self._epoch = -1
        self._order: Sequence[int] = ()
        self._digest = functools.cache(lambda: tasks_digest(source))

    def next(self) -> Task:
        """Return the next task; never ends."""
        self.position += 1
        if self.proposed is not None:
            return self.proposed.draw(self._index(self.position - 1))
        return self.at(self.position - 1)

    def at(self, position: int) -> Task:
        """Return the task at a position of the endless order, without moving the cursor."""
        return self.source[self._index(position)]

    def has_tasks_of(self, other: TaskCursor) -> bool:
        """Return True if both cursors have the same tasks; not known of remote sources, whose tasks must be fetched."""
        own, others = self.source, other.source
        if self._remote is not None or len(own) != len(others):
            return False
        return task_contents(own[0]) == task_contents(others[0]) and self._digest() == other._digest()

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

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        source = {} if self.proposed is None else {"source": self.proposed.state_dict()}
        contents = {} if (digest := self._digest()) is None else {"tasks": digest}
        return {"position": self.position, "seed": self.seed, "size": len(self.source), **contents, **source}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of another cursor over the same source."""
        if (state["seed"], state["size"]) != (self.seed, len(self.source)):
            raise UsageError(
                "the saved task cursor belongs to another task source",
                got=f"seed {state['seed']}, {state['size']} tasks",
                expected=f"seed {self.seed}, {len(self.source)} tasks",
                hint="restore the file of the tasks, or start a new run from the model of this one",
            )
        self.position = state["position"]
        if state.get("tasks") not in (None, self._digest()):
            _log.warning(
                "the tasks of %s have changed since the checkpoint; the run continues at task %d of their order, with "
                "the tasks as they are now",
                self.source[0].environment,
                self.position,
            )
        if self.proposed is not None and "source" in state:
            self.proposed.load_state_dict(state["source"])


@functools.lru_cache(maxsize=4)
def _shuffle(seed: int, epoch: int, size: int) -> Sequence[int]:
    """Return the order of an epoch; cached, because shuffling 100,000 tasks takes 0.05 s."""
    order = array("q", range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
