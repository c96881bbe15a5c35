from pathlib import Path

import pytest

from agentrl.errors import UsageError
from agentrl.observe.run_folder import RunDirectory, find_run, lock_folder


def test_a_new_run_is_reached_through_latest(tmp_path):
    first = RunDirectory.create(tmp_path / "runs", "first")
    first.save_config("a: 1\n")
    second = RunDirectory.create(tmp_path / "runs", None, prefix="house hold/grpo")
    second.save_config("a: 2\n")
    assert second.path.name.startswith("house-hold-grpo-")
    assert RunDirectory.open(tmp_path / "runs" / "latest").config_file.read_text() == "a: 2\n"


def test_two_runs_in_the_same_second_get_two_folders(tmp_path):
    paths = {RunDirectory.create(tmp_path, None, prefix="x").path for _ in range(3)}
    assert len(paths) == 3


def test_a_run_is_never_overwritten(tmp_path):
    RunDirectory.create(tmp_path, "a").save_config("")
    with pytest.raises(UsageError, match=r"already exists.*agentrl status"):
        RunDirectory.create(tmp_path, "a")


def test_a_folder_of_the_user_called_latest_is_left_alone(tmp_path):
    (tmp_path / "latest").mkdir()
    RunDirectory.create(tmp_path, "a")
    assert not (tmp_path / "latest").is_symlink()


def test_a_model_in_a_checkpoint_belongs_to_its_run_and_what_is_in_it_does_not(tmp_path):
    run, newest = (RunDirectory.create(tmp_path / "runs", name) for name in "ab")
    run.save_config("")
    newest.save_config("")
    model = run.checkpoints / "step-000001" / "model"
    (model / "deeper").mkdir(parents=True)
    for folder, owner in ((run.path, run), (run.checkpoints, run), (model, run), (tmp_path / "runs", newest)):
        found = find_run(folder)
        assert found is not None
        assert found.path == owner.path
    assert find_run(model / "deeper") is None
    assert find_run(model / "absent") is None


@pytest.mark.parametrize("name", ["absent", "."])
def test_what_is_no_run_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="is not a run"):
        RunDirectory.open(tmp_path / name)


def test_one_process_works_in_a_run_at_a_time(tmp_path):
    run = RunDirectory.create(tmp_path, "a")
    again = RunDirectory(run.path)
    with run.in_use(), pytest.raises(UsageError, match="is in use"), again.in_use():
        raise AssertionError("both work in it")
    with again.in_use():
        pass


def test_a_locked_folder_is_rejected_and_blocked_calls_inside_do_not_lock_it(tmp_path):
    refused = pytest.raises(UsageError, match=f"evaluation {tmp_path} is in use")
    with lock_folder(tmp_path, "evaluation"), refused, lock_folder(tmp_path, "evaluation"):
        raise AssertionError("both work in it")
    with pytest.raises(BlockingIOError), lock_folder(tmp_path, "evaluation"):
        raise BlockingIOError


def test_a_start_whose_folder_was_moved_removes_nothing(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "mine")
    run.path.rename(tmp_path / "moved")
    run.path.mkdir()
    (run.path / "notes").write_text("another one's")
    run.undo_start()
    assert (run.path / "notes").read_text() == "another one's"
    assert (tmp_path / "moved").is_dir()


def test_the_paths_of_a_new_run_do_not_depend_on_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create(Path("runs"), "one")
    monkeypatch.chdir("/")
    run.save_config("run: {}\n")
    assert (tmp_path / "runs" / "latest" / "config.yaml").is_file()
