"""Exceptions of environments, loops, tools and scorers: the run continues and counts them."""

import asyncio
import contextlib
import functools
import signal

import pytest
from saboteur import ASYNCHRONOUS, FAULTS, PLACES, AsyncSaboteur, Saboteur, go_wrong, unmade

from agentrl.agent_loop import AgentLoop
from agentrl.env import Isolation
from agentrl.errors import EnvironmentFailure, Outcome, TrainingError
from agentrl.message import user
from agentrl.reward import Score, Scorer
from agentrl.rollout.events import RolloutObserver
from agentrl.rollout.runner import Assignment, play_all
from agentrl.rollout.scheduler import GroupScheduler
from agentrl.rollout.task_order import TaskSampler
from agentrl.task import Task, TaskSource
from agentrl.tool import Toolset

SYNCHRONOUS = [fault for fault in FAULTS if fault not in ASYNCHRONOUS]


@pytest.fixture(autouse=True)
def _interrupts_leave_a_trace():
    """As under `asyncio.run`: Ctrl-C is a signal handler of Python's, which can be told from code that raises."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


class Plan(TaskSource):
    """A good task after each bad one."""

    def __init__(self, plan):
        self.tasks = [
            Task(id=f"{number}-{fault}-{place}-{good}", environment="w", options={"fault": fault, "place": place})
            for number, (bad, at) in enumerate(plan)
            for good, (fault, place) in enumerate([(bad, at), ("none", "none")])
        ]

    def __len__(self):
        return len(self.tasks)

    def __getitem__(self, index):
        return self.tasks[index]


class Ends(RolloutObserver):
    def __init__(self):
        self.started, self.ended = [], []

    def on_start(self, trajectory):
        self.started.append(trajectory.id)

    def on_end(self, trajectory):
        self.ended.append(trajectory)


async def train_on(runner, plan, group_size=2):
    """Take a batch of one more group than there are good tasks, so that each bad task is played; its failures."""
    runner.observer, runner.retries = Ends(), 1
    scheduler = GroupScheduler(
        {"": runner},
        TaskSampler({"": Plan(plan)}, seed=3),
        group_size=group_size,
        batch=len(plan) + 1,
        max_concurrent=9,
    )
    async with asyncio.timeout(60):
        groups = await scheduler.next_batch()
        await asyncio.gather(*scheduler._episodes)  # the last bad ones
    counters, ends = runner.counters, runner.observer
    assert all(t.outcome is Outcome.FINISHED for group in groups for t in group.trajectories)
    assert all(len(group.trajectories) == group_size for group in groups)
    await scheduler.close()
    assert sorted(t.id for t in ends.ended) == sorted(ends.started)
    assert counters.running == 0
    assert sum(counters.outcomes.values()) == len(ends.ended)
    failed = [t for t in ends.ended if t.outcome in (Outcome.ENVIRONMENT_ERROR, Outcome.REWARD_ERROR)]
    assert {t.outcome for t in ends.ended if t not in failed} <= {Outcome.FINISHED, Outcome.CANCELLED}
    assert counters.groups_failed == len({t.group_id for t in failed})
    assert all(t.reward is None and t.error for t in failed)
    return failed


def named(failed):
    """The faults that the endings tell, by what they say."""
    return {(t.task_id.split("-")[1], t.task_id.split("-")[2]): t.error for t in failed}


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_no_exception_of_an_environment_ends_or_hangs_a_run(make_runner, isolation):
    plan = [(fault, place) for fault in SYNCHRONOUS for place in PLACES]
    errors = named(await train_on(make_runner(Saboteur, "x", isolation=isolation, workers=2), plan))
    assert errors.keys() == set(plan)
    for (fault, place), error in errors.items():
        said = "first this" if place == "discard" else type(FAULTS[fault]).__name__
        assert said in error or (fault, said) == ("stop", "StopIteration"), error


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_no_exception_of_an_asynchronous_environment_ends_or_hangs_a_run(make_runner, isolation):
    plan = [(fault, place) for fault in FAULTS for place in ("reset", "step", "discard", "state_key")]
    errors = named(await train_on(make_runner(AsyncSaboteur, "x", isolation=isolation, workers=2), plan))
    assert errors.keys() == set(plan)


class Loop(AgentLoop):
    """Raises what the task says."""

    async def run(self, episode):
        await episode.reset()
        await episode.open([user("x")]).generate()
        if episode.task.options["place"] == "loop":
            await go_wrong(episode.task.options["fault"])
        await episode.step("x")


class Reader(Scorer):
    async def score(self, trajectory, task):
        if task.options["place"] == "scorer":
            await go_wrong(task.options["fault"])
        return Score(reward=1.0)


@pytest.mark.slow
async def test_no_exception_of_a_loop_or_a_scorer_ends_or_hangs_a_run(make_runner):
    runner = make_runner(AsyncSaboteur, "x", scorer=Reader())
    runner.loop = Loop()
    plan = [(fault, place) for fault in FAULTS for place in ("loop", "scorer")]
    errors = named(await train_on(runner, plan))
    assert errors.keys() == set(plan)
    for (fault, place), error in errors.items():
        assert fault == "self" or error.startswith(
            "agent loop Loop failed" if place == "loop" else ("Reader (", "scoring task")
        )


UNMADE = [(Isolation.INLINE, fault) for fault in SYNCHRONOUS] + [
    (Isolation.THREAD, "exit"),
    (Isolation.PROCESS, "exit"),
]


@pytest.mark.parametrize(("isolation", "fault"), UNMADE)
async def test_an_environment_that_cannot_be_made_fails_its_episode(make_runner, play, isolation, fault):
    trajectory = await play(make_runner(functools.partial(unmade, fault), "x", isolation=isolation, workers=1))
    assert trajectory.outcome is Outcome.ENVIRONMENT_ERROR
    assert trajectory.error.startswith("making environment world failed: ")


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_exception_of_a_toolset_ends_an_evaluation(make_runner, fault):
    class Broken(Toolset):
        async def tools(self):
            await go_wrong(fault)

        async def close(self):
            pass

    runner = make_runner(AsyncSaboteur, "x", tools=[Broken()])
    task = Task(id="t", environment="w", options={"fault": "none", "place": "none"})
    assignments = [Assignment(task=task, group_id=str(number), member=0, seed=number) for number in range(3)]
    played = [t async for t in play_all(runner, assignments, concurrency=2)]
    assert [t.outcome for t in played] == [Outcome.ENVIRONMENT_ERROR] * 3


@pytest.mark.parametrize("fault", SYNCHRONOUS)
async def test_tasks_that_cannot_be_read_end_the_run_with_the_reason(make_runner, fault):
    class Torn(Plan):
        def __getitem__(self, index):
            if self.asked:
                raise FAULTS[fault]
            self.asked = True
            return super().__getitem__(1)

        asked = False

    runner = make_runner(AsyncSaboteur, "x")
    scheduler = GroupScheduler(
        {"": runner}, TaskSampler({"": Torn([("error", "step")] * 9)}, seed=0), group_size=1, batch=2, max_concurrent=1
    )
    async with asyncio.timeout(60):
        with pytest.raises(EnvironmentFailure, match=r"task 1 of the run failed: got "):
            await scheduler.next_batch()
    await scheduler.close()


async def test_an_episode_that_ends_without_a_result_ends_the_run(make_runner):
    class Lost:
        async def run(self, task, **_):
            raise asyncio.CancelledError

    runner = make_runner(AsyncSaboteur, "x")
    runner.run = Lost().run
    scheduler = GroupScheduler(
        {"": runner}, TaskSampler({"": Plan([("error", "step")])}, seed=0), group_size=1, batch=1
    )
    async with asyncio.timeout(60):
        with pytest.raises(TrainingError, match="was cancelled from outside the run"):
            await scheduler.next_batch()
    await scheduler.close()


async def test_a_second_cancellation_waits_for_the_first(make_runner, play):
    """An episode whose cleaning up takes its time is not left behind."""
    ended = []

    class Slow(AgentLoop):
        async def run(self, episode):
            await episode.reset()
            try:
                await asyncio.sleep(3600)
            finally:
                for _ in range(5):
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(0)
                ended.append(True)

    runner = make_runner(AsyncSaboteur, "x")
    runner.loop = Slow()
    episode = asyncio.create_task(play(runner, options={"fault": "none", "place": "none"}))
    for _ in range(20):
        await asyncio.sleep(0)
    episode.cancel()
    await asyncio.sleep(0)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert ended == [True]
    assert runner.counters.outcomes == {Outcome.CANCELLED: 1}
