"""Whole runs in which a role proposes the tasks of later steps: the buffer survives a kill exactly."""

import json

import pytest
from support.runs import Snapshots, numbers

from agentrl.observe.metrics import read_metrics
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.runs.rl import train
from agentrl.runs.start import Run, resume_run

PROPOSER = (
    "environment={name: 'proposed_letters:SPEC', isolation: inline}",
    "agent={loop: propose_solve, options: {attempts: 2, wrong: -0.5, malformed: -1.0}, max_answer_tokens: 6}",
    "agent.max_tokens=256",
    "algorithm={advantage: trr++, group_size: 1}",
    "trainer={steps: 5, tasks_per_step: 8, learning_rate: 1e-2}",
)


def played(folder):
    stored = [s.trajectory for s in read_trajectories(RunDirectory(folder).trajectories)]
    return sorted((t.id, t.task_id, t.reward, json.dumps(t.proposals)) for t in stored)


def test_proposals_become_tasks_and_both_roles_are_trained(tiny_run):
    run = tiny_run(*PROPOSER, "trainer.steps=3")
    train(run)
    lines = read_metrics(run.folder.metrics_file)
    assert lines[0]["role/proposer/members"] == 8, "nothing was proposed yet"
    assert all(line["role/solver/members"] > 0 for line in lines)
    assert sum(line["proposals/valid"] for line in lines) >= sum(line["proposals/new"] for line in lines) > 0
    stored = [s.trajectory for s in read_trajectories(run.folder.trajectories)]
    proposed = {proposal["letter"] for t in stored for proposal in t.proposals}
    posed = {t.task_id.split("-")[1] for t in stored if t.task_id.startswith("write-")}
    assert posed
    assert posed <= proposed


MOMENTS = (9, 23, 36)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_resumes_with_its_buffer_bit_for_bit(tiny_run, staleness):
    asynchronous = f"rollout.max_staleness={staleness}"
    whole = tiny_run(*PROPOSER, asynchronous, name="whole")
    train(whole, watcher=Snapshots(whole.folder.path.with_name("cut"), () if staleness else MOMENTS))
    if staleness:  # the order in which episodes end differs; the buffer is the checkpoint's
        cut = tiny_run(*PROPOSER, asynchronous, "trainer.steps=4", name="cut")
        train(cut)
        assert train(resume_run(cut.folder.path, ["trainer.steps=5"])).step == 5
        return
    assert any(line["proposals/new"] for line in read_metrics(whole.folder.metrics_file))
    for moment in MOMENTS:
        folder = whole.folder.path.with_name("cut") / str(moment)
        assert train(Run(RunDirectory(folder), whole.config)).step == 5
        assert numbers(folder) == numbers(whole.folder.path)
        assert played(folder) == played(whole.folder.path)
