"""Playing a panel: order, concurrency, and going on after an interruption."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.errors import Outcome, UsageError
from agentrl.evaluation.episode import EpisodeStore, EvaluatedEpisode
from agentrl.evaluation.panel import Slot, choose_tasks, slots
from agentrl.evaluation.play import play_all
from agentrl.task import SeedTasks, Task
from agentrl.trajectory import Trajectory

TASKS = choose_tasks(SeedTasks("world", size=20), 4, seed=0)


class FakePlayer:
    """Gives the outcomes it was told, and notes who was at play together."""

    def __init__(self, failing: frozenset[str] = frozenset()) -> None:
        self.failing = failing
        self.played: list[tuple[str, int]] = []
        self.running = self.most_running = 0

    async def __call__(self, slot: Slot) -> Trajectory:
        self.played.append((slot.task.id, slot.sample))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        failed = slot.task.id in self.failing
        return Trajectory(
            id=f"{slot.task.id}/{slot.sample}",
            task_id=slot.task.id,
            environment="world",
            seed=slot.task.seed,
            group_id=slot.task.id,
            outcome=Outcome.ENGINE_ERROR if failed else Outcome.FINISHED,
            success=None if failed else True,
            reward=None if failed else 1.0,
        )


async def test_every_slot_is_played_once_in_order_and_never_too_many_at_once() -> None:
    player = FakePlayer()
    panel = slots(TASKS, 3)
    episodes = await play_all(panel, player, concurrency=2)
    assert [(e.task_id, e.sample) for e in episodes] == [(s.task.id, s.sample) for s in panel]
    assert len(player.played) == 12
    assert player.most_running == 2


async def test_machine_failures_are_reported_and_do_not_stop_the_others() -> None:
    episodes = await play_all(slots(TASKS, 1), FakePlayer(frozenset({TASKS[1].id})), concurrency=8)
    assert [e.is_measured for e in episodes] == [True, False, True, True]


async def test_finished_episodes_are_found_and_failed_ones_are_played_again(tmp_path: Path) -> None:
    file = tmp_path / "episodes.jsonl"
    store = EpisodeStore(file)
    await play_all(slots(TASKS, 1), FakePlayer(frozenset({TASKS[2].id})), concurrency=1, store=store)
    store.close()
    file.write_bytes(file.read_bytes() + b'{"task_id": "cut sho')

    player = FakePlayer()
    store = EpisodeStore(file)
    episodes = await play_all(slots(TASKS, 2), player, concurrency=4, store=store)
    store.close()
    assert sorted(player.played) == sorted([(TASKS[2].id, 0), *((task.id, 1) for task in TASKS)])
    assert all(episode.is_measured for episode in episodes)
    assert EpisodeStore(file).find(TASKS[2].id, 0) is not None


async def test_what_stops_the_store_stops_the_evaluation_with_one_error(tmp_path: Path) -> None:
    class FullStore(EpisodeStore):
        def add(self, episode: EvaluatedEpisode) -> None:
            raise UsageError("no space left")

    with pytest.raises(UsageError, match="no space left"):
        await play_all(slots(TASKS, 1), FakePlayer(), concurrency=4, store=FullStore(tmp_path / "e.jsonl"))


def test_a_larger_choice_begins_with_the_smaller_one() -> None:
    source = SeedTasks("world", size=50)
    assert choose_tasks(source, 30, seed=1)[:10] == choose_tasks(source, 10, seed=1)
    assert choose_tasks(source, 10, seed=1) != choose_tasks(source, 10, seed=2)
    assert len(choose_tasks(source, 80, seed=1)) == 50


def test_impossible_panels_are_refused() -> None:
    with pytest.raises(UsageError, match="nothing to evaluate"):
        choose_tasks(SeedTasks("world", size=5), 0, seed=0)
    with pytest.raises(UsageError, match="needs samples"):
        slots(TASKS, 0)
    twin = Task(id="same", environment="world")
    with pytest.raises(UsageError, match="two tasks of one id"):
        slots([twin, twin], 1)
