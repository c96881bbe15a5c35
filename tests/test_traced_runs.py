"""Traces of real runs: what every episode waited for, as files, trees of spans, and a Chrome trace."""

import json
import logging
import time
from collections import Counter
from typing import ClassVar

import pytest

from agentrl.errors import UsageError
from agentrl.observe import trackers as tracker_module
from agentrl.observe.traces import (
    EpisodeTrace,
    TraceSpan,
    TraceTurn,
    chrome_trace,
    read_traces,
    span_tree,
    traced_steps,
)
from agentrl.observe.trackers import Tracker, Trackers
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.registry import Kind, register, unregister
from agentrl.runs.rl import train


@pytest.fixture
def traced(tiny_run):
    run = tiny_run("trainer.steps=2", "trackers=[trace]")
    train(run)
    return run.folder


def test_a_run_traces_every_episode_and_step(traced):
    stored = {found.trajectory.id: found.trajectory for found in read_trajectories(traced.trajectories)}
    assert traced_steps(traced.path) == [1, 2]
    traces = [trace for step in (1, 2) for trace in read_traces(traced.path, step)]
    episodes = {trace.name: trace for trace in traces if trace.group}
    assert episodes.keys() == stored.keys()
    for name, trace in episodes.items():
        trajectory, spans = stored[name], Counter(span.kind for span in trace.spans)
        assert spans["engine"] == len(trajectory.turns) == len(trace.turns)
        assert [turn.answer_tokens for turn in trace.turns] == [t.end - t.start for t in trajectory.turns]
        assert [turn.prompt_tokens for turn in trace.turns] == [t.start for t in trajectory.turns]
        assert (trace.task, trace.outcome, trace.reward) == (
            trajectory.task_id,
            trajectory.outcome.value,
            trajectory.reward,
        )
        valid = sum(turn.valid for turn in trajectory.turns)
        assert spans["environment"] >= 1 + valid, "a reset, and a step per valid answer"
        assert abs(trace.began - time.time()) < 600
        for span in trace.spans:
            assert trace.began - 0.01 <= span.began <= span.ended <= trace.ended + 0.01
    (first, second) = [trace for trace in traces if not trace.group]
    assert (first.step, second.step) == (1, 2)
    assert {"trainer", "sync", "groups"} <= {span.kind for span in first.spans}
    assert first.ended <= second.ended


def test_traces_are_off_by_default(tiny_run):
    run = tiny_run("trainer.steps=1")
    train(run)
    assert traced_steps(run.folder.path) == []


def test_a_step_without_traces_is_an_error_that_names_the_steps(traced):
    with pytest.raises(UsageError, match="a step from 1 to 2"):
        read_traces(traced.path, 7)


@pytest.mark.slow
def test_damaged_lines_are_skipped(traced, caplog):
    file = traced.logs / "trace" / "step-000001.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, '{"name": "x"}', "{", ""]))
    assert len(read_traces(traced.path, 1)) == len(lines)
    assert "2 damaged" in caplog.text or "damaged" in caplog.text


def episode(*spans, turns=1, name="e", began=0.0, seconds=9.0):
    answers = [TraceTurn(10 + i, 3 + i, "stop", "agent", True) for i in range(turns)]
    return EpisodeTrace(
        name=name,
        step=1,
        began=began,
        seconds=seconds,
        spans=[TraceSpan(*span) for span in spans],
        turns=answers,
        group="g",
        environment="letters",
        task="t",
    )


def test_the_tree_has_turns_with_what_follows_their_answer():
    trace = episode(
        ("environment", "reset", 0.0, 0.5),
        ("loop", "Loop", 0.5, 5.0),
        ("engine", "an answer", 1.0, 1.0),
        ("tool", "search", 2.0, 1.0),
        ("tool", "add", 2.0, 1.5),
        ("engine", "an answer", 4.0, 0.5),
        ("environment", "step", 4.5, 0.5),
        ("scorer", "Judge", 5.0, 1.0),
        turns=2,
    )
    root = span_tree(trace)
    assert [(child.kind, child.name) for child in root.children] == [
        ("environment", "reset"),
        ("turn", "turn 0"),
        ("turn", "turn 1"),
        ("scorer", "Judge"),
    ]
    first, second = root.children[1:3]
    assert [leaf.name for leaf in first.children] == ["an answer", "search", "add"]
    assert [leaf.kind for leaf in second.children] == ["engine", "environment"]
    assert (first.began, first.ended, second.began, second.ended) == (1.0, 3.5, 4.0, 5.0)
    assert (first.turn.answer_tokens, second.turn.answer_tokens) == (3, 4)
    assert EpisodeTrace.from_record(json.loads(json.dumps(trace.to_record()))) == trace


def test_events_on_a_track_do_not_overlap():
    traces = [
        episode(("engine", "an answer", 0.0, 2.0), ("tool", "a", 2.0, 3.0), ("tool", "b", 2.5, 3.0), seconds=6.0),
        episode(("engine", "an answer", 1.0, 2.0), name="f", began=1.0, seconds=2.0),
        episode(("engine", "an answer", 6.0, 1.0), name="g", began=6.0, seconds=1.0),
    ]
    events = [event for event in chrome_trace(traces)["traceEvents"] if event["ph"] == "X"]
    tracks = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        latest = tracks.get(event["tid"], 0.0)
        assert event["ts"] >= latest
        tracks[event["tid"]] = event["ts"] + event["dur"]
    assert len({event["tid"] for event in events if event["cat"] == "episode"}) == 2, "the third takes a free place"


class Slow(Tracker):
    traces = True
    seen: ClassVar[list[str]] = []

    def __init__(self, folder, name, config):
        self.seen.clear()

    def log(self, step, metrics):
        pass

    def trace(self, trace):
        time.sleep(0.1)
        self.seen.append(trace.name)

    def close(self):
        pass


def test_a_slow_tracker_loses_traces_instead_of_memory(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tracker_module, "MAX_TRACES_WAITING", 2)
    register(Kind.TRACKER, "slow", Slow)
    try:
        trackers = Trackers(["slow"], folder=tmp_path, name="run", config={})
        for number in range(20):
            trackers.trace(episode(name=str(number)))
        with caplog.at_level(logging.WARNING):
            trackers.close()
    finally:
        unregister(Kind.TRACKER, "slow")
    assert 2 <= len(Slow.seen) < 20
    assert f"tracker slow was too slow for {20 - len(Slow.seen)} traces" in caplog.text


class Counting(Tracker):
    closed: ClassVar[int] = 0

    def __init__(self, folder, name, config):
        pass

    def log(self, step, metrics):
        pass

    def close(self):
        type(self).closed += 1


def test_a_run_closes_its_trackers(tiny_run):
    register(Kind.TRACKER, "counting", Counting)
    try:
        run = tiny_run("trainer.steps=1", "trackers=[counting]")
        train(run)
    finally:
        unregister(Kind.TRACKER, "counting")
    assert Counting.closed == 1
    assert "closing" not in run.folder.run_log.read_text()
