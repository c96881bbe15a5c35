"""Rewards of functions: what they are called with, what counts as a number, how several are added."""

import asyncio
import itertools
import threading

import numpy as np
import pytest
import torch
from support.rewards import TASK, episode, exact, scored, slow_length

from agentrl.config.environment import AgentConfig
from agentrl.message import Message, ToolCall
from agentrl.reward import EnvironmentReward, Score
from agentrl.rollout.env_workers import ThreadWorker
from agentrl.rollout.reward_functions import find_reward
from agentrl.task import Task
from agentrl.trajectory import Trajectory


async def test_a_function_is_the_reward_and_a_component(named):
    named(exact=exact)
    assert await scored("exact") == Score(reward=1.0, components={"exact": 1.0}, sources={"exact": 1.0})


async def test_rewards_are_summed_with_weights_and_recorded_without_them(named):
    named(exact=exact, slow=slow_length)
    score = await scored(["exact", {"name": "slow", "weight": -0.5, "most": 32}, {"name": "environment", "weight": 2}])
    assert score.reward == 1.0 - 0.5 * 0.5 + 2 * 0.25
    assert score.components == {"exact": 1.0, "slow": 0.5, "environment": 0.25}
    assert score.sources == {"exact": 1.0, "slow": -0.25, "environment/step": 0.5}


async def test_the_environments_own_reward_counts_only_where_it_is_named(named):
    named(exact=exact)
    assert (await scored("exact", episode(text="?", reward=5.0))).reward == 0.0
    assert isinstance(find_reward(AgentConfig(), ThreadWorker()), EnvironmentReward)
    assert await scored({"name": "environment", "weight": 2}) == Score(
        reward=0.5, components={"environment": 0.25}, sources={"environment/step": 0.5}
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda trajectory, task, *, answer=42, prompt=None, completion=None: task.ground_truth == str(answer),
        lambda _, task: task.ground_truth == "42",
        lambda trajectory, _task: trajectory.final_text.endswith("42"),
        lambda *both: both[0].final_text.endswith(both[1].ground_truth),
        lambda one, two, /: one.final_text.endswith(two.ground_truth),
    ],
)
async def test_a_trajectory_and_a_task_come_first_in_functions_for_agentrl(named, function):
    named(own=function)
    assert (await scored("own")).reward == 1.0


async def test_annotations_tell_what_parameters_of_other_names_are(named):
    def annotated(answer: Trajectory, info: "Task"):
        return answer.final_text.endswith(info.ground_truth)

    named(annotated=annotated)
    assert (await scored("annotated")).reward == 1.0


@pytest.mark.parametrize(
    "value", [1, True, 1.0, np.float32(1), np.bool_(True), np.array([1.0]), torch.tensor(1.0), torch.tensor([1])]
)
async def test_what_counts_as_a_number(named, value):
    named(constant=lambda trajectory, task: value)
    assert (await scored("constant")).reward == 1.0


async def test_a_function_may_say_that_it_does_not_apply_if_it_declares_so(named):
    def sometimes(trajectory, task) -> float | None:
        return None

    def optionally(trajectory, task):
        return None

    optionally.__annotations__["return"] = "Optional[float]"
    named(sometimes=sometimes, optionally=optionally, exact=exact)
    assert await scored("optionally") == Score(reward=None)
    assert await scored("sometimes") == Score(reward=None)
    assert await scored(["sometimes", "exact"]) == Score(reward=1.0, components={"exact": 1.0}, sources={"exact": 1.0})


async def test_blocking_functions_run_one_at_a_time_in_a_thread(named):
    threads, running = set(), itertools.count()

    def counting(trajectory, task):
        threads.add(threading.get_ident())
        return next(running)

    named(counting=counting)
    thread = ThreadWorker()
    reward = find_reward(AgentConfig(reward="counting"), thread)
    scores = await asyncio.gather(*(reward.score(episode(), TASK) for _ in range(4)))
    await thread.close()
    assert sorted(score.reward for score in scores) == [0, 1, 2, 3]
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_functions_of_one_name_keep_their_modules_apart(named):
    named(**{"a:exact": exact, "b:exact": slow_length, "c:other": exact})
    reward = find_reward(AgentConfig(reward=["a:exact", "b:exact", "c:other"]), ThreadWorker())
    assert [part.name for part in reward._parts] == ["a:exact", "b:exact", "other"]


def test_tool_calls_are_read_from_the_answers():
    trajectory = episode()
    trajectory.answers.append(Message(role="assistant", tool_calls=(ToolCall(name="add", arguments={"a": 1}),)))
    assert [call.name for call in trajectory.tool_calls] == ["add"]
