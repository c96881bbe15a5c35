"""A run killed at any moment and resumed gives the numbers of an uninterrupted run, bit for bit."""

import json
import random
import shutil
import signal
from collections import Counter

import numpy as np
import pytest
from support.fixtures import WORLDS, tiny_runs
from support.forks import RESUME
from support.runs import Snapshots, numbers
from support.waiting import wait_until

from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.progress import RunWatcher
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_record import trajectory_record
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.rollout.finished_episodes import group_position
from agentrl.rollout.journal_file import read_journal
from agentrl.runs.rl import train
from agentrl.runs.start import Run, resume_run

SETTINGS = ("trainer.steps=5", "evaluation={every: 2, tasks: 3, split: test}", "algorithm.kl_coef=0.01")


def episodes(folder):
    stored = [s.trajectory for s in read_trajectories(RunDirectory(folder).trajectories)]
    return sorted((t.id, t.reward, t.sequences[0].ids_list(), t.sequences[0].logprobs.tobytes()) for t in stored)


def weights(folder):
    return (folder / "checkpoints" / "step-000005" / "model" / "model.safetensors").read_bytes()


def assert_same(folder, expected):
    assert numbers(folder) == numbers(expected)
    assert episodes(folder) == episodes(expected)
    assert weights(folder) == weights(expected)


MOMENTS = sorted(random.Random(3).sample(range(2, 60), 4))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A run that nothing interrupts, with copies of its folder at `MOMENTS` in the folder ``cut`` next to it."""
    with tiny_runs(tmp_path_factory.mktemp("expected")) as start:
        run = start(*SETTINGS)
        train(run, watcher=Snapshots(run.folder.path.with_name("cut"), MOMENTS))
    return run


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_cut_off_at_any_event_ends_as_if_it_had_not_been(tiny_run, expected, moment):
    folder = expected.folder.path.with_name("cut") / str(moment)
    result = train(Run(RunDirectory(folder), expected.config))
    assert result.step == 5
    assert_same(folder, expected.folder.path)


def test_a_finished_run_that_is_resumed_has_the_results_of_its_last_step(tiny_run, expected, tmp_path):
    folder = shutil.copytree(expected.folder.path, tmp_path / "finished")
    result = train(Run(RunDirectory(folder), expected.config))
    assert (result.step, result.interrupted) == (5, False)
    assert result.metrics["reward/mean"] == numbers(folder)[-1]["reward/mean"]
    assert "reward" in repr(result)
    assert "step" not in result.metrics


def test_a_killed_process_resumes_bit_for_bit(tiny_run, expected, start_python):
    killed = tiny_run(*SETTINGS, name="killed")
    moment = 0.4 * _size(expected.folder.path)
    program = _start(start_python, killed)
    wait_until(lambda: _size(killed.folder.path) >= moment or program.poll() is not None, "the moment of the kill")
    assert program.kill() == -signal.SIGKILL
    assert len(numbers(killed.folder.path)) < 5
    assert not killed.folder.inflight.exists(), "a synchronous run keeps no journals"
    result = train(resume_run(killed.folder.path))
    assert result.step == 5
    assert_same(killed.folder.path, expected.folder.path)


@pytest.mark.slow
def test_finished_episodes_of_a_killed_asynchronous_run_are_trained_on(tiny_run, start_python):
    run = tiny_run("trainer.steps=60", "rollout.max_staleness=3", "checkpoint.every=3")
    program = _start(start_python, run)

    def recoverable():
        assert program.poll() is None
        program.stop()  # nothing ends between the look at the files and the kill
        found = _recoverable(run)
        program.send_signal(signal.SIGKILL if found else signal.SIGCONT)
        return found

    found = wait_until(recoverable, "finished episodes that are not trained on", pause_s=0.05)
    program.wait()
    steps = len(numbers(run.folder.path)) + 2
    told = Messages()
    assert train(resume_run(run.folder.path, [f"trainer.steps={steps}"]), watcher=told).step == steps
    assert f"kept {len(found)} finished episodes not yet trained on" in told.messages
    after = {s.trajectory.id: s.trajectory for s in read_trajectories(run.folder.trajectories, messages=True)}
    for name, before in found.items():
        assert trajectory_record(after[name]) == trajectory_record(before), "it was played again"
        assert after[name].messages == before.messages
    trained = [name for name in after if int(name.partition("-")[0]) < 2 * steps]
    assert len(trained) == 2 * steps * 3, "every group has all its members once"


THREE = (
    "environments={replayed: {name: 'letters:Pausing'}, saved: {name: 'letters:Saving'}, "
    "changing: {name: 'letters:Changing'}}"
)


@pytest.mark.slow
def test_episodes_in_flight_of_a_killed_asynchronous_run_go_on(tiny_run, start_python, tmp_path):
    settings = ("rollout.max_staleness=3", "trainer.tasks_per_step=3", "checkpoint.every=1")
    run = tiny_run(THREE, "trainer.steps=60", *settings)
    program = _start(start_python, run)

    def in_flight():
        assert program.poll() is None
        program.stop()
        found = _in_flight(run, tmp_path / "copy")
        program.send_signal(signal.SIGKILL if _has_all(found) else signal.SIGCONT)
        return found if _has_all(found) else None

    found = wait_until(in_flight, "episodes in flight of each environment", pause_s=0.3)
    program.wait()
    steps, told = len(numbers(run.folder.path)) + 5, Messages()
    train(resume_run(run.folder.path, [f"trainer.steps={steps}"]), watcher=told)
    reasons = Counter(reason for episode in found.values() if (reason := _reason(episode)) is not None)
    kept = {name: episode for name, episode in found.items() if _reason(episode) is None}
    turns = sum(len(episode.answers) for episode in kept.values())
    (message,) = [text for text in told.messages if "episodes in flight" in text]
    assert f"continued {len(kept)} episodes in flight after their last turn ({turns} turns)" in message
    assert f"restarted {reasons.total()} episodes in flight" in message
    assert all(f"{count} because {reason}" in message for reason, count in reasons.items())
    names = ("recovery/episodes_continued", "recovery/turns_replayed", "recovery/episodes_restarted")
    counts = [sum(line[name] for line in numbers(run.folder.path)) for name in names]
    assert counts == [len(kept), turns, reasons.total()]
    after = {s.trajectory.id: s.trajectory for s in read_trajectories(run.folder.trajectories)}
    for name, episode in kept.items():
        (sequence,) = after[name].sequences
        for turn, answer in zip(sequence.turns, episode.answers, strict=False):
            assert sequence.token_ids[turn.start : turn.end].tolist() == answer["token_ids"]
            assert sequence.logprobs[turn.start : turn.end].tolist() == np.float32(answer["logprobs"]).tolist()
            assert sequence.versions[turn.start : turn.end].tolist() == answer["versions"]
    trained = [name for name in after if int(name.partition("-")[0]) < 3 * steps]
    assert len(trained) == 3 * steps * 3, "every group has all its members once"


def _has_all(found):
    """Return True if some episodes go on in each environment that allows it, and others start again."""
    going_on = {name.split("-")[1] for name, episode in found.items() if _reason(episode) is None}
    return going_on >= {"replayed", "saved"} and any(_reason(episode) for episode in found.values())


def _reason(episode):
    """Return why an episode starts again; `Changing` shows something else after its first step."""
    if episode.problem is None and episode.id.split("-")[1] == "changing" and len(episode.calls) > 1:
        return "the environment returned a different observation or state"
    return episode.problem


def _in_flight(run, copy):
    """Return the recorded episodes that a resumed run goes on with."""
    saved = Checkpoints(run.folder.checkpoints, keep=99).newest()
    if saved is None or not run.folder.inflight.is_dir():
        return {}
    progress = json.loads((saved.path / "progress.json").read_text())
    state, ended = progress["scheduler"], set(_recoverable(run))
    held = {member[1]["id"] for group in (*state["finished"], *state["unfinished"]) for member in group["members"]}
    restarted = {group["position"] for group in state["unfinished"]}
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run.folder.inflight, copy)
    found = [read_journal(path, version=progress["version"]) for path in copy.iterdir()]
    return {
        episode.id: episode
        for episode in found
        if episode is not None
        and episode.id not in held | ended
        and ((position := group_position(episode.group_id)) in restarted or position >= state["tasks"]["position"])
    }


class Messages(RunWatcher):
    """Keeps the messages of a run."""

    def __init__(self):
        self.messages = []

    def on_message(self, text):
        self.messages.append(text)


def _recoverable(run):
    """Return the finished episodes that the newest checkpoint neither holds nor has trained on."""
    saved = Checkpoints(run.folder.checkpoints, keep=9).newest()
    if saved is None:
        return {}
    progress = json.loads((saved.path / "progress.json").read_text())
    state = progress["scheduler"]
    held = {member[1]["id"] for group in (*state["finished"], *state["unfinished"]) for member in group["members"]}
    restarted = {group["position"] for group in state["unfinished"]}
    return {
        found.id: found
        for stored in read_trajectories(run.folder.trajectories, messages=True)
        if (found := stored.trajectory).is_trainable
        and found.id not in held
        and (position := int(found.id.partition("-")[0])) is not None
        and (position in restarted or position >= state["tasks"]["position"])
        and max(int(s.versions[s.loss_mask].max()) for s in found.sequences) <= progress["version"]
    }


@pytest.mark.slow
def test_a_run_that_is_killed_before_its_first_checkpoint_keeps_its_episodes(tiny_run, tmp_path):
    run = tiny_run("trainer.steps=2", "rollout.max_staleness=2", "checkpoint.every=9")
    train(run, watcher=Snapshots(tmp_path / "cut", [9]))
    (folder,) = (tmp_path / "cut").iterdir()
    assert not list((folder / "checkpoints").glob("step-*"))
    before = {found[0]: found for found in episodes(folder)}
    told = Messages()
    train(Run(RunDirectory(folder), run.config), watcher=told)
    assert f"kept {len(before)} finished episodes not yet trained on" in told.messages
    assert {found[0]: found for found in episodes(folder)}.items() >= before.items()


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tiny_run, expected, tmp_path, caplog):
    folder = tmp_path / "damaged"
    shutil.copytree(expected.folder.path, folder, symlinks=True)
    broken = folder / "checkpoints" / "step-000005" / "trainer.pt"
    broken.write_bytes(broken.read_bytes()[:-1])
    assert train(resume_run(folder)).step == 5
    assert "trainer.pt is damaged" in caplog.text
    assert_same(folder, expected.folder.path)


def test_a_checkpoint_has_everything(tiny_run):
    run = tiny_run("trainer.steps=1")
    train(run)
    folder = run.folder.checkpoints / "step-000001"
    assert {p.name for p in folder.iterdir()} == {"model", "trainer.pt", "progress.json", "manifest.json"}
    progress = json.loads((folder / "progress.json").read_text())
    assert (progress["step"], progress["version"], progress["scheduler"]["tasks"]["position"]) == (1, 1, 2)
    assert progress["metrics_position"] == run.folder.metrics_file.stat().st_size


def _size(folder):
    """Bytes of the episodes so far."""
    return sum(file.stat().st_size for file in (folder / "trajectories").glob("*.jsonl"))


def _start(start_python, run):
    return start_python("-c", RESUME, str(run.folder.path), folder=WORLDS)


def test_a_run_that_continues_with_other_rows_says_so(tiny_run, tmp_path):
    file, told = tmp_path / "tasks.jsonl", Messages()
    file.write_text("".join(f'{{"id": "{i}", "seed": {i}}}\n' for i in range(4)))
    run = tiny_run(f"environment.tasks={file}", "trainer.steps=1")
    train(run)
    file.write_text("".join(f'{{"id": "{i}", "seed": {i + 9}}}\n' for i in range(4)))
    train(resume_run(run.folder.path, ["trainer.steps=2"]), watcher=told)
    assert [text for text in told.messages if "have changed since the checkpoint" in text]
