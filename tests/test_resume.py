"""A run killed at any moment and resumed gives the numbers of an uninterrupted run, bit for bit."""

import json
import random
import shutil
import signal
import time

import pytest
from support.fixtures import WORLDS, tiny_runs
from support.forks import RESUME

from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import RunWatcher
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_record import trajectory_record
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.runs.rl import train
from agentrl.runs.start import Run, resume_run

SETTINGS = ("trainer.steps=5", "evaluation={every: 2, tasks: 3, split: test}", "algorithm.kl_coef=0.01")


def numbers(folder):
    lines = read_metrics(RunDirectory(folder).metrics_file)
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def episodes(folder):
    stored = [s.trajectory for s in read_trajectories(RunDirectory(folder).trajectories)]
    return sorted((t.id, t.reward, t.sequences[0].ids_list(), t.sequences[0].logprobs.tobytes()) for t in stored)


def weights(folder):
    return (folder / "checkpoints" / "step-000005" / "model" / "model.safetensors").read_bytes()


def assert_same(folder, expected):
    assert numbers(folder) == numbers(expected)
    assert episodes(folder) == episodes(expected)
    assert weights(folder) == weights(expected)


class Snapshots(RunWatcher):
    """Copies the run's folder while it runs: what a killed process would leave. Everything is written unbuffered."""

    def __init__(self, target, moments):
        self.target, self.moments, self.events = target, moments, 0

    def on_start(self, folder, status):
        self.folder = folder

    def on_status(self, status):
        self.events += 1
        if self.events in self.moments:
            shutil.copytree(self.folder, self.target / str(self.events), symlinks=True)


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


def test_a_killed_process_resumes_bit_for_bit(tiny_run, expected, start_python):
    killed = tiny_run(*SETTINGS, name="killed")
    moment = 0.4 * _size(expected.folder.path)
    program = _start(start_python, killed)
    while _size(killed.folder.path) < moment and program.poll() is None:
        time.sleep(0.01)
    assert program.kill() == -signal.SIGKILL
    assert len(numbers(killed.folder.path)) < 5
    result = train(resume_run(killed.folder.path))
    assert result.step == 5
    assert_same(killed.folder.path, expected.folder.path)


def test_finished_episodes_of_a_killed_asynchronous_run_are_trained_on(tiny_run, start_python):
    run = tiny_run("trainer.steps=60", "rollout.max_staleness=3", "checkpoint.every=3")
    program = _start(start_python, run)
    found = {}
    while not found:
        time.sleep(0.05)
        assert program.poll() is None
        program.stop()  # nothing ends between the look at the files and the kill
        found = _recoverable(run)
        program.send_signal(signal.SIGKILL if found else signal.SIGCONT)
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
