"""Budgets, with a clock that the test turns."""

import pytest

from agentrl.agent_loop import EpisodeEnd
from agentrl.config.environment import AgentConfig
from agentrl.env import EnvironmentSpec
from agentrl.errors import Outcome
from agentrl.rollout.budget import Budget, EpisodeLimits
from agentrl.task import SeedTasks


def ending(function, *arguments):
    with pytest.raises(EpisodeEnd) as end:
        function(*arguments)
    return end.value.outcome


def test_turns_are_counted_from_zero():
    budget = Budget(EpisodeLimits(max_turns=2), lambda: 0.0)
    assert [budget.take_turn(), budget.take_turn()] == [0, 1]
    assert ending(budget.take_turn) is Outcome.TRUNCATED_TURNS
    assert budget.turns == 2


@pytest.mark.parametrize(
    ("prompt", "context", "room"), [(10, 1000, 20), (85, 1000, 15), (99, 1000, 1), (40, 50, 10), (0, 1000, 20)]
)
def test_an_answer_fits_the_sequence_and_the_context(prompt, context, room):
    budget = Budget(EpisodeLimits(max_tokens=100, max_answer_tokens=20), lambda: 0.0)
    assert budget.answer_tokens(prompt, context) == room


@pytest.mark.parametrize(("prompt", "context"), [(100, 1000), (101, 1000), (50, 50)])
def test_without_room_the_episode_ends(prompt, context):
    budget = Budget(EpisodeLimits(max_tokens=100), lambda: 0.0)
    assert ending(budget.answer_tokens, prompt, context) is Outcome.TRUNCATED_TOKENS


def test_seconds_run_from_the_start():
    times = iter([100.0, 102.9, 102.9, 103.0, 103.0])
    budget = Budget(EpisodeLimits(max_seconds=3.0), lambda: next(times))
    budget.check_time()
    assert budget.remaining_s == pytest.approx(0.1)
    assert ending(budget.take_turn) is Outcome.TRUNCATED_TIME
    assert budget.turns == 0
    assert Budget(EpisodeLimits(), lambda: 0.0).remaining_s is None


def test_the_last_unusable_answer_allowed_ends_the_episode():
    budget = Budget(EpisodeLimits(max_parse_failures=2), lambda: 0.0)
    budget.count_invalid()
    assert ending(budget.count_invalid) is Outcome.POLICY_ERROR


@pytest.mark.parametrize(
    ("own", "options", "turns"),
    [
        (None, {}, 50),
        (20, {}, 20),
        (80, {}, 50),
        (20, {"max_steps": 30}, 30),
        (20, {"max_steps": 80}, 50),
        (None, {"max_steps": 30}, 50),
    ],
)
def test_limits_come_from_the_config_and_the_environment(own, options, turns):
    spec = EnvironmentSpec(name="w", make=dict, tasks=SeedTasks, max_turns=own)
    agent = AgentConfig(max_seconds=9.0, max_tokens=77, tool_timeout_s=1.5)
    limits = EpisodeLimits.from_config(agent, spec, options, answer_timeout_s=12.0)
    assert (limits.max_turns, limits.max_seconds, limits.max_tokens) == (turns, 9.0, 77)
    assert (limits.tool_timeout_s, limits.answer_timeout_s) == (1.5, 12.0)
