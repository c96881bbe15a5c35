"""Deadlines that contradict each other are refused before a run starts."""

import re

import pytest

from agentrl.builders.checks import check_training
from agentrl.builders.deadline_checks import check_deadlines, check_staleness
from agentrl.config import dump_config, load_config
from agentrl.errors import ConfigError

GUESS = ("environment=guess_number", "agent.loop=tool_calling")
SANDBOX = ("agent.tools=[python]", "agent.sandbox={type: local, limits: {seconds: 45}}")

CONTRADICTIONS = {
    "step": (
        ("agent.max_seconds=60", "environment.step_timeout_s=90"),
        r"environment\.step_timeout_s contradicts agent\.max_seconds: got 90 s and 60 s: a slow step would be",
    ),
    "reset": (
        ("agent.max_seconds=60", "environment.reset_timeout_s=61"),
        r"environment\.reset_timeout_s contradicts agent\.max_seconds",
    ),
    "tool": (
        ("agent.max_seconds=60", "agent.tool_timeout_s=100"),
        r"agent\.tool_timeout_s contradicts agent\.max_seconds.*lower agent\.tool_timeout_s, or raise",
    ),
    "sandbox": (SANDBOX, r"agent\.sandbox\.limits\.seconds contradicts agent\.tool_timeout_s: got 45 s and 30 s"),
    "tool's own deadline": (
        ("agent.tools=[{name: python, timeout_s: 20}]", "agent.tool_timeout_s=50", SANDBOX[1]),
        r"agent\.sandbox\.limits\.seconds contradicts timeout_s of tool python: got 45 s and 20 s",
    ),
    "health": (
        ("engine={type: vllm, timeout_s: 60, health_timeout_s: 90}",),
        r"engine\.health_timeout_s contradicts engine\.timeout_s: got 90 s and 60 s: every answer times out",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradicting_deadlines_are_refused(case):
    words, said = CONTRADICTIONS[case]
    with pytest.raises(ConfigError, match=re.compile(said, re.IGNORECASE)):
        check_training(load_config(None, [*GUESS, *words]))


def test_one_of_several_environments_is_named():
    words = ["environments={a: {name: guess_number, step_timeout_s: 90}, b: {name: bandit}}", "agent.max_seconds=60"]
    with pytest.raises(ConfigError, match=r"environments\.a\.step_timeout_s contradicts"):
        check_deadlines(load_config(None, words))


@pytest.mark.parametrize(
    "words",
    [
        ("agent.max_seconds=5",),
        ("agent.max_seconds=60", "environment.step_timeout_s=60", "agent.tool_timeout_s=59"),
        ("environment.step_timeout_s=900", "agent.tool_timeout_s=900"),
        ("engine={type: vllm, timeout_s: 20}",),
        (*SANDBOX, "agent.tool_timeout_s=46"),
    ],
)
def test_defaults_and_fitting_deadlines_are_accepted(words, tmp_path):
    config = load_config(None, [*GUESS, *words])
    check_deadlines(config)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    check_deadlines(load_config(str(tmp_path / "config.yaml")))


def test_greedy_batches_that_drop_allowed_episodes_are_refused():
    words = [*GUESS, "agent.max_seconds=600", "rollout={max_staleness: 2, batch_order: greedy}"]
    said = (
        r"got 3 steps of 40 s \(rollout\.max_staleness \+ 1\), and episodes of up to 600 s, expected "
        r"agent\.max_seconds of at most 120\. Set rollout\.batch_order=windowed, or rollout\.max_staleness=14"
    )
    with pytest.raises(ConfigError, match=said):
        check_staleness(load_config(None, words), 40)
    enough = load_config(None, [*words, "rollout.max_staleness=14"])
    assert len(check_staleness(enough, 40)) == 2


@pytest.mark.parametrize(
    ("words", "step_s", "rows"),
    [
        (("agent.max_seconds=600", "rollout.max_staleness=2"), 40, {"slow episodes": "delay their batch"}),
        (("agent.max_seconds=600", "rollout.max_staleness=2"), 200, {"3 steps": "600 s", "longest episode": "600 s"}),
        (("rollout={max_staleness: 2, batch_order: greedy}",), 1, {"longest episode": "not limited"}),
        (("agent.max_seconds=600",), 1, {"step": "1 s", "longest episode": "600 s"}),
    ],
)
def test_the_dry_run_shows_how_long_an_episode_may_take(words, step_s, rows):
    found = {name: value for name, value, _ in check_staleness(load_config(None, [*GUESS, *words]), step_s)}
    assert found | rows == found
    assert ("slow episodes" in found) == ("slow episodes" in rows)
