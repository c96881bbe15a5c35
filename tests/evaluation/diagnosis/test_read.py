"""Folders that `agentrl diagnose` reads: crashed, running, stopped, damaged, evaluations, and no runs at all."""

import json

import pytest

from agentrl.cli.diagnose import diagnosis_text
from agentrl.config import load_config
from agentrl.errors import TrainingError, UsageError
from agentrl.evaluation.diagnosis.read import MAX_STEPS, _spread
from agentrl.evaluation.evaluate import PolicyKind
from agentrl.evaluation.session import make_request, run_evaluation
from agentrl.observe.progress import RunWatcher
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.run_status import STATUS_FILE, Liveness
from agentrl.runs.diagnosis import diagnose_folder
from agentrl.runs.rl import train
from agentrl.runs.stop import StopRequest

FAILING = ("environment={name: 'faults:Breaking', isolation: inline}", "rollout.retries=0", "trainer.steps=9")


@pytest.mark.slow
def test_a_run_that_failed_says_how_it_ended_and_what_failed(tiny_run, agentrl_out):
    run = tiny_run(*FAILING)
    with pytest.raises(TrainingError):
        train(run)
    found = diagnose_folder(run.folder.path)
    assert (found.state, found.step, found.steps) == (Liveness.FAILED, found.step, 9)
    assert 0 < found.step < 9
    assert found.errors[0].startswith("the run ended with an error: TrainingError")
    first = found.findings[0]
    assert first.kind == "environment_error"
    assert "RuntimeError: the world broke" in first.sentence
    assert first.file is not None
    assert first.file.endswith("faults.py")
    text = agentrl_out("diagnose", str(run.folder.path))
    assert f"failed after step {found.step} of 9" in text
    assert "1. environment_error, critical" in text
    record = json.loads(agentrl_out("diagnose", str(run.folder.path), "--json"))
    assert record["state"] == "failed"
    assert record["findings"][0]["file"] == first.file


@pytest.mark.slow
def test_a_running_run_and_one_that_was_killed(tiny_run):
    run = tiny_run("trainer.steps=2")
    train(run)
    with run.folder.in_use():
        assert diagnose_folder(run.folder.path).state is Liveness.RUNNING
    assert diagnose_folder(run.folder.path).state is Liveness.FINISHED
    lines = run.folder.metrics_file.read_bytes().splitlines(keepends=True)
    run.folder.metrics_file.write_bytes(lines[0])
    (run.folder.path / STATUS_FILE).unlink()  # as in a run of an earlier version
    found = diagnose_folder(run.folder.path)
    assert (found.state, found.step) == (Liveness.CRASHED, 1)
    assert "it was killed" in found.ending
    (run.folder.logs / "rank-1.log").write_text("starting\nRuntimeError: CUDA out of memory\n")
    assert diagnose_folder(run.folder.path).errors == ("rank-1.log: RuntimeError: CUDA out of memory",)


def test_a_run_that_was_interrupted(tiny_run):
    class Stop(RunWatcher):
        def on_step(self, step, metrics):
            interruption()

    run, interruption = tiny_run("trainer.steps=3"), StopRequest()
    assert train(run, watcher=Stop(), interruption=interruption).interrupted
    found = diagnose_folder(run.folder.path)
    assert (found.state, found.ending) == (Liveness.STOPPED, "interrupted after step 1 of 3")


def test_damaged_files_are_left_out_and_named(tiny_run):
    run = tiny_run("trainer.steps=3", 'agent.reward=["letters:constant"]', "algorithm.group_size=6")
    train(run)
    (store, *_) = sorted(run.folder.trajectories.glob("step-*.jsonl"))
    lines = store.read_bytes().splitlines(keepends=True)
    store.write_bytes(b"".join([lines[0], b"\xff\x00 not JSON\n", *lines[2:]]))
    with run.folder.metrics_file.open("ab") as file:
        file.write(b'{"step": 4, "reward/mean": 0.')
    (run.folder.path / "incidents.json").write_text("{")
    run.folder.config_file.write_text("environment: [")
    found = diagnose_folder(run.folder.path)
    assert found.findings[0].kind in ("constant_reward", "answers_cut")
    assert any("config.yaml" in note for note in found.notes)
    assert any("damaged" in note for note in found.notes)
    assert "left out" in str(diagnosis_text(found))


def test_a_run_without_any_step_or_episode(tmp_path):
    folder = RunDirectory(tmp_path)
    folder.save_config("environment: {name: guess_number}\ntrainer: {steps: 5}")
    found = diagnose_folder(tmp_path)
    assert (found.state, found.step, found.episodes, found.findings) == (Liveness.CRASHED, 0, 0, ())
    assert "nothing wrong was found" in str(diagnosis_text(found))


async def test_an_evaluation(tmp_path):
    config = load_config(None, ["environment=guess_number", f"run.directory={tmp_path}", "agent.max_turns=1"])
    request = make_request(config, policy=PolicyKind.RANDOM, model=None, tasks=12)
    finished = await run_evaluation(request)
    found = diagnose_folder(finished.folder)
    assert (found.state, found.episodes) == (None, 12)
    assert "truncated_turns" in [finding.kind for finding in found.findings]
    assert "never_rewarded" not in [finding.kind for finding in found.findings], "a weak policy is no fault"
    assert "an evaluation of 12 episodes" in str(diagnosis_text(found))


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        diagnose_folder(tmp_path / "away")
    with pytest.raises(UsageError, match=r"not a run or evaluation.*without config.yaml"):
        diagnose_folder(tmp_path)


def test_a_long_run_is_read_in_steps_that_are_spread_evenly():
    assert _spread(range(1, 11)) == list(range(1, 11))
    chosen = _spread(range(1, 10_001))
    assert len(chosen) == MAX_STEPS
    assert (chosen[0], chosen[-1]) == (1, 10_000)
