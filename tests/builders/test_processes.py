"""The model that engines load again outlives the checkpoint that it comes from."""

import shutil

from agentrl.builders.processes import keep_model
from agentrl.observe.run_folder import RunDirectory


def test_a_model_of_a_checkpoint_is_kept(tmp_path):
    run = RunDirectory(tmp_path / "run")
    for number in (1, 2):
        model = run.checkpoints / f"step-{number}" / "model"
        (model / "parts").mkdir(parents=True)
        (model / "parts" / "weights").write_text(f"weights {number}")
        kept = keep_model(str(model), run)
        shutil.rmtree(run.checkpoints)
        assert (run.path / "engine-model" / "parts" / "weights").read_text() == f"weights {number}"
        assert kept == str(run.path / "engine-model")


def test_other_models_stay_where_they_are(tmp_path):
    run = RunDirectory(tmp_path / "run")
    for path in ("Qwen/Qwen2.5-0.5B-Instruct", str(run.model), str(tmp_path / "other")):
        assert keep_model(path, run) == path
    assert not (run.path / "engine-model").exists()
