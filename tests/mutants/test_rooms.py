"""Tests of the tables of the mutation tests: everything that they name exists. Nothing holds up a fork."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from mutants.rooms import EXPLAINED, ROOMS, TREE, wilson


def test_every_room_names_sources_and_tests_that_exist():
    for room in ROOMS.values():
        assert all((TREE / path).exists() for path in (*room.sources, *room.tests, *room.left_out))


def test_every_explained_change_is_of_lines_that_exist():
    for one in yaml.safe_load(EXPLAINED.read_text()):
        lines = [line.strip() for line in (TREE / one["path"]).read_text().splitlines()]
        assert set(one["from"].splitlines()) <= set(lines), f"remove what explains a change of {one['path']}: {one}"
        assert one["why"]


def test_the_interval_of_a_share_is_wilsons():
    low, high = wilson(36, 40)
    assert (round(low, 3), round(high, 3)) == (0.769, 0.960)
    assert wilson(0, 0) == (0.0, 1.0)


LEAVES_A_PROCESS = """
import os, signal, sys
from mutants.one_fork import in_fork

def work():
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.fork() == 0:
        os.setsid()
        open(sys.argv[1], "w").write(str(os.getpid()))
        signal.pause()
    while not os.path.exists(sys.argv[1]):
        pass
    return "a test"

print(in_fork(work, 1.0))
"""


@pytest.mark.parametrize(
    ("case", "told"),
    [("lives", "{'status': 'noticed', 'by': 'a test'}"), ("dies", "{'status': 'ended', 'by': 'the process'}")],
)
def test_a_process_that_a_test_left_behind_holds_up_nothing(case: str, told: str, tmp_path: Path) -> None:
    """It has the pipe of the outcome open, and lives outside the process group of the fork."""
    words = [sys.executable, "-c", LEAVES_A_PROCESS, str(tmp_path / "pid"), case]
    environment = {**os.environ, "PYTHONPATH": str(TREE / "tests")}
    ended = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    if (tmp_path / "pid").exists():
        with suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert ended.stdout.strip() == told
