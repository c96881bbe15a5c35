"""What tests of local sandboxes need; elsewhere they are skipped with the reason."""

import shutil

import pytest

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="no bubblewrap here: apt-get install bubblewrap"
)
