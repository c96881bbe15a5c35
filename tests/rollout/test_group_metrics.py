"""Metrics of environments from groups, by hand."""

import pytest

from agentrl.errors import Outcome
from agentrl.rollout.group_metrics import environment_metrics
from agentrl.rollout.groups import Group
from agentrl.rollout.task_order import SampledTask
from agentrl.task import Task
from agentrl.trajectory import TokenSequence, Trajectory, Turn


def trajectory(reward, tokens, *, success=None, outcome=Outcome.FINISHED):
    sequence = TokenSequence()
    sequence.extend_sampled([1] * tokens, logprobs=[-1.0] * tokens, versions=[0] * tokens)
    sequence.turns.append(Turn(index=0, start=0, end=tokens))
    return Trajectory(
        id="i",
        task_id="t",
        environment="e",
        seed=0,
        group_id="g",
        sequences=[sequence],
        reward=reward,
        success=success,
        outcome=outcome,
    )


def group(position, environment, *members, horizon=None):
    draw = SampledTask(environment=environment, place=0, task=Task(id="t", environment="e"), horizon=horizon)
    return Group(position=position, draw=draw, size=len(members), members=dict(enumerate(members)))


def test_by_hand():
    found = environment_metrics(
        [
            group(0, "b", trajectory(1.0, 3, success=True), trajectory(1.0, 1, success=True), horizon=10),
            group(1, "a", trajectory(0.0, 2, success=False), trajectory(1.0, 6, success=True), horizon=20),
            group(2, "b", trajectory(0.0, 4, success=False), trajectory(None, 9, outcome=Outcome.ENGINE_ERROR)),
        ],
        has_signal=lambda group: group.position == 1,
    )
    assert found["curriculum/turns"] == found["env/a/horizon"] == 20
    assert found["env/b/horizon"] == 10
    assert (found["env/a/groups"], found["env/b/groups"]) == (1, 2)
    assert (found["env/a/success"], found["env/b/success"]) == (0.5, pytest.approx(2 / 3))
    assert (found["env/a/reward"], found["env/b/reward"]) == (0.5, pytest.approx(2 / 3))
    assert (found["env/a/zero_variance"], found["env/b/zero_variance"]) == (0, 2)
    assert (found["env/a/tokens"], found["env/b/tokens"]) == (4, pytest.approx(8 / 3))
    assert (found["env/a/token_share"], found["env/b/token_share"]) == (0.5, 0.5)


def test_one_environment_has_no_metrics_of_its_own():
    assert environment_metrics([group(0, "", trajectory(1.0, 3, success=True))], has_signal=bool) == {}


def test_nothing_is_made_up_where_every_episode_failed():
    found = environment_metrics(
        [group(0, "a", trajectory(None, 3, outcome=Outcome.ENGINE_ERROR))], has_signal=lambda group: False
    )
    assert found == {"env/a/groups": 1, "env/a/zero_variance": 1, "env/a/token_share": 0}
