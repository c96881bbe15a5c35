"""Lookup of models: Hugging Face folders and names, runs, checkpoints; unreachable names fail quickly."""

from __future__ import annotations

import difflib
import os
from contextlib import suppress
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

from agentrl.errors import UsageError, did_you_mean
from agentrl.observe.checkpoints import MANIFEST, Checkpoints, damage
from agentrl.observe.run_folder import LATEST, RunDirectory, find_run

MODEL = "model"
"""Name of the Hugging Face folder inside a checkpoint."""
NEW = "scratch"
"""Path of a model with random initial weights, which is no folder."""
MODELS_FOLDER = "AGENTRL_MODELS"
"""Environment variable with the folder of the models of `agentrl model add`."""
FETCH_CHECK_S = 10.0
"""Seconds before a request to the hub times out."""
_CONFIG = "config.json"


def models_folder() -> Path:
    """Return the folder of the models of `agentrl model add`."""
    return Path(os.environ.get(MODELS_FOLDER) or "~/.cache/agentrl/models").expanduser()


def added_models() -> list[Path]:
    """Return the folders of the models of `agentrl model add`, by name."""
    return sorted(file.parent for file in models_folder().glob("[!.]*/config.json"))


def find_model(path: str) -> str:
    """Return a Hugging Face folder (absolute) or name for a user's path.

    Args:
        path: A folder with a model, a checkpoint, a run (its newest checkpoint, or else its initial model),
            a name from `agentrl model add`, or a name on the Hugging Face hub.

    Raises:
        UsageError: a folder without a model, a damaged checkpoint, a run whose checkpoints are all damaged, or a path
            that does not exist.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(_inside(folder.resolve()))
    if path and (models_folder() / path / "config.json").is_file():
        return str((models_folder() / path).resolve())
    if path.startswith((".", "/", "~", "runs/")) or path.count("/") > 1:
        raise UsageError(
            f"no model found in {path}",
            got="no such folder",
            expected="a model folder, a run such as runs/latest, or a name on the Hugging Face hub",
            hint=_near_model(path),
        )
    if difflib.get_close_matches(path.lower(), [NEW], cutoff=0.8):
        raise UsageError(
            f"no model {path}",
            expected="a model folder, a run such as runs/latest, or a name on the Hugging Face hub",
            hint=f"did you mean {NEW!r}, a new small model?",
        )
    return path


def _near_model(path: str) -> str | None:
    """Suggest the model of `agentrl model add`, the run, or the neighbour of a missing folder with the nearest name."""
    known = [NEW, *(model.name for model in added_models()), *_folders_in(Path("runs"))]
    neighbours = {Path(one).name: one for one in _folders_in(Path(path).parent)}
    if near := difflib.get_close_matches(Path(path).name, neighbours, n=1):
        return f"did you mean {neighbours[near[0]]!r}?"
    return did_you_mean(path, known)


def _folders_in(folder: Path) -> list[str]:
    with suppress(OSError):
        return [str(folder / one.name) for one in folder.expanduser().iterdir() if one.is_dir()]
    return []


def _inside(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    if (folder / MODEL / "config.json").is_file() and not (folder / "config.yaml").is_file():
        _check_whole(folder)
        return folder / MODEL
    if (folder / "config.yaml").is_file() or (folder / LATEST / "config.yaml").is_file():
        run = find_run(folder)
        assert run is not None
        return _of_run(run)
    raise UsageError(
        f"no model found in {folder}",
        got="neither config.json nor a run's config.yaml",
        expected="a Hugging Face folder, a checkpoint, or a run",
    )


def _check_whole(checkpoint: Path) -> None:
    """Verify a checkpoint that the user named; a copy without a manifest is not verified."""
    if (checkpoint / MANIFEST).is_file() and (problem := damage(checkpoint)) is not None:
        raise UsageError(f"checkpoint {checkpoint} is damaged", got=problem, hint="use another checkpoint of the run")


def _of_run(run: RunDirectory) -> Path:
    newest = Checkpoints(run.checkpoints, keep=1).newest()
    candidates = [newest.path / MODEL] if newest else []
    for candidate in (*candidates, run.model):
        if (candidate / "config.json").is_file():
            return candidate
    raise UsageError(f"run {run.path} has no model yet", got="no checkpoint", expected="a run with a checkpoint")


def check_fetchable(model: str) -> None:
    """Check that a model is a folder, in the cache of the Hugging Face hub, or on the hub.

    Raises:
        UsageError: the model is not found.
    """
    if Path(model).is_dir():
        return
    try:
        if not isinstance(try_to_load_from_cache(model, _CONFIG), str):
            get_hf_file_metadata(hf_hub_url(model, _CONFIG), timeout=FETCH_CHECK_S)
    except Exception as error:  # the library raises many types, and so does its HTTP library
        raise UsageError(
            f"model {model} not found",
            got=f"no such folder, and not from the Hugging Face hub: {_first_line(error)}",
            expected="a model folder, a run such as runs/latest, or a name on the hub that can be reached",
            hint=_near_model(model)
            or "even with servers, --model is the folder or name of the weights that they serve; only engine openai "
            "accepts a service's model name",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
