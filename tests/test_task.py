from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.task import ProposedTasks, SeedTasks, Task, TaskBuffer, TaskCursor, checked_proposals, copy_containers


def test_splits_of_seed_tasks_share_no_seed() -> None:
    seeds = {split: {SeedTasks("x", split, 50)[i].seed for i in range(50)} for split in SeedTasks.SPLITS}
    assert len(set.union(*seeds.values())) == 150


def test_tasks_choose_differently_with_and_without_seeds() -> None:
    """In a file without seeds, the same player always went first, and the same debater won every tie."""
    assert [SeedTasks("x", "test")[i].pick(2) for i in range(1, 5)] == [1, 0, 1, 0]
    without = [Task(id=str(number), environment="x").pick(3) for number in range(1, 301)]
    assert all(80 < without.count(choice) < 120 for choice in range(3))


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(UsageError, match="got tset, expected train or valid or test"):
        SeedTasks("x", "tset")


def test_a_cursor_visits_each_task_once_an_epoch_in_changing_order() -> None:
    cursor = TaskCursor(SeedTasks("x", size=20), seed=1)
    first = [cursor.next().id for _ in range(20)]
    second = [cursor.next().id for _ in range(20)]
    assert sorted(first) == sorted(second) != first != second


def test_a_restored_cursor_goes_on_exactly() -> None:
    cursor = TaskCursor(SeedTasks("x", size=7), seed=1)
    for _ in range(10):
        cursor.next()
    other = TaskCursor(SeedTasks("x", size=7), seed=1)
    other.load_state_dict(cursor.state_dict())
    assert [other.next() for _ in range(10)] == [cursor.next() for _ in range(10)]


def test_a_cursor_of_other_tasks_is_refused() -> None:
    state = TaskCursor(SeedTasks("x", size=7), seed=1).state_dict()
    with pytest.raises(UsageError, match="another task source"):
        TaskCursor(SeedTasks("x", size=8), seed=1).load_state_dict(state)


def rows(*prompts: str, **columns: Any) -> list[Task]:
    return [Task(id=str(i), environment="x", prompt=prompt, columns=columns) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    "changed", [rows("a", "b", "d"), rows("a", "c", "b"), rows("a", "b", "c", answer=2), rows("a", "b", "c", more=1)]
)
def test_other_tasks_in_the_same_file_are_reported(changed: list[Task], caplog: pytest.LogCaptureFixture) -> None:
    """NVIDIA-NeMo/RL#2519: a run continued in the middle of another data set without a word."""
    cursor = TaskCursor(rows("a", "b", "c", answer=1), seed=1)
    cursor.next()
    TaskCursor(rows("a", "b", "c", answer=1), seed=1).load_state_dict(cursor.state_dict())
    assert not caplog.messages
    other = TaskCursor(changed, seed=1)
    other.load_state_dict(cursor.state_dict())
    assert other.position == 1
    assert "the tasks of x have changed since the checkpoint; the run continues at task 1" in caplog.text


def test_a_state_of_an_earlier_version_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    TaskCursor(rows("a"), seed=1).load_state_dict({"position": 1, "seed": 1, "size": 1})
    assert not caplog.messages


def test_values_without_json_do_not_hinder_a_checkpoint() -> None:
    circular: list[Any] = []
    circular.append(circular)
    states = [TaskCursor(rows("a", x=x), seed=1).state_dict() for x in (object(), object(), {1, 2}, circular)]
    assert states[0] == states[1]


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        TaskCursor(SeedTasks("x", size=0), seed=1)


def test_a_buffer_keeps_the_newest_tasks_of_each_kind_once() -> None:
    buffer = TaskBuffer(3)
    assert [buffer.add("a", {"n": n}) for n in (0, 1, 1, 2, 3)] == [True, True, False, True, True]
    assert buffer.add("b", {"n": 0})
    assert len(buffer) == 4
    assert sorted(task["n"] for task in buffer.sample("a", 9, Random(0))) == [1, 2, 3]
    assert buffer.add("a", {"n": 0}), "it was dropped and comes again"
    with pytest.raises(UsageError, match="capacity of a task buffer"):
        TaskBuffer(0)


def test_new_tasks_come_first_and_then_random_ones() -> None:
    buffer = TaskBuffer(10)
    assert buffer.next("a", Random(0)) is None
    for n in range(4):
        buffer.add("a", {"n": n})
    assert [buffer.next("a", Random(0)) for _ in range(4)] == [{"n": n} for n in (3, 2, 1, 0)]
    assert {buffer.next("a", Random(seed))["n"] for seed in range(40)} == {0, 1, 2, 3}  # type: ignore[index]


@pytest.mark.parametrize("drawn", range(5))
def test_a_restored_buffer_goes_on_exactly(drawn: int) -> None:
    buffer, rng = TaskBuffer(3), Random(7)
    for n in range(5):
        buffer.add("ab"[n % 2], {"n": n})
    for _ in range(drawn):
        buffer.next("a", rng)
    other = TaskBuffer(3)
    other.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    for n in range(5, 9):
        assert buffer.add("a", {"n": n}) == other.add("a", {"n": n})
        assert buffer.next("a", Random(n)) == other.next("a", Random(n))
    assert buffer.state_dict() == other.state_dict()


def test_a_smaller_buffer_keeps_the_newest_tasks() -> None:
    buffer, smaller = TaskBuffer(3), TaskBuffer(2)
    for n in range(3):
        buffer.add("a", {"n": n})
    buffer.next("a", Random(0))
    smaller.load_state_dict(buffer.state_dict())
    assert smaller.state_dict() == {"tasks": {"a": [{"n": 1}, {"n": 2}]}, "new": {"a": [0]}}


@pytest.mark.parametrize(
    "proposals",
    ["text", {"a": 1}, [1], [{"a": object()}], [{"a": float("nan")}], [{1: 2}], [{"a": (1, 2)}], [{"a": {1}}], None],
)
def test_proposals_that_cannot_be_stored_are_refused(proposals: object) -> None:
    with pytest.raises(EnvironmentFailure, match="of environment w cannot be stored"):
        checked_proposals("w", proposals)


class Words(ProposedTasks):
    """Words to repeat, long and short ones."""

    def __init__(self) -> None:
        super().__init__(capacity=5, kinds=("long", "short"), size=9)

    def request(self, kind: str, rng: Random, buffer: TaskBuffer) -> Task:
        return Task(id=f"request {kind} {len(buffer)}", environment="w")

    def pose(self, proposal: Mapping[str, Any], rng: Random) -> Task:
        return Task(id=f"repeat {proposal['word']}", environment="w")


def test_requests_and_proposed_tasks_take_turns() -> None:
    words = Words()
    assert [words.draw(n).id for n in range(4)] == [f"request {kind} 0" for kind in ("long", "long", "short", "short")]
    assert words.propose([{"kind": "long", "word": "longer"}, {"kind": "short", "word": "a"}]) == 2
    drawn = [words.draw(n).id for n in range(4)]
    assert drawn == ["request long 2", "repeat longer", "request short 2", "repeat a"]
    assert [words[n].id for n in range(2)] == ["request long 0"] * 2, "an index does not depend on proposals"
    with pytest.raises(UsageError, match="unknown kind: got 'middle', expected long, short"):
        words.propose([{"kind": "middle", "word": "x"}])
    with pytest.raises(IndexError):
        words[9]


Pair = namedtuple("Pair", "left right")
DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]


def test_a_copy_of_containers_shares_everything_else() -> None:
    array, other = np.zeros(3), Random(1)
    given: dict[str, Any] = {
        "pair": Pair([1], "a"),
        "order": OrderedDict(a=[1]),
        "set": {1},
        "array": array,
        "other": [other],
    }
    given["fixed"] = MappingProxyType({"list": [1], "text": ("a", 1)})
    own = copy_containers(given)
    assert [type(value) for value in own.values()] == [type(value) for value in given.values()]
    assert own["array"] is array
    assert own["other"][0] is other
    assert own["fixed"]["text"] is given["fixed"]["text"]
    own["pair"].left.append(2)
    own["order"]["a"].append(2)
    own["set"].add(2)
    own["fixed"]["list"].append(2)
    assert (given["pair"], given["order"], given["set"]) == (Pair([1], "a"), OrderedDict(a=[1]), {1})
    assert given["fixed"]["list"] == [1]


def test_a_copy_keeps_which_containers_are_the_same() -> None:
    """A circular value would be copied without end, and a very deep one exceed Python's stack."""
    inner = [1]
    given: dict[str, Any] = {"one": inner, "two": inner}
    given["self"] = (given, [])
    given["view"] = MappingProxyType(given)
    own = copy_containers(given)
    assert own["one"] is own["two"] is not inner
    assert own["self"][0] is own
    assert own["view"]["view"] is own["view"]
    depth, level = 0, copy_containers(DEEP)
    while level:
        depth, level = depth + 1, level[0]
    assert depth == 5000
