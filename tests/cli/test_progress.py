"""Progress messages of long work, and the state after Ctrl-C."""

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
from agentrl.errors import Outcome
from agentrl.observe.progress import Phase, RolloutProgress, RunStatus
from agentrl.observe.terminal import EpisodeCounter, Heartbeat, LineWatcher, Speed, counting, status_words, step_words
from agentrl.trajectory import Trajectory

Cli = Callable[..., Any]


def test_a_heartbeat_speaks_only_after_silence(capsys: pytest.CaptureFixture[str]) -> None:
    heartbeat = Heartbeat(lambda: "still here", quiet_s=15)
    now = time.monotonic()
    assert heartbeat.beat(now + 14) <= 1.1
    assert capsys.readouterr().err == ""
    assert heartbeat.beat(now + 20) == pytest.approx(15)
    assert capsys.readouterr().err == "still here, 20 s\n"
    heartbeat.reset()
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
    with counting(400, lambda: RolloutProgress(episodes=3, turns=40)):
        assert spoke.wait(30)
    assert said[0].startswith("0/400 episodes, 3 running, 40 turns, ")


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
    assert "finished episodes are kept, and the same command resumes the evaluation" in ended.err
    (stored,) = workplace.glob("runs/evaluations/*/episodes.jsonl")
    kept = stored.read_bytes()
    assert kept.count(b"\n") == 3
    assert agentrl(*words).code == 0
    assert stored.read_bytes().startswith(kept)
    assert stored.read_bytes().count(b"\n") == 8


def test_a_warm_start_that_is_interrupted_before_its_first_update_says_that_nothing_is_saved(
    agentrl: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("agentrl.runs.sft.WarmStart.prepare", interrupted)
    ended = agentrl("sft", "--env", "household/train", "--model", "scratch", "environment.options={size: tiny}")
    assert ended.code == 130
    assert "stopped before the first update: start again" in ended.err
    assert not [*workplace.glob("runs/*")]


def test_a_counter_tells_what_running_episodes_sample_per_second() -> None:
    counter = EpisodeCounter(2, lambda: RolloutProgress(episodes=1, turns=7, tokens=500))
    counter._speed = Speed(now=time.monotonic() - 10)
    assert counter.words() in ("1 running, 7 turns, 50 tokens/s", "1 running, 7 turns, 49 tokens/s")


@pytest.mark.slow
def test_tokens_of_episodes_on_disk_are_no_speed(workplace: Path, agentrl: Cli) -> None:
    words = ("eval", "--env", "guess_number", "--model", "scratch", "--engine", "scripted", "--tasks", "2")
    assert agentrl(*words).code == 0
    again = agentrl(*words)
    assert again.code == 0
    assert "2/2 episodes" in again.err
    assert "tokens/s" not in again.err


@pytest.mark.parametrize(("success", "words"), [(True, "success 100.0%"), (None, "reward 0.250")])
def test_a_counter_tells_success_or_else_the_mean_reward(success: bool | None, words: str) -> None:
    counter = EpisodeCounter(2)
    assert counter.line() == "0/2 episodes"
    played = Trajectory(id="a", task_id="t", environment="e", seed=0, group_id="g")
    played.success, played.reward, played.outcome = success, 0.25, Outcome.FINISHED
    counter.add(played)
    assert counter.words() == words


def test_a_counter_counts_cut_episodes_as_failures_like_the_metrics() -> None:
    counter = EpisodeCounter(9)
    ends = [
        ("maze", None, Outcome.TRUNCATED_TURNS),
        ("maze", True, Outcome.FINISHED),
        ("silent", None, Outcome.FINISHED),
    ]
    for environment, success, outcome in ends:
        one = Trajectory(id="a", task_id="t", environment=environment, seed=0, group_id="g")
        one.success, one.outcome = success, outcome
        counter.add(one)
    assert counter.words() == "success 50.0%"


def test_a_number_that_was_not_finite_is_told_as_nan() -> None:
    """Such numbers are null in a metrics file, which a report reads."""
    assert step_words(1, 2, {"train/loss": None, "reward/mean": 0.5}) == "step 1/2  reward 0.500  loss nan"
