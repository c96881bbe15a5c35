"""Environments, loops and rewards that change the task which they get: other episodes start from the same task."""

import copy

import gymnasium
import pytest
from agentrl.agent_loops.react_text import ReactText

from agentrl.config.environment import AgentConfig
from agentrl.message import Message, ToolCall
from agentrl.reward import GroupScorer, Score, Scorer
from agentrl.rollout.env_workers import EnvAdapter, ThreadWorker
from agentrl.rollout.reward_functions import FunctionReward, find_reward
from agentrl.rollout.runner import Assignment, play_all
from agentrl.task import Task


def make_task():
    call = ToolCall(name="look", arguments={"words": ["a"]})
    return Task(
        id="t",
        environment="world",
        options={"words": ["a"], "deep": {"rows": [{"left": {1, 2}}]}},
        ground_truth=["a"],
        columns={"answers": [("a", ["a"])]},
        messages=(Message(role="assistant", tool_calls=(call,)), Message(role="user", content="?")),
    )


def change(task):
    """Change everything in a task that Python lets one change."""
    change_options(task.options)
    task.ground_truth.append("b")
    task.columns["answers"][0][1].append("b")
    task.messages[0].tool_calls[0].arguments["words"].append("b")


def change_options(options):
    options["words"].append("b")
    options["deep"]["rows"][0]["left"].clear()
    del options["deep"]
    options["new"] = 1


class Changing(gymnasium.Env):
    """Ends after one step; `words` are its constructor's."""

    observation_space = action_space = gymnasium.spaces.Text(100)
    action_hint = "anything"

    def __init__(self, words=()):
        self.words = words

    def reset(self, *, seed=None, options=None):
        change_options(options)
        return "Go.", {}

    def step(self, action):
        return "Done.", 1.0, True, False, {}


class Calm(Changing):
    def reset(self, *, seed=None, options=None):
        return "Go.", {}


class ChangingLoop(ReactText):
    async def run(self, episode):
        change(episode.task)
        await super().run(episode)


class ChangingScorer(Scorer):
    async def score(self, trajectory, task):
        change(task)
        return Score(reward=1.0)


class ChangingGroupScorer(GroupScorer):
    async def score_group(self, trajectories, task):
        change(task)
        return [Score(reward=1.0) for _ in trajectories]


def changing_reward(trajectory, task):
    change(task)
    return 1.0


def changing_columns(completions, answers, **columns):
    answers[0][0][1].append("b")
    return [1.0]


def function(reward):
    return FunctionReward("changing", reward, {}, ThreadWorker())


@pytest.mark.parametrize(
    ("environment", "loop", "scorer"),
    [
        (Changing, None, None),
        (Calm, ChangingLoop(format="plain"), None),
        (Calm, None, ChangingScorer()),
        (Calm, None, ChangingGroupScorer()),
        (Calm, None, function(changing_reward)),
        (Calm, None, function(changing_columns)),
    ],
    ids=["environment", "loop", "scorer", "group scorer", "function", "function for TRL"],
)
async def test_a_changed_task_is_not_the_task_of_other_episodes(make_runner, environment, loop, scorer):
    """Without copies, the second episode fails (there is no "deep" to delete), or plays another task."""
    runner, task = make_runner(environment, "go", scorer=scorer), make_task()
    if loop is not None:
        runner.loop = loop
    before = copy.deepcopy(task)
    two = [Assignment(task=task, group_id="g", member=member, seed=1) for member in range(2)]
    found = [trajectory async for trajectory in play_all(runner, two, concurrency=1)]
    assert [(trajectory.error, trajectory.reward) for trajectory in found] == [(None, 1.0)] * 2
    assert task == before


async def test_parts_of_a_reward_get_the_same_task(named, make_runner, play):
    seen = []

    def first(trajectory, task):
        task.options["words"].append("b")
        return 0.0

    def second(trajectory, task):
        seen.append(list(task.options["words"]))
        return 1.0

    named(first=first, second=second)
    scorer = find_reward(AgentConfig(reward=["first", "second"]), ThreadWorker())
    await play(make_runner(Calm, "go", scorer=scorer), options={"words": ["a"]})
    assert seen == [["a"]]


async def test_changed_options_are_those_of_one_environment_and_one_call():
    """The options of a constructor and of a reward come from the config, which all episodes share."""
    given = {"words": ["a"]}
    EnvAdapter(Changing, given).env.words.append("b")

    def greedy(trajectory, task, words=()):
        words.append("b")
        return float(len(words))

    reward = FunctionReward("greedy", greedy, given, ThreadWorker())
    scores = [await reward.score(None, make_task()) for _ in range(2)]
    assert [score.reward for score in scores] == [2.0, 2.0]
    assert given == {"words": ["a"]}
