"""Folders that are built once and read by every process: built in a temporary folder, then moved into place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from agentrl.errors import UsageError

ENVIRONMENT_VARIABLE = "AGENTRL_CACHE"
"""Environment variable with another folder for the cache."""
_HINT = f"set {ENVIRONMENT_VARIABLE} to a writable folder"


def cache_folder() -> Path:
    """Return the folder of the shop's tables: ``~/.cache/agentrl/webshop``, or below `ENVIRONMENT_VARIABLE`.

    Raises:
        UsageError: the user's home folder is unknown.
    """
    root = os.environ.get(ENVIRONMENT_VARIABLE)
    try:
        return (Path(root) if root else Path.home() / ".cache" / "agentrl") / "webshop"
    except RuntimeError as error:
        raise UsageError("no home folder found for the shop's tables", got=error, hint=_HINT) from error


def made_folder(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder, built by `make` unless it exists. Other processes never see an incomplete folder.

    Args:
        folder: Path of the folder.
        make: Function that fills an empty folder.

    Raises:
        UsageError: the folder cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise UsageError(f"the cache folder {folder.parent} cannot be written", got=error, hint=_HINT) from error
    try:
        make(building)
        building.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was first and built the same
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder
