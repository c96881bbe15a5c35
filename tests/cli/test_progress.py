"""What a log shows of long work, and what Ctrl-C leaves behind."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentrl.cli.learn
import agentrl.observe.terminal
from agentrl.observe.progress import Phase, RunStatus
from agentrl.observe.terminal import EpisodeCounter, Heartbeat, LineWatcher, counting, status_words
from agentrl.trajectory import Source, TokenSequence, Trajectory

Cli = Callable[..., Any]


def test_a_heartbeat_speaks_only_after_silence(capsys: pytest.CaptureFixture[str]) -> None:
    heartbeat = Heartbeat(lambda: "still here", quiet_s=15)
    now = time.monotonic()
    assert heartbeat.beat(now + 14) <= 1.1
    assert capsys.readouterr().err == ""
    assert heartbeat.beat(now + 20) == pytest.approx(15)
    assert capsys.readouterr().err == "still here, 20 s\n"
    heartbeat.heard()
    assert heartbeat.beat(now + 10) <= 5.1
    assert capsys.readouterr().err == ""


def test_a_slow_evaluation_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    spoke = threading.Event()

    def note(line: str) -> None:
        said.append(line)
        spoke.set()

    monkeypatch.setattr(agentrl.observe.terminal, "note", note)
    monkeypatch.setattr(Heartbeat.__init__, "__kwdefaults__", {"quiet_s": 0.01})
    with counting(400):
        assert spoke.wait(30)
    assert said[0].startswith("0/400 episodes, success unknown, ")


def test_a_quiet_run_says_what_it_is_busy_with(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = LineWatcher()
    watcher.on_start(Path("runs/mine"), status := RunStatus())
    status.phase, status.episodes_running, status.episodes_done = Phase.DEMONSTRATE, 4, 100
    watcher.heartbeat.beat(time.monotonic() + 20)
    assert "demonstrate, 4 episodes running, 100 done, 20 s" in capsys.readouterr().err
    assert status_words(RunStatus()) == "prepare"


@pytest.mark.parametrize(
    ("number", "on_ctrl_c"),
    [
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_IGN),  # of a command that a script started in the background
    ],
)
def test_an_interrupted_evaluation_says_that_the_same_command_goes_on(
    agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, on_ctrl_c: Any
) -> None:
    words = ("eval", "--env", "guess_number", "--policy", "random", "--tasks", "8", "--concurrency", "1")
    count = EpisodeCounter.add

    def interrupted(counter: EpisodeCounter, trajectory: Any) -> None:
        count(counter, trajectory)
        if counter.done == 3:
            signal.raise_signal(number)

    before = signal.signal(signal.SIGINT, on_ctrl_c)  # who started the tests may have it ignored
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(EpisodeCounter, "add", interrupted)
            ended = agentrl(*words)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == (on_ctrl_c, terminate)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.code == 130
    assert "stopped after 3/8 episodes" in ended.err
    assert "finished episodes are kept, and the same command goes on from there" in ended.err
    (stored,) = workplace.glob("runs/evaluations/*/episodes.jsonl")
    kept = stored.read_bytes()
    assert kept.count(b"\n") == 3
    assert agentrl(*words).code == 0
    assert stored.read_bytes().startswith(kept)
    assert stored.read_bytes().count(b"\n") == 8


def test_an_interrupted_warm_start_says_that_nothing_is_saved(
    agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("agentrl.cli.learn.warm_start", interrupted)
    ended = agentrl("sft", "--env", "household/train", "--model", "scratch", "environment.options={size: tiny}")
    assert ended.code == 130
    assert "has no model, for a warm start saves it at its end; begin again" in ended.err


def test_a_counter_tells_sampled_tokens_per_second() -> None:
    counter = EpisodeCounter(2, began=time.monotonic() - 10)
    assert counter.words() == "success unknown"
    sequence = TokenSequence()
    sequence.extend([1, 2, 3], Source.TEMPLATE)
    sequence.extend_sampled([4] * 500, logprobs=[-1.0] * 500, versions=[0] * 500)
    played = Trajectory(id="a", task_id="t", environment="e", seed=0, group_id="g", sequences=[sequence])
    played.success = True
    counter.add(played)
    assert counter.words() in ("success 100.0%, 50 tokens/s", "success 100.0%, 49 tokens/s")
