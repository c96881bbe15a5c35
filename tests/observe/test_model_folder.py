import pytest

from agentrl.errors import UsageError
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.model_folder import find_model
from agentrl.observe.run_folder import RunDirectory


def write_model(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "a")
    run.save_config("")
    return run


def test_a_folder_and_a_hub_name_stay_what_they_are(tmp_path):
    write_model(tmp_path / "m")
    assert find_model(str(tmp_path / "m")) == str(tmp_path / "m")
    assert find_model("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"


def test_a_run_means_its_newest_whole_checkpoint(run):
    checkpoints = Checkpoints(run.checkpoints, keep=3)
    for step in (1, 2):
        checkpoints.save(step, lambda folder: write_model(folder / "model"))
    (run.checkpoints / "step-000003" / "model").mkdir(parents=True)
    expected = str(run.checkpoints / "step-000002" / "model")
    assert find_model(str(run.path)) == expected
    assert find_model(str(run.path.parent / "latest")) == expected
    assert find_model(str(run.checkpoints / "step-000001")) == str(run.checkpoints / "step-000001" / "model")


def test_a_run_without_checkpoints_means_the_model_it_made(run):
    write_model(run.model)
    assert find_model(str(run.path)) == str(run.model)


@pytest.mark.parametrize("path", ["runs/latest", "./none", "/none/at/all", "a/b/c"])
def test_an_absent_folder_is_named(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no model found in"):
        find_model(path)


@pytest.mark.parametrize("path", ["scrach", "Scratch", "scracth"])
def test_a_misspelt_scratch_is_no_name_on_the_hub(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"no model {path}.*Did you mean 'scratch'"):
        find_model(path)
    write_model(tmp_path / path)
    assert find_model(path) == str(tmp_path / path)


def test_a_misspelt_folder_names_its_neighbour(monkeypatch, tmp_path):
    write_model(tmp_path / "models" / "shopper")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no model found in \./models/shoper.*Did you mean 'models/shopper'"):
        find_model("./models/shoper")


def test_a_home_folder_in_a_config_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_model(tmp_path / "m")
    assert find_model("~/m") == str(tmp_path / "m")


def test_folders_without_a_model_are_named(run, tmp_path):
    with pytest.raises(UsageError, match="has no model yet"):
        find_model(str(run.path))
    with pytest.raises(UsageError, match="neither"):
        find_model(str(tmp_path))


def test_a_run_whose_checkpoints_are_all_damaged_is_not_its_untrained_model(run):
    write_model(run.model)
    (run.checkpoints / "step-000003" / "model").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"all checkpoints in .* are damaged: got step-000003"):
        find_model(str(run.path))
