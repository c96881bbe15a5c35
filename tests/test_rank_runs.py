"""Whole runs whose trainer is several processes: to the end, with one killed, and on with another number of them."""

import os
import signal
import time
from pathlib import Path

import pytest
from support.token_tables import check_token_tables

from agentrl.errors import ConfigError, RankLost, TrainingError
from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import RunWatcher
from agentrl.runs.rl import train
from agentrl.runs.sft import warm_start
from agentrl.runs.start import resume_run
from agentrl.training.distributed import launch
from agentrl.training.distributed.launch import RankProcesses, open_ranks

DEADLINE_S = 60
"""In which a run must notice that a rank is gone; it takes less than a second on an idle machine."""


def ranks_of_this_process():
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = (status.parent / "cmdline").read_bytes().decode().split("\0")
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, UnicodeDecodeError):
            continue
        if parent == os.getpid() and "agentrl.builders.workers" in words:
            found.append(int(status.parent.name))
    return found


class Killer(RunWatcher):
    """Kills or stops a rank once after a step, and remembers what the run says."""

    def __init__(self, step, number=signal.SIGKILL):
        self.step, self.number = step, number
        self.killed_at = None
        self.said = []

    def on_step(self, step, metrics):
        if step == self.step and self.killed_at is None:
            (rank,) = ranks_of_this_process()
            os.kill(rank, self.number)
            self.killed_at = time.monotonic()

    def on_message(self, text):
        self.said.append(text)


@pytest.mark.slow
def test_a_run_of_two_processes_trains_dies_with_one_and_goes_on_with_one(tiny_run):
    run = tiny_run("trainer.processes=2", "trainer.steps=2", "algorithm.kl_coef=0.01", "observe.tokens=all")
    assert train(run).step == 2
    folder = run.folder
    check_token_tables(folder.path)
    assert ranks_of_this_process() == []
    assert (folder.logs / "rank-1.log").read_text() == ""
    lines = read_metrics(folder.metrics_file)
    assert all(line["sync/probe_difference"] < 1e-4 for line in lines)
    assert all(line["train/grad_norm"] > 0 for line in lines)
    assert {file.name for file in (folder.checkpoints / "step-000002" / "trainer").iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    }

    killer = Killer(step=3)
    with pytest.raises(RankLost, match=r"rank 1 of the trainer ended \(process \d+\): got signal 9 \(SIGKILL\)"):
        train(resume_run(folder.path, ["trainer.steps=4", "trainer.restarts=0"]), watcher=killer)
    assert time.monotonic() - killer.killed_at < DEADLINE_S
    assert ranks_of_this_process() == []

    assert train(resume_run(folder.path, ["trainer.processes=1"])).step == 4
    assert len(read_metrics(folder.metrics_file)) == 4
    assert (folder.checkpoints / "step-000004" / "trainer.pt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_restarts_from_its_checkpoint_after_the_loss_of_a_rank(number, tiny_run, monkeypatch):
    monkeypatch.setattr(launch, "RANK_STOPPED_S", 1.0)
    undisturbed = tiny_run("trainer.processes=2", name="undisturbed")
    train(undisturbed)
    run, killer = tiny_run("trainer.processes=2", name="killed"), Killer(step=3, number=number)
    assert train(run, watcher=killer).step == 4
    assert ranks_of_this_process() == []
    (reason,) = [text for text in killer.said if "restarts from its newest checkpoint" in text]
    assert "--resume" not in reason
    assert "rank 1 of the trainer" in reason
    assert "(1 of 3: trainer.restarts)" in reason
    for here, there in zip(*(read_metrics(one.folder.metrics_file) for one in (undisturbed, run)), strict=True):
        assert [here[name] for name in ("step", "reward/mean", "train/loss")] == [
            there[name] for name in ("step", "reward/mean", "train/loss")
        ]


@pytest.mark.slow
def test_a_warm_start_restarts_from_its_checkpoint_after_the_loss_of_a_rank(tiny_run):
    lessons = ("trainer.processes=2", "sft={episodes: 8, tokens_per_update: 60, epochs: 2, save_minutes: 1e-9}")
    undisturbed, run, killer = tiny_run(*lessons, name="undisturbed"), tiny_run(*lessons, name="killed"), Killer(step=3)
    assert warm_start(run, watcher=killer).step == warm_start(undisturbed).step > 4
    (reason,) = [text for text in killer.said if "restarts from its newest checkpoint" in text]
    assert "(1 of 3: trainer.restarts)" in reason
    assert any("resumes after update 2 of" in text for text in killer.said)
    for here, there in zip(*(read_metrics(one.folder.metrics_file) for one in (undisturbed, run)), strict=True):
        assert (here["step"], here["sft/loss"]) == (there["step"], there["sft/loss"])


def test_what_a_rank_failed_of_is_shown_with_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.training.distributed.launch.PROGRAM", "json.no_such_program")
    processes = RankProcesses(2, logs=tmp_path)
    try:
        said = r"(?s)rank 1 of the trainer ended.*exit code 1, with the output:.*No module named json.no_such_program"
        with pytest.raises(TrainingError, match=said):
            processes.start()
    finally:
        processes.close(at_once=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "rank-1.log"]


def test_torchrun_and_the_config_must_agree(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="got 2, expected 4"), open_ranks(2, logs=tmp_path):
        raise AssertionError("no ranks meet")
