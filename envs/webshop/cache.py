"""Folders that are made once and read by every process: built aside, then moved into place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from agentrl.errors import UsageError

ENVIRONMENT_VARIABLE = "AGENTRL_CACHE"
"""Names another folder for what can be made again."""
_HINT = f"set {ENVIRONMENT_VARIABLE} to a folder that can be written"


def cache_folder() -> Path:
    """Where the shop's tables are kept: ``~/.cache/agentrl/webshop``, or under `ENVIRONMENT_VARIABLE`.

    Raises:
        UsageError: nobody says where the user's home is.
    """
    root = os.environ.get(ENVIRONMENT_VARIABLE)
    try:
        return (Path(root) if root else Path.home() / ".cache" / "agentrl") / "webshop"
    except RuntimeError as error:
        raise UsageError("there is no home folder for the shop's tables", got=error, hint=_HINT) from error


def made_folder(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, made by `make` unless it is there. Another process never sees half of it.

    Args:
        folder: Where it shall be.
        make: Fills the empty folder that it is given.

    Raises:
        UsageError: nothing can be written there.
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
        if not folder.is_dir():  # else another process was first, and made the same
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder
