"""`agentrl trace`: timelines of training steps."""

import json

import pytest

from agentrl.observe.traces import read_traces, traced_steps
from agentrl.runs.rl import train


@pytest.fixture
def traced(tiny_run):
    run = tiny_run("trainer.steps=2", "trackers=[trace]")
    train(run)
    return run.folder


@pytest.mark.slow
def test_the_command_writes_a_chrome_trace(agentrl, traced, tmp_path):
    target = tmp_path / "new" / "trace.json"
    assert agentrl("trace", str(traced.path), "--step", "1", "--output", str(target)).code == 0
    events = json.loads(target.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    episodes = [event for event in spans if event["cat"] == "episode"]
    assert len(episodes) == sum(1 for trace in read_traces(traced.path, 1) if trace.group) > 0
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    assert {"engine", "environment", "trainer"} <= {event["cat"] for event in spans}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} <= named


@pytest.mark.slow
def test_the_last_step_is_the_default(agentrl, traced):
    assert "step 2" in agentrl("trace", str(traced.path)).err
    assert (traced.logs / "trace" / "step-000002.trace.json").is_file()
    assert traced_steps(traced.path) == [1, 2], "the written file is not taken for traces"


def test_a_run_without_traces_is_an_error_that_says_how_to_trace(agentrl, tiny_run, tmp_path):
    run = tiny_run("trainer.steps=1")
    train(run)
    ended = agentrl("trace", str(run.folder.path))
    assert ended.code == 2
    assert "has no traces" in ended.err
    assert "trackers=[trace]" in ended.err
    ended = agentrl("trace", str(tmp_path / "nothing"))
    assert ended.code == 2
    assert "is not a run" in ended.err
