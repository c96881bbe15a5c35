"""`agentrl profile`: where the time of some training steps goes."""

import json
import threading
import time
from pathlib import Path

import pytest
from support.waiting import join

from agentrl.runs.profile import IDLE, OTHER, StackSampler, _phases


@pytest.mark.slow
def test_the_profile_of_a_small_run(agentrl, small, tmp_path):
    file = tmp_path / "profile.json"
    words = ["--env", "guess_number", "--model", "scratch", f"run.directory={tmp_path}", *small]
    ended = agentrl("profile", *words, "--warmup", "0", "--steps", "2", "--json", str(file))
    assert ended.code == 0, ended.err
    found = json.loads(file.read_text())
    assert (found["first"], found["last"]) == (1, 2)
    assert found["turns"] > 0
    assert {"engine", "trainer"} <= found["components"].keys()
    assert 0 <= found["idle_share"] < 1
    assert 0 <= found["lag_ms"]["p50"] <= found["lag_ms"]["p99"] <= found["lag_ms"]["max"]
    assert {"rollout", "train"} <= found["phases"].keys()
    assert any(one["name"] == "aten::mm" and one["self_ms"] > 0 for one in found["operations"])
    busy = sum(found["components"].values()) * found["turns"] / 1000
    assert busy + found["idle_share"] * found["seconds"] == pytest.approx(found["seconds"])
    events = json.loads(Path(found["trace"]).read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    assert "ms per turn on the event loop" in ended.out


def test_the_length_of_the_run_is_set_by_its_options(agentrl, small, tmp_path):
    words = ["--env", "guess_number", "--model", "scratch", f"run.directory={tmp_path}", *small, "trainer.steps=9"]
    ended = agentrl("profile", *words)
    assert ended.code == 2
    assert "--warmup and --steps" in ended.err


def test_the_time_of_evaluations_is_a_phase():
    lines = [{"time/rollout_s": 1.0, "time/evaluate_s": 2.0}, {"time/rollout_s": 1.0}]
    assert _phases(lines) == {"rollout": 2.0, "evaluate": 2.0}


def test_a_file_that_cannot_be_written_is_an_error_before_the_run(agentrl, tmp_path):
    ended = agentrl("profile", "quickstart", f"run.directory={tmp_path}", "--json", str(tmp_path))
    assert (ended.code, "cannot write" in ended.err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_samples_count_for_the_part_that_runs():
    def busy(until):
        while time.monotonic() < until:
            sum(range(1000))

    thread = threading.Thread(target=busy, args=(time.monotonic() + 0.5,))
    thread.start()
    sampler = StackSampler(thread.ident)
    sampler.start()
    join(thread)
    sampler.stop()
    assert sampler.counts[OTHER] > 5
    assert sampler.counts[IDLE] == 0
