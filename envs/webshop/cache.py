"""Folders that are made once and read by every process: built aside, then moved into place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT_VARIABLE = "AGENTRL_CACHE"
"""Names another folder for what can be made again."""


def cache_folder() -> Path:
    """Where the shop's tables are kept: ``~/.cache/agentrl/webshop``, or under `ENVIRONMENT_VARIABLE`."""
    root = os.environ.get(ENVIRONMENT_VARIABLE)
    return (Path(root) if root else Path.home() / ".cache" / "agentrl") / "webshop"


def made_folder(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, made by `make` unless it is there. Another process never sees half of it.

    Args:
        folder: Where it shall be.
        make: Fills the empty folder that it is given.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(building)
        building.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, and made the same
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder
