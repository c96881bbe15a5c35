"""Runs on fixed data (SFT, DPO, reward models) resume bit for bit from a stop and a kill, on the same data only."""

import copy
import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from ranks_here import group_of
from safetensors.torch import load_file
from support.fixtures import TINY_RUN
from support.runs import numbers

from agentrl.config.load import load_config
from agentrl.errors import ConfigError, UsageError
from agentrl.message import ImagePart
from agentrl.message.image import PlacedImage
from agentrl.observe.progress import Phase, RunWatcher
from agentrl.observe.run_status import RunEnd, read_status
from agentrl.runs.api import resume
from agentrl.runs.learning_run import digest_trajectories
from agentrl.runs.preferences import learn_preferences, train_reward
from agentrl.runs.rl import train
from agentrl.runs.sft import warm_start
from agentrl.runs.start import resume_learning, resume_run, resuming_command, start_run
from agentrl.runs.stop import StopRequest

RATE = "learning_rate: 1e-2"
EXPERT = f"sft={{episodes: 8, tokens_per_update: 40, epochs: 4, {RATE}, observation_weight: 0.3, save_minutes: 1e-9}}"
MEASURED = EXPERT.replace("}", ", stop_at: 0.99, check_every: 2, check_tasks: 8}").replace("1e-2", "3e-3")
DROPOUT = "model={lora: {rank: 4, dropout: 0.3}, dtype: bfloat16}"


class Killed(Exception):
    """In place of SIGKILL: nothing is saved after it."""


class Ending(RunWatcher):
    """End a run while it reports an update."""

    def __init__(self, update, end):
        self.update, self.end = update, end

    def on_step(self, step, metrics):
        if step == self.update:
            self.end()


class EndingAMeasurement(Ending):
    """End a run while it measures success after an update."""

    def on_step(self, step, metrics):
        pass

    def on_status(self, status):
        if (status.step, status.phase) == (self.update, Phase.EVALUATE):
            self.end()


def killed():
    raise Killed


def assert_same(result, run, expected, other):
    """Of two finished runs: all weights and metrics, bit for bit."""
    assert (result.step, result.interrupted) == (expected.step, False)
    assert numbers(run.folder.path) == numbers(other.folder.path)
    one, two = (weights_of(Path(found.checkpoint)) for found in (result, expected))
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.equal(two[name]), name
    assert not (Path(result.checkpoint) / "trainer.pt").exists(), "the last checkpoint holds only the model"


def weights_of(checkpoint):
    return {name: value for file in checkpoint.glob("model/*.safetensors") for name, value in load_file(file).items()}


def check_resumes(make, learn, command, ending=Ending):
    """Of a run that `make` makes by its name: stopped after update 2, and later killed in update 4."""
    other, run, requested = make("undisturbed"), make("disturbed"), StopRequest()
    expected = learn(other)
    assert expected.step >= 5
    stopped = learn(run, watcher=ending(2, requested), interruption=requested)
    assert (stopped.step, stopped.interrupted) == (2, True)
    with pytest.raises(Killed):
        learn(resume_learning(run.folder.path, command=command), watcher=Ending(4, killed))
    assert len(numbers(run.folder.path)) == 4
    result = learn(resume_learning(run.folder.path, command=command))
    assert_same(result, run, expected, other)
    again = learn(resume_learning(run.folder.path, command=command))
    assert (again.step, again.interrupted, again.metrics) == (result.step, False, result.metrics)
    status, section = read_status(run.folder.path), "sft" if command == "sft" else "preferences"
    assert (status.step, status.steps, status.end) == (result.step, result.step, RunEnd.FINISHED)
    with pytest.raises(ConfigError, match=rf"the training has ended.*learning_rate.*agentrl {command} … model\.path="):
        resume_learning(run.folder.path, [f"{section}.learning_rate=1"], command=command)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(EXPERT,), (EXPERT, DROPOUT), (EXPERT, "trainer.optimizer=muon")])
def test_a_warm_start_resumes_bit_for_bit(tiny_run, words):
    check_resumes(lambda name: tiny_run(*words, name=name), warm_start, "sft")


@pytest.mark.slow
@pytest.mark.parametrize("ending", [Ending, EndingAMeasurement])
def test_a_warm_start_that_measures_success_resumes_bit_for_bit(tiny_run, ending):
    check_resumes(lambda name: tiny_run(MEASURED, name=name), warm_start, "sft", ending)


@pytest.mark.slow
def test_a_warm_start_of_two_processes_resumes_bit_for_bit(tiny_run, monkeypatch):
    @contextmanager
    def forked_ranks(count, *, logs):
        with group_of(count) as group:
            yield group.ranks

    monkeypatch.setattr("agentrl.runs.learning_run.open_ranks", forked_ranks)
    check_resumes(lambda name: tiny_run(EXPERT, "trainer.processes=2", name=name), warm_start, "sft")


@pytest.fixture
def trained(tiny_run):
    played = tiny_run("trainer={steps: 2, tasks_per_step: 4}", "algorithm.group_size=4", name="played")
    train(played)
    return played.folder.path


@pytest.fixture
def pairs(tiny_run, trained):
    path, words = trained, "pairs_per_task: 2, pairs_per_update: 2, epochs: 3, save_minutes: 1e-9"
    section = f"preferences={{sources: [{path}], {words}, {RATE}}}"
    return lambda name: tiny_run(section, f"model={{path: {path}, scratch: null}}", name=name)


@pytest.mark.slow
@pytest.mark.parametrize(("learn", "command"), [(learn_preferences, "dpo"), (train_reward, "reward-model")])
def test_training_on_pairs_resumes_bit_for_bit(pairs, learn, command):
    check_resumes(pairs, learn, command)


def chats(file, count, word="50"):
    said = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": f"I say {word}."}]
    file.write_text("\n".join([json.dumps({"messages": said})] * count))


@pytest.fixture
def stopped(tiny_run, trained, tmp_path):
    """A warm start on a file, stopped after its second update."""
    chats(tmp_path / "chats.jsonl", 6)
    words = (
        f"model.path={trained}",
        "model.scratch=null",
        f"sft={{data: {tmp_path}/chats.jsonl, tokens_per_update: 60, epochs: 3}}",
    )
    run, requested = tiny_run(*words, name="stopped"), StopRequest()
    assert warm_start(run, watcher=Ending(2, requested), interruption=requested).interrupted
    return run.folder.path


@pytest.mark.slow
def test_a_second_interrupt_saves_nothing(tiny_run):
    run, requested = tiny_run(EXPERT), StopRequest()

    def interrupt_twice():
        requested.count += 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_start(run, watcher=Ending(3, interrupt_twice), interruption=requested)
    assert sorted(path.name for path in run.folder.checkpoints.glob("step-*")) == ["step-000001", "step-000002"]


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(tiny_run):
    never = EXPERT.replace("1e-9", "1e9")
    other, run, watcher, told = tiny_run(never, name="undisturbed"), tiny_run(never), RunWatcher(), []
    watcher.on_message = told.append
    expected = warm_start(other)
    with pytest.raises(Killed):
        warm_start(run, watcher=Ending(2, killed))
    result = warm_start(resume_learning(run.folder.path, command="sft"), watcher=watcher)
    assert "the run has no checkpoint: it starts again from its first update" in told
    assert_same(result, run, expected, other)


@pytest.mark.slow
def test_only_the_same_data_is_resumed_and_it_may_have_moved(stopped, tmp_path):
    file, moved = tmp_path / "chats.jsonl", tmp_path / "moved.jsonl"
    chats(file, 6, word="51")
    with pytest.raises(UsageError, match=r"the data has changed since the training began.*agentrl sft … model\.path="):
        warm_start(resume_learning(stopped, command="sft"))
    chats(moved, 6)
    with pytest.raises(
        ConfigError, match=r"this key cannot change.*sft\.epochs: 3 -> 4 \(it changes what an.*: agentrl sft CONFIG"
    ):
        resume_learning(stopped, ["sft.epochs=4"], command="sft")
    for unread in ("trainer.steps=9", "trainer.learning_rate=1", "preferences.learning_rate=1"):
        with pytest.raises(ConfigError, match=r"this training does not read it"):
            resume_learning(stopped, [unread], command="sft")
    assert not resume(stopped, overrides=[f"sft.data={moved}", "sft.learning_rate=1e-4"], progress=False).interrupted


@pytest.mark.slow
def test_each_command_resumes_its_own_runs(stopped, trained):
    with pytest.raises(
        UsageError, match=r"is not a run of agentrl train: got a run of agentrl sft.*agentrl sft --resume"
    ):
        resume_run(stopped)
    with pytest.raises(UsageError, match=r"is not a run of agentrl dpo: got a run of agentrl train"):
        resume_learning(trained, command="dpo")


def test_a_run_without_a_readable_status_is_resumed_by_its_command_only(tmp_path, tiny_run):
    words = [*TINY_RUN, EXPERT, f"run.directory={tmp_path}", "run.name=run"]
    run = start_run(load_config(None, words), kind="sft", command="sft").folder
    assert resuming_command(run) == "sft"
    (run.path / "status.json").write_text("{")
    with pytest.raises(UsageError, match=r"is not a run of agentrl train: got a run of agentrl sft"):
        resume_run(run.path)
    with pytest.raises(UsageError, match=r"is not a run of agentrl reward-model: got a run of agentrl sft"):
        resume_learning(run.path, command="reward-model")
    (run.path / "start.json").unlink()
    assert (resuming_command(run), resume_learning(run.path, command="sft").folder.path) == ("", run.path)


@pytest.mark.parametrize(("kept", "fate"), [(8, "are used again"), (7, "all are played again")])
def test_a_run_killed_before_its_first_checkpoint_uses_the_stored_demonstrations(tiny_run, kept, fate):
    run, messages, watcher = tiny_run(EXPERT.replace("1e-9", "60")), [], RunWatcher()
    watcher.on_message = messages.append
    with pytest.raises(Killed):
        warm_start(run, watcher=Ending(2, killed))
    file = run.folder.trajectories / "step-000000.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    ends = [number for number, line in enumerate(lines) if json.loads(line)["kind"] == "end"]
    file.write_bytes(b"".join(lines[: ends[kept - 1] + 1]))
    before = file.read_bytes()
    assert not warm_start(resume_learning(run.folder.path, command="sft"), watcher=watcher).interrupted
    assert f"{kept} of 8 demonstrations are stored, and {fate}" in "\n".join(messages)
    assert (file.read_bytes() == before) == (kept == 8)
    whole = tiny_run(EXPERT.replace("1e-9", "60"), name="whole")
    warm_start(whole)
    assert numbers(run.folder.path) == numbers(whole.folder.path)


@pytest.mark.slow
def test_a_run_resumes_after_its_initial_model_was_removed(stopped, trained):
    shutil.rmtree(trained / "checkpoints")
    result = warm_start(resume_learning(stopped, command="sft"))
    assert (result.interrupted, len(numbers(stopped))) == (False, result.step)


@pytest.mark.slow
def test_a_run_without_its_demonstrations_is_not_resumed(tiny_run):
    run, requested = tiny_run(EXPERT), StopRequest()
    assert warm_start(run, watcher=Ending(2, requested), interruption=requested).interrupted
    shutil.rmtree(run.folder.trajectories)
    with pytest.raises(UsageError, match="the data has changed since the training began"):
        warm_start(resume_learning(run.folder.path, command="sft"))


def test_the_digest_of_the_data_covers_images(trajectories):
    def digest(*images):
        found = copy.deepcopy(trajectories)
        for data in images:
            found[1].sequences[0].place(PlacedImage(start=0, rows=1, columns=1, image=ImagePart(data=data)))
        return digest_trajectories(found)

    assert digest(b"red") == digest(b"red")
    assert len({digest(b"red"), digest(b"blue"), digest(), digest_trajectories(trajectories[1:])}) == 4
