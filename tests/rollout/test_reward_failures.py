"""Reward functions and scorers that fail: never a reward of 0, and the message names the function, file and line."""

import asyncio
import functools
import math
import threading

import pytest
import torch
from support.rewards import TASK, episode, scored

from agentrl.errors import EnvironmentFailure, Outcome, RewardFailure
from agentrl.reward import Score, Scorer, defined_in
from agentrl.rollout.env_workers import ThreadWorker
from agentrl.rollout.reward_functions import FunctionReward


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, r"NoneType None.*Annotate it with -> float \| None"),
        ("1.0", "str '1.0'"),
        (torch.ones(2), "Tensor tensor"),
        (math.nan, "float nan"),
        (math.inf, "float inf"),
        (10**400, "int an int of 1329 bits"),
        (1e308, "float 1e"),
        ([1.0], "list"),
        ((1.0, {}), "tuple"),
    ],
)
async def test_what_is_no_reward_names_function_file_line_and_task(named, value, words):
    named(wrong=lambda trajectory, task: value)
    place = r"reward function wrong \(.*test_reward_failures.py line \d+\) on task t-1 did not return a reward"
    with pytest.raises(EnvironmentFailure, match=f"(?s){place}: got {words}"):
        await scored("wrong")


def broken(trajectory, task):
    return task.ground_truth["answer"]


async def broken_later(trajectory, task):
    await asyncio.sleep(0)
    raise SystemExit(0)


async def interrupted(trajectory, task):
    await asyncio.sleep(0)
    raise KeyboardInterrupt


async def cancelled(trajectory, task):
    inner = asyncio.ensure_future(asyncio.sleep(60))
    inner.cancel()
    await inner


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (broken, r"TypeError: .*It was raised in .*test_reward_failures.py line \d+: return task.ground_truth\["),
        (broken_later, r"SystemExit: 0.*line \d+: raise SystemExit"),
        (interrupted, r"KeyboardInterrupt\. It was raised in .*line \d+: raise KeyboardInterrupt"),
        (cancelled, "a coroutine that was cancelled from within"),
        (functools.partial(broken), "TypeError"),
        (lambda completions: [1.0, 2.0], "expected a list of one number"),
        (lambda completions, missing: [1.0], "missing 1 required positional argument: 'missing'"),
        (lambda solution_str: {"points": 1}, "expected a number, or a dictionary with a score"),
    ],
)
async def test_what_a_function_raises_is_a_failure_that_names_it(named, function, words):
    named(theirs=function)
    with pytest.raises(EnvironmentFailure, match=f"(?s)reward function theirs .*on task t-1 failed: got .*{words}"):
        await scored("theirs")


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_function_that_hangs_misses_its_deadline(is_async):
    ended = threading.Event()

    async def waits(trajectory, task):
        await asyncio.sleep(60)

    thread = ThreadWorker()
    function = waits if is_async else lambda trajectory, task: ended.wait(60)
    reward = FunctionReward("slow", function, {}, thread, deadline_s=0.02)
    with pytest.raises(RewardFailure, match=r"function slow .*missed its deadline: got no answer in 0.02 s"):
        await reward.score(episode(), TASK)
    ended.set()
    await thread.close()


class Wordy(Scorer):
    def __init__(self, verdict=None):
        self.verdict = verdict

    async def score(self, trajectory, task):
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (0.5, "did not return a score: got float 0.5"),
        (None, "did not return a score: got NoneType"),
        (Score(reward="1"), "gave an invalid reward: got str '1'"),
        (Score(reward=1.0, components={"style": math.nan}), "gave an invalid style: got float nan"),
        (Score(reward=1.0, sources={"style": math.inf}), "gave an invalid style: got float inf"),
        (
            Score(reward=1.0, components={1: 0.5}),
            "gave components without names: got {1: 0.5}",
        ),
        (KeyError("x"), r"failed: got KeyError: 'x'.*It was raised in .*test_reward_failures.py line \d+: raise"),
    ],
)
async def test_a_scorer_that_fails_is_named_with_its_file_and_line(make_runner, play, worlds, verdict, words):
    trajectory = await play(make_runner(worlds.Corridor, "forward", scorer=Wordy(verdict)))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.REWARD_ERROR, None)
    start, _, rest = trajectory.error.partition(" on task t ")
    assert start.startswith("Wordy (")
    assert "test_reward_failures.py line" in start
    with pytest.raises(EnvironmentFailure, match=f"(?s){words}"):
        raise EnvironmentFailure(rest)


def test_a_function_has_a_location_even_if_its_file_was_edited(tmp_path):
    file = tmp_path / "cell.md"
    file.write_text("(((\n")
    defined = {}
    exec(compile("\ndef reward(trajectory, task):\n    return 1\n", str(file), "exec"), defined)
    assert str(defined_in(defined["reward"])) == f"{file} line 2"
