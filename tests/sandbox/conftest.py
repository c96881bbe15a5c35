"""Tests of sandboxes need bubblewrap; a machine without it says so."""

import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("bwrap") is None:
        lacking = pytest.mark.skip(reason="no bubblewrap here: apt-get install bubblewrap")
        for item in items:
            if HERE in item.path.parents and "needs_nothing" not in item.nodeid:
                item.add_marker(lacking)
