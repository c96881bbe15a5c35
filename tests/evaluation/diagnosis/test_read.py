"""Folders that `agentrl diagnose` reads: crashed, running, stopped, damaged, evaluations, and no runs at all."""

import asyncio
import json

import pytest

from agentrl.cli.diagnose import diagnosis_text
from agentrl.config import load_config
from agentrl.errors import TrainingError, UsageError
from agentrl.evaluation.diagnosis.read import MOST_STEPS, RunState, _spread
from agentrl.evaluation.evaluate import PolicyKind
from agentrl.evaluation.session import make_request, run_evaluation
from agentrl.observe.run_folder import RunDirectory
from agentrl.runs.diagnosis import diagnose_folder
from agentrl.runs.rl import Orchestrator, train

FAILING = ("environment={name: 'faults:Breaking', isolation: inline}", "rollout.retries=0", "trainer.steps=9")


def test_a_run_that_failed_says_how_it_ended_and_what_failed(tiny_run, agentrl_out):
    run = tiny_run(*FAILING)
    with pytest.raises(TrainingError):
        train(run)
    found = diagnose_folder(run.folder.path)
    assert (found.state, found.step, found.steps) == (RunState.FAILED, found.step, 9)
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


def test_a_running_run_and_one_that_was_killed(tiny_run):
    run = tiny_run("trainer.steps=2")
    train(run)
    with run.folder.in_use():
        assert diagnose_folder(run.folder.path).state is RunState.RUNNING
    assert diagnose_folder(run.folder.path).state is RunState.FINISHED
    lines = run.folder.metrics_file.read_bytes().splitlines(keepends=True)
    run.folder.metrics_file.write_bytes(lines[0])
    found = diagnose_folder(run.folder.path)
    assert (found.state, found.step) == (RunState.KILLED, 1)
    assert "it was killed" in found.ending
    (run.folder.logs / "rank-1.log").write_text("starting\nRuntimeError: CUDA out of memory\n")
    assert diagnose_folder(run.folder.path).errors == ("rank-1.log: RuntimeError: CUDA out of memory",)


def test_a_run_that_was_asked_to_stop(tiny_run):
    run = tiny_run("trainer.steps=3")

    async def stopped():
        loop = Orchestrator(run)
        loop.stop()
        return await loop.run()

    assert asyncio.run(stopped()).interrupted
    run.folder.path.mkdir(exist_ok=True)  # a run without results is removed
    run.folder.save_config("environment: {name: guess_number}")
    run.folder.logs.mkdir(exist_ok=True)
    run.folder.run_log.write_text("2026-01-01 00:00:00,000 WARNING agentrl.runs.rl: stopping; interrupt again\n")
    assert diagnose_folder(run.folder.path).state is RunState.STOPPED


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
    assert (found.state, found.step, found.episodes, found.findings) == (RunState.KILLED, 0, 0, ())
    assert "nothing wrong was found" in str(diagnosis_text(found))


async def test_an_evaluation(tmp_path):
    config = load_config(None, ["environment=guess_number", f"run.directory={tmp_path}", "agent.max_turns=1"])
    request = make_request(config, policy=PolicyKind.RANDOM, model=None, tasks=12)
    finished = await run_evaluation(request)
    found = diagnose_folder(finished.folder)
    assert (found.state, found.episodes) == (RunState.EVALUATION, 12)
    assert "truncated_turns" in [finding.kind for finding in found.findings]
    assert "never_paid" not in [finding.kind for finding in found.findings], "a weak policy is no fault"
    assert "an evaluation of 12 episodes" in str(diagnosis_text(found))


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        diagnose_folder(tmp_path / "away")
    with pytest.raises(UsageError, match=r"neither a run nor an evaluation.*no config.yaml"):
        diagnose_folder(tmp_path)


def test_a_long_run_is_read_in_steps_that_are_spread_evenly():
    assert _spread(range(1, 11)) == list(range(1, 11))
    chosen = _spread(range(1, 10_001))
    assert len(chosen) == MOST_STEPS
    assert (chosen[0], chosen[-1]) == (1, 10_000)
