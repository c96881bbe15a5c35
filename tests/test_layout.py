"""Rules about the sources that ruff does not check: the length of files, and one name for one time limit."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("agentrl", "envs", "tools", "agent_loops")
MAX_LINES = 600


def test_no_file_is_longer_than_600_lines() -> None:
    folders = (*SOURCES, "tests", "benchmarks", "examples", "docs")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_a_time_limit_has_a_name_of_its_own() -> None:
    """``GRACE_S`` in eight files with eight values tells a reader nothing about how they add up."""
    homes = defaultdict(list)
    limit = re.compile(r"^_?([A-Z][A-Z0-9_]*_S)(?:: [^=]+)? = ", re.MULTILINE)
    for path in (path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        for name in limit.findall(path.read_text()):
            homes[name].append(str(path.relative_to(ROOT)))
    assert len(homes) > 100
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
