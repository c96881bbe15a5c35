"""Checkpoints that are written beside the next steps are those that would have been written at once."""

import asyncio
import shutil

import pytest
import torch
from support.runs import numbers

from agentrl.errors import UsageError
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import RunWatcher
from agentrl.observe.run_folder import RunDirectory
from agentrl.runs.rl import Orchestrator, train
from agentrl.runs.start import Run, resume_run
from agentrl.training.checkpoint import load_state


class Seen(RunWatcher):
    def __init__(self):
        self.saved = []

    def on_checkpoint(self, step, folder):
        self.saved.append(step)


def model_files(run, step):
    folder = run.folder.checkpoints / f"step-{step:06d}" / "model"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def moments(run, step):
    return load_state(run.folder.checkpoints / f"step-{step:06d}" / "trainer.pt")["optimizer"]["adamw"]["state"]


@pytest.mark.slow
def test_the_same_bytes_as_at_once_and_an_exact_resume(tiny_run, tmp_path):
    found, seen = {}, Seen()
    for background in ("false", "true"):
        run = tiny_run(
            "checkpoint={every: 1, keep: 9, background: " + background + "}", name=f"background-{background}"
        )
        train(run, watcher=seen)
        found[background] = run
    assert seen.saved == [1, 2, 3, 4] * 2
    at_once, beside = found["false"], found["true"]
    assert numbers(beside.folder.path) == numbers(at_once.folder.path)
    for step in (1, 2, 3, 4):
        assert model_files(beside, step) == model_files(at_once, step)
        torch.testing.assert_close(moments(beside, step), moments(at_once, step), rtol=0, atol=0)
    copy = tmp_path / "copy"
    shutil.copytree(beside.folder.path, copy)
    for step in (3, 4):
        shutil.rmtree(copy / "checkpoints" / f"step-{step:06d}")
    resumed = Run(RunDirectory(copy), beside.config)
    assert train(resumed).step == 4
    assert numbers(resumed.folder.path) == numbers(at_once.folder.path)


@pytest.mark.slow
def test_a_write_that_fails_ends_the_run_at_the_next_step(tiny_run, monkeypatch):
    run = tiny_run("checkpoint={every: 1, background: true}", "trainer.steps=5")
    save = Checkpoints.save

    def fail(self, step, write):
        if step == 2:
            raise UsageError("cannot write the checkpoint", got="no space left")
        return save(self, step, write)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", fail)
        with pytest.raises(UsageError, match="no space left"):
            train(run)
    assert len(read_metrics(run.folder.metrics_file)) in (2, 3)
    assert train(resume_run(run.folder.path, ["trainer.steps=4"])).step == 4


def test_a_run_that_is_stopped_has_saved_when_it_ends(tiny_run):
    run = tiny_run("checkpoint={every: 1, background: true}")

    class Stops(RunWatcher):
        def on_step(self, step, metrics):
            if step == 2:
                orchestrator.stop()

    orchestrator = Orchestrator(run, watcher=Stops())
    result = asyncio.run(orchestrator.run())
    assert result.interrupted
    assert result.checkpoint == str(run.folder.checkpoints / "step-000002")
    assert Checkpoints(run.folder.checkpoints, keep=2).newest().step == 2
