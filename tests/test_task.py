from __future__ import annotations

import pytest

from agentrl.errors import UsageError
from agentrl.task import SeedTasks, TaskCursor


def test_splits_of_seed_tasks_share_no_seed() -> None:
    seeds = {split: {SeedTasks("x", split, 50)[i].seed for i in range(50)} for split in SeedTasks.SPLITS}
    assert len(set.union(*seeds.values())) == 150


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


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        TaskCursor(SeedTasks("x", size=0), seed=1)
