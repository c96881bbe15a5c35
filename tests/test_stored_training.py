"""Rollouts without a trainer, and training on stored episodes without an engine."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.fixtures import TINY_RUN
from support.token_tables import check_token_tables

from agentrl.config import load_config
from agentrl.errors import ConfigError, UsageError
from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import Phase, RunStatus, RunWatcher
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.run_status import RunEnd, read_status
from agentrl.observe.trajectory_store import read_trajectories, step_file
from agentrl.runs import rollout
from agentrl.runs.rl import train
from agentrl.runs.rollout import Rollout, play, resume_rollout, start_rollout
from agentrl.runs.start import Run, resume_run, start_run
from agentrl.runs.stop import StopRequest
from agentrl.runs.stored_training import StoredGroups, check_stored_start, start_check

NewRun = Callable[..., Run]
WITHOUT_TRAINER = ("rollout/", "sync/", "time/", "bias/")
"""Metrics of a run that a trainer alone does not have."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A synchronous run of four steps, whose episodes others train on."""
    folder = tmp_path_factory.mktemp("played")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent / "worlds")
        fixed = [f"run.directory={folder}", "run.name=run", "algorithm.kl_coef=0.01"]
        run = start_run(load_config(None, [*TINY_RUN, *fixed]), kind="test")
        train(run)
    return run


def stored_run(tiny_run: NewRun, played: Run, *overrides: str, name: str = "stored", folder: Path | None = None) -> Run:
    episodes = f"trainer.episodes={folder or played.folder.path}"
    model = f"model.path={played.folder.model}"
    return tiny_run(episodes, model, "model.scratch=null", "algorithm.kl_coef=0.01", *overrides, name=name)


def comparable(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith(WITHOUT_TRAINER)}


def weights(run: Run, step: int = 4) -> bytes:
    return (run.folder.checkpoints / f"step-{step:06d}" / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_training_on_the_episodes_of_a_synchronous_run_gives_its_updates_bit_for_bit(
    tiny_run: NewRun, played: Run
) -> None:
    run = stored_run(tiny_run, played, "observe.tokens=all")
    result = train(run)
    assert (result.step, result.interrupted) == (4, False)
    episodes = {one.trajectory.id: one.trajectory for one in read_trajectories(played.folder.trajectories)}
    check_token_tables(run.folder.path, episodes)
    expected = [comparable(line) for line in read_metrics(played.folder.metrics_file)]
    found = [comparable(line) for line in read_metrics(run.folder.metrics_file)]
    assert found == expected
    assert len(expected[0]) > 40
    assert weights(run) == weights(played)
    assert not run.folder.trajectories.exists()


class Stopper(RunWatcher):
    """Stops a run after a step."""

    def __init__(self, request: StopRequest, step: int) -> None:
        self._request, self._step = request, step
        self.messages: list[str] = []
        self.first_step: int | None = None
        """Step that the progress shows when training begins."""

    def on_status(self, status: RunStatus) -> None:
        if status.phase is Phase.TRAIN and self.first_step is None:
            self.first_step = status.step

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._step:
            self._request()

    def on_message(self, text: str) -> None:
        self.messages.append(text)


def test_a_run_on_stored_episodes_stops_and_resumes(tiny_run: NewRun, played: Run) -> None:
    run = stored_run(tiny_run, played, "checkpoint.every=100")
    request = StopRequest()
    result = train(run, watcher=Stopper(request, 3), interruption=request)
    assert (result.step, result.interrupted) == (3, True)
    watcher = Stopper(request, 4)
    assert train(resume_run(run.folder.path), watcher=watcher).step == 4
    assert watcher.first_step == 3
    assert weights(run) == weights(played)
    assert len(read_metrics(run.folder.metrics_file)) == 4


def test_off_policy_episodes_are_corrected_with_their_log_probabilities(tiny_run: NewRun, played: Run) -> None:
    run = stored_run(tiny_run, played, "model.path=" + str(played.folder.checkpoints / "step-000004" / "model"))
    train(run)
    lines = read_metrics(run.folder.metrics_file)
    assert lines[0]["mismatch/prob_abs_mean"] > 1e-3
    assert lines[3]["staleness/max"] == 0.0
    assert all(line["train/grad_norm"] > 0 for line in lines)


def test_dynamic_sampling_passes_over_groups_without_a_signal(tiny_run: NewRun, played: Run) -> None:
    run = stored_run(tiny_run, played, "algorithm.dynamic_sampling=true", "trainer.steps=1")
    train(run)
    assert read_metrics(run.folder.metrics_file)[0]["groups/zero_variance"] == 0
    many = stored_run(tiny_run, played, "algorithm.dynamic_sampling=true", name="many")
    groups = StoredGroups(many.config)
    everything = list(groups.batches(0, keep=lambda group: group.position % 2 == 0))
    assert [([group.position for group in batch], used) for batch, used in everything] == [([0, 2], 3), ([4, 6], 7)]
    assert [[group.position for group in batch] for batch, _ in groups.batches(3, keep=lambda _: True)] == [
        [3, 4],
        [5, 6],
    ]
    groups.close()


def cut(played: Run, folder: Path, change: Callable[[str], str]) -> Path:
    """Copy a run's store into a folder without a config, with its text changed and its checksums removed."""
    shutil.copytree(played.folder.trajectories, folder, ignore=shutil.ignore_patterns(".index*"))
    for file in folder.iterdir():
        text = re.sub(r',"checksum":"crc32:[0-9a-f]{8}"', "", file.read_text())
        file.write_text(change(text))
    return folder


def test_exhausted_stored_groups_are_reported(tiny_run: NewRun, played: Run, tmp_path: Path) -> None:
    same = cut(played, tmp_path / "same", lambda text: re.sub(r'"reward":[-0-9.e]+', '"reward":1.0', text))
    with pytest.raises(UsageError, match=r"used up after step 0.*8 stored groups"):
        train(stored_run(tiny_run, played, "algorithm.dynamic_sampling=true", folder=same))


def test_incomplete_groups_are_counted_and_left_out(tiny_run: NewRun, played: Run, tmp_path: Path) -> None:
    folder = cut(played, tmp_path / "cut", lambda text: text)
    last = step_file(folder, 4)
    lines = last.read_text().splitlines(keepends=True)
    lines.remove([line for line in lines if line.startswith('{"kind":"end"')][-1])
    last.write_text("".join(lines))
    with pytest.raises(UsageError, match=r"7 stored groups of 3 .*; 1 incomplete .*8 groups for 4 steps.*steps=3"):
        check_stored_start(stored_run(tiny_run, played, folder=folder).config)
    run = stored_run(tiny_run, played, "trainer.steps=3", folder=folder, name="shorter")
    assert train(run).step == 3
    assert [line["train/loss"] for line in read_metrics(run.folder.metrics_file)] == [
        line["train/loss"] for line in read_metrics(played.folder.metrics_file)[:3]
    ]


def test_incompatible_episodes_are_rejected_with_counts(tiny_run: NewRun, played: Run, tmp_path: Path) -> None:
    run = stored_run(tiny_run, played)
    bare = cut(played, tmp_path / "bare", lambda text: re.sub(r'"logprobs":\[[^]]*\]', _without_logprobs, text))
    with pytest.raises(UsageError, match=r"no log-probabilities .*24 of 24 episodes"):
        StoredGroups(stored_run(tiny_run, played, folder=bare, name="bare").config)
    large = cut(played, tmp_path / "large", lambda text: text.replace('"token_ids":[', '"token_ids":[5000,', 1))
    config = stored_run(tiny_run, played, folder=cut_counts(large), name="large").config
    with pytest.raises(ConfigError, match=r"token ids up to 5000 in [1-9][0-9]* episodes.*below 286"):
        check_stored_start(config)
    with pytest.raises(ConfigError, match=r"group_size differs .*got 2, expected 3"):
        StoredGroups(load_config(run.folder.config_file, ["algorithm.group_size=2"]))
    with pytest.raises(ConfigError, match=r"cannot train on stored episodes.*got greedy rollouts"):
        check_stored_start(load_config(run.folder.config_file, ["algorithm.advantage=remax"]))
    with pytest.raises(UsageError, match="no trajectories found in"):
        check_stored_start(load_config(run.folder.config_file, [f"trainer.episodes={tmp_path}"]))


def _without_logprobs(found: re.Match[str]) -> str:
    count = found[0].count(",") + 1
    return f'"logprobs":[{",".join(["null"] * count)}]'


def cut_counts(folder: Path) -> Path:
    """Remove the counts that would reveal the added tokens, and add their other columns."""
    for file in folder.iterdir():
        text = file.read_text()
        text = text.replace('"token_ids":[5000,', '"token_ids":[')
        file.write_text(re.sub(r'"token_ids":\[(\d+)', '"token_ids":[5000', text, count=1))
    return folder


def test_episodes_of_another_tokenizer_are_rejected(tiny_run: NewRun, played: Run) -> None:
    other = tiny_run("model.scratch.vocab_size=280", "run.seed=5", name="other")
    with pytest.raises(ConfigError, match="does not have the policy's tokenizer"):
        train(stored_run(tiny_run, played, f"model.path={_model_of(other)}", name="refused"))


def _model_of(run: Run) -> Path:
    train(
        Run(run.folder, run.config.model_copy(update={"trainer": run.config.trainer.model_copy(update={"steps": 1})}))
    )
    return run.folder.model


def ids(run: Run) -> list[str]:
    return sorted(stored.trajectory.id for stored in read_trajectories(run.folder.trajectories))


def new_rollout(tiny_run: NewRun, *overrides: str, name: str = "rollout") -> Run:
    """A rollout run that has the tiny run's config."""
    run = tiny_run(*overrides, name=f"config-of-{name}")
    return start_rollout(load_config(run.folder.config_file, [f"run.name={name}"]))


def test_rollouts_store_the_first_episodes_of_a_training_run(tiny_run: NewRun, played: Run) -> None:
    run = new_rollout(tiny_run, "engine.max_num_seqs=8")
    result = play(run)
    assert (result.groups, result.episodes) == (8, 24)
    assert ids(run) == ids(played)
    lines = read_metrics(run.folder.metrics_file)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert sum(line["episodes"] for line in lines) == 24
    first = {stored.trajectory.id: stored.trajectory for stored in read_trajectories(played.folder.trajectories)}
    for stored in read_trajectories(run.folder.trajectories):
        trajectory = stored.trajectory
        assert trajectory.oldest_version == 0
        if trajectory.group_id.startswith(("0-", "1-")):  # the step before the first update
            assert trajectory.sequences[0].ids_list() == first[trajectory.id].sequences[0].ids_list()
    assert not run.folder.checkpoints.exists()


@pytest.mark.slow
def test_rollouts_are_trained_on(tiny_run: NewRun) -> None:
    run = new_rollout(tiny_run)
    play(run)
    trained = stored_run(tiny_run, run)
    train(trained)
    lines = read_metrics(trained.folder.metrics_file)
    assert [line["staleness/max"] for line in lines] == [0.0, 1.0, 2.0, 3.0]
    assert lines[0]["mismatch/prob_abs_mean"] < 1e-4


class KillAfter(RunWatcher):
    """Raises Ctrl-C's exception when some episodes have ended."""

    def __init__(self, request: StopRequest, episodes: int) -> None:
        self._request, self._left = request, episodes
        self._done = 0

    def on_status(self, status: RunStatus) -> None:
        if status.episodes_done > self._done:
            self._left -= 1
            if self._left == 0:
                self._request()
        self._done = status.episodes_done


@pytest.mark.parametrize("after", [1, 7, 15])
@pytest.mark.slow
def test_stopped_rollouts_resume_without_playing_an_episode_twice(tiny_run: NewRun, after: int) -> None:
    run = new_rollout(tiny_run, "rollout.max_concurrent=4")
    request = StopRequest()
    with pytest.raises(KeyboardInterrupt):
        play(run, watcher=KillAfter(request, after), interruption=request)
    kept = {s.trajectory.id for s in read_trajectories(run.folder.trajectories) if s.trajectory.is_trainable}
    before = b"".join(file.read_bytes() for file in sorted(run.folder.trajectories.glob("*.jsonl")))
    assert len(kept) < 24
    play(resume_rollout(run.folder.path))
    assert len(ids(run)) == 24
    stored = [s.trajectory for s in read_trajectories(run.folder.trajectories)]
    assert all(trajectory.is_trainable for trajectory in stored)
    for identity in kept:
        record = f'"kind":"start","id":"{identity}"'.encode()
        after_all = b"".join(file.read_bytes() for file in sorted(run.folder.trajectories.glob("*.jsonl")))
        assert after_all.count(record) == before.count(record) == 1


class Messages(RunWatcher):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


@pytest.mark.parametrize("overrides", [[], ["trainer.steps=1"], ["rollout.max_concurrent=2"]])
def test_a_complete_rollout_says_at_once_that_nothing_is_left(
    tiny_run: NewRun, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    run = new_rollout(tiny_run, "trainer.steps=1")
    first = play(run)
    before = ids(run)

    def start(*_: object, **__: object) -> NoReturn:
        raise AssertionError("an engine or an environment is started")

    for name in ("open_policy", "build_run_environments"):
        monkeypatch.setattr(rollout, name, start)
    watcher = Messages()
    assert play(resume_rollout(run.folder.path, overrides), watcher=watcher) == first
    changed = ["changed: rollout.max_concurrent: 128 -> 2 (placement and speed of the same computation)"]
    said = "all episodes of the run have been played; to play more, add trainer.steps=2"
    assert watcher.texts == [*(changed if "rollout.max_concurrent=2" in overrides else ()), said]
    assert ids(run) == before
    status = read_status(run.folder.path)
    assert status is not None
    assert (status.end, status.step) == (RunEnd.FINISHED, 1)
    assert (load_config(run.folder.config_file).rollout.max_concurrent == 2) == ("rollout" in "".join(overrides))


@pytest.mark.slow
def test_rollouts_resume_with_more_steps(tiny_run: NewRun) -> None:
    run = new_rollout(tiny_run, "trainer.steps=1")
    play(run)
    assert len(ids(run)) == 6
    play(resume_rollout(run.folder.path, ["trainer.steps=2"]))
    assert len(ids(run)) == 12
    assert load_config(run.folder.config_file).trainer.steps == 2


def test_a_rollout_run_is_not_resumed_as_a_training_run_and_the_other_way_round(tiny_run: NewRun, played: Run) -> None:
    run = new_rollout(tiny_run)
    with pytest.raises(UsageError, match=r"got a run of agentrl rollout.*agentrl rollout --resume"):
        resume_run(run.folder.path)
    with pytest.raises(UsageError, match=r"is not a rollout run.*agentrl train --resume"):
        resume_rollout(played.folder.path)
    assert start_check(run.config) is not check_stored_start
    assert RunDirectory.open(run.folder.path).rollout_file.read_text() == '{"groups":8}'
    assert Rollout(run).status.steps == 4
