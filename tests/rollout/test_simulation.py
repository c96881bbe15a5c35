"""The real scheduler in virtual time: what trains, what is dropped, and what the meter of the bias shows."""

import asyncio
import random
import time
from statistics import fmean

import pytest

import agentrl
from agentrl.config.derived import make_agent_loop
from agentrl.engine import SamplingParams
from agentrl.errors import Outcome
from agentrl.rollout.env_pool import EnvPool
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.scheduler import GroupScheduler
from agentrl.rollout.simulation import PlannedEpisode, VirtualTimeLoop, simulate
from agentrl.rollout.task_order import TaskSampler
from agentrl.rollout.waits import WaitTracker
from agentrl.task import SeedTasks

STEPS, BATCH, GROUP = 50, 8, 2


def slow_tasks(task, member):
    """Tasks have turns of 1 s; one in ten has twice as many turns, and one step of 60 s."""
    generator = random.Random(f"{task.id} {member}")
    slow = random.Random(task.id).random() < 0.1
    turns = generator.randint(3, 7) * (1 + slow)
    outside = [0.1] * turns
    outside[turns // 2] = 60.0 if slow else 0.1
    return PlannedEpisode(engine_s=[0.9] * turns, outside_s=outside, reward=float(not slow), success=not slow)


def run(staleness, order="windowed", plan=slow_tasks, **options):
    settings = {"steps": STEPS, "batch": BATCH, "group_size": GROUP, "train_s": 2.0, **options}
    return simulate(plan, max_staleness=staleness, batch_order=order, **settings)


def cohort(staleness):
    """Planned turns and whole seconds, by position, of the groups that have to train within the steps."""
    sampler = TaskSampler({"": SeedTasks("simulation", size=10**6)}, seed=0)
    found = {}
    for position in range(BATCH * (STEPS - staleness)):
        task = sampler.next().task
        plans = [slow_tasks(task, member) for member in range(GROUP)]
        found[position] = (
            fmean(len(plan.engine_s) for plan in plans),
            fmean(sum(plan.engine_s) + sum(plan.outside_s) for plan in plans),
        )
    return found


def bias(result, staleness):
    """Relative differences of turns and seconds between the trained part of the cohort and all of it."""
    planned = cohort(staleness)
    trained = [planned[group.position] for group in result.groups if group.position in planned]
    return [fmean(t[i] for t in trained) / fmean(p[i] for p in planned.values()) - 1 for i in (0, 1)]


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_every_started_group_trains_in_a_windowed_run(staleness):
    result = run(staleness)
    assert result.dropped == 0
    assert cohort(staleness).keys() <= {group.position for group in result.groups}
    assert max(map(abs, bias(result, staleness))) < 0.02
    assert (result.bias["bias/turns"], result.bias["time/bias/seconds"]) == (0.0, 0.0)
    for step in range(STEPS):
        groups = result.groups[step * BATCH : (step + 1) * BATCH]
        assert max(group.staleness(step, {}) for group in groups) <= staleness


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_a_greedy_run_drops_slow_groups_and_shows_the_bias(staleness):
    result = run(staleness, "greedy")
    assert result.dropped > 0.03 * STEPS * BATCH
    turns, seconds = bias(result, staleness)
    assert turns < -0.05
    assert seconds < -0.2
    assert result.bias["bias/turns"] < -0.02
    assert abs(result.bias["bias/turns"]) > result.bias["bias/turns_margin"] > 0
    assert result.bias["bias/success"] > 0.03
    assert result.seconds < run(staleness).seconds


def test_a_windowed_run_without_slow_episodes_is_as_fast_as_a_greedy_one():
    def even(task, member):
        turns = random.Random(f"{task.id} {member}").randint(2, 5)
        return PlannedEpisode(engine_s=[1.0] * turns, outside_s=[0.0] * turns)

    windowed, greedy = run(2, plan=even), run(2, "greedy", plan=even)
    assert windowed.seconds <= 1.02 * greedy.seconds
    assert windowed.dropped == 0


def test_idle_shares_by_hand():
    """Four turns of 1 s, then 6 s of training, one after the other; with a staleness of 1 they overlap."""

    def plan(task, member):
        return PlannedEpisode(engine_s=[1.0] * 4, outside_s=[0.0] * 4)

    alone = run(0, plan=plan, steps=10, train_s=5.0, sync_s=1.0)
    assert alone.seconds == pytest.approx(100.0)
    assert (alone.engine_idle, alone.trainer_idle) == (pytest.approx(0.6), pytest.approx(0.4))
    assert alone.requests == pytest.approx(0.4 * BATCH * GROUP)
    assert alone.steps_per_hour == pytest.approx(360)
    ahead = run(1, plan=plan, steps=10, train_s=5.0, sync_s=1.0)
    assert ahead.seconds == pytest.approx(64.0)


def test_virtual_time_passes_only_when_nothing_else_is_left():
    async def wait():
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asyncio.sleep(seconds, seconds)) for seconds in (3600.0, 0.5, 7200.0)]
        return loop.time(), [task.result() for task in tasks]

    began = time.monotonic()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(wait()) == (pytest.approx(7200.0), [3600.0, 0.5, 7200.0])
        with pytest.raises(RuntimeError, match="all tasks wait"):
            runner.run(asyncio.Event().wait())
    assert time.monotonic() - began < 60


class Hanging(agentrl.AsyncEnv):
    """The first world that is played hangs in its first step, in every attempt."""

    first = None

    async def reset(self, *, seed=None, options=None):
        Hanging.first = seed if Hanging.first is None else Hanging.first
        self.seed = seed
        return "Go.", {}

    async def step(self, action):
        if self.seed == Hanging.first:
            await asyncio.Event().wait()
        return "Bye.", 1.0, True, False, {}


def test_a_batch_waits_for_a_hanging_episode_no_longer_than_its_deadlines(make_spec, make_engine, renderer):
    async def play():
        Hanging.first = None
        clock = asyncio.get_running_loop().time
        pool = EnvPool(make_spec(Hanging), step_timeout_s=300.0, waits=WaitTracker(clock))
        policy = EngineEpisodePolicy(make_engine("x"), renderer, SamplingParams())
        loop = make_agent_loop("react_text", {"format": "plain"})
        runner = EpisodeRunner(pool=pool, loop=loop, policy=policy, retries=1)
        tasks = TaskSampler({"": SeedTasks("world", size=100)}, seed=0)
        scheduler = GroupScheduler({"": runner}, tasks, group_size=1, batch=2, max_staleness=1)
        batches = [[group.position for group in await scheduler.next_batch()]]
        before = clock()
        scheduler.set_version(1)
        batches.append([group.position for group in await scheduler.next_batch()])
        waited = clock() - before
        await scheduler.close()
        await runner.close()
        return batches, waited, runner.counters

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        batches, waited, counters = runner.run(play())
    assert batches == [[1, 2], [3, 4]]
    assert 600 <= waited < 700
    assert (counters.groups_failed, counters.groups_stale, counters.retries) == (1, 0, 1)
    assert counters.outcomes[Outcome.ENVIRONMENT_ERROR] == 2
