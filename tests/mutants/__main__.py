"""`make mutants`: make small wrong changes of the sources, room by room, and report how many the tests notice."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from mutants.changes import Change, sample
from mutants.rooms import EXPLAINED, ROOMS, TREE, Room, wilson

FOLDER = TREE / ".cache" / "mutants"
CATALOGUE = ("envs", "tools", "agent_loops", "configs")
"""Folders of the checkout that are installed inside the package."""


def main() -> int:
    """Run the requested rooms; return 1 if one of them is below its goal."""
    words = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    words.add_argument("--room", action="append", choices=[*ROOMS], help="all rooms by default")
    words.add_argument("--sample", default="40", help="changes per room, or `all`")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--budget", type=float, default=60.0, help="seconds of tests per change")
    words.add_argument("--fresh", action="store_true", help="discard the results of earlier runs")
    asked = words.parse_args()
    if asked.fresh:
        shutil.rmtree(FOLDER, ignore_errors=True)
    count = None if asked.sample == "all" else int(asked.sample)
    rows = [run_room(name, count, asked.seed, asked.budget) for name in asked.room or ROOMS]
    print(f"\nseed {asked.seed}, {asked.sample} changes per room, commit {_commit()}")
    head = ("room", "places", "changed", "noticed", "of these ended", "survived", "explained", "share", "95 %", "goal")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row["cells"])) + " |")
    return int(not all(row["reached"] for row in rows))


def run_room(name: str, count: int | None, seed: int, budget_s: float) -> dict[str, Any]:
    """Test the changes of a room that have no result yet, print the survivors, and return the table row."""
    room = ROOMS[name]
    changes, places = sample(TREE, list(room.files()), count, seed)
    results = _results(name, room, changes, budget_s)
    explained = {(one["path"], one["from"], one["to"]) for one in yaml.safe_load(EXPLAINED.read_text()) or []}
    survivors = [change for change in changes if results[_key(change)]["status"] == "survived"]
    open_ones = [one for one in survivors if (one.path, one.before, one.after) not in explained]
    for change in open_ones:
        print(f"\n{name}: survived {results[_key(change)]['tests']} tests, in {change.function}\n{change.diff}")
    ended = sum(results[_key(change)]["status"] == "ended" for change in changes)
    noticed, judged = len(changes) - len(survivors), len(changes) - len(survivors) + len(open_ones)
    low, high = wilson(noticed, judged)
    share = noticed / judged if judged else 1.0
    cells = (name, places, len(changes), noticed, ended, len(open_ones), len(survivors) - len(open_ones))
    figures = (f"{share:.1%}", f"{low:.0%} to {high:.0%}", f"{room.goal:.0%}")
    return {"cells": [*cells, *figures], "reached": share >= room.goal}


def _results(name: str, room: Room, changes: list[Change], budget_s: float) -> dict[str, Any]:
    """Return results by change. Noticed changes are not tested again; survivors are, once tests have changed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path, tests = FOLDER / f"{name}.jsonl", _digest(*room.tests, "tests/conftest.py", "tests/support/fixtures.py")
    while True:
        known = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            result = json.loads(line)
            if result["status"] != "survived" or result["key"].endswith(tests):
                known[result["key"].split(" ")[0]] = result
        left = [change for change in changes if _key(change) not in known]
        print(f"{name}: {len(changes)} changes, {len(left)} to test", flush=True)
        if not left:
            return known
        tasks = [{**asdict(change), "key": f"{_key(change)} {tests}"} for change in left]
        _play(name, room, tasks, path, budget_s)


def _play(name: str, room: Room, tasks: list[dict[str, Any]], results: Path, budget_s: float) -> None:
    copy = FOLDER / f"tree-{name}"
    _copy_tree(copy)
    file = FOLDER / f"{name}-tasks.json"
    sources, found = list(room.files()), [path for test in room.tests for path in _python(test)]
    content = {
        "tree": str(copy),
        "results": str(results),
        "calls": str(FOLDER / f"{name}-calls.json"),
        "sources": [_installed(source) for source in sources],
        "digests": {path.relative_to(TREE).as_posix(): _digest(*sources, path) for path in found},
        "changes": [{**task, "path": _installed(task["path"])} for task in tasks],
        "budget_s": budget_s,
    }
    file.write_text(json.dumps(content))
    path = os.pathsep.join([str(copy), str(TREE / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MUTANTS_TASKS": str(file)}
    environment["PYTHONSAFEPATH"] = "1"  # subprocesses of tests import the copy, not their folder
    plugins = ["-p", "mutants.forks", "-p", "no:cacheprovider"]
    options = ["-m", "not slow", *plugins, f"--basetemp={FOLDER / f'tmp-{name}'}"]
    command = [sys.executable, "-P", "-m", "pytest", "-q", *options, *room.tests]
    before = results.read_text() if results.exists() else ""
    ran = subprocess.run(command, cwd=TREE, env=environment, capture_output=True, text=True, check=False)
    if (results.read_text() if results.exists() else "") == before:
        raise SystemExit(f"{name}: no change was tested\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}")


def _copy_tree(copy: Path) -> None:
    """Copy the package as it is installed, so that its files can be changed."""
    shutil.rmtree(copy, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(TREE / "agentrl", copy / "agentrl", ignore=ignored)
    for folder in CATALOGUE:
        shutil.copytree(TREE / folder, copy / _installed(folder), ignore=ignored, dirs_exist_ok=True)


def _installed(path: str) -> str:
    """Return where the package has a file of the checkout."""
    return f"agentrl/{path}" if path.startswith(CATALOGUE) else path


def _key(change: Change) -> str:
    source = (TREE / change.path).read_text()
    return hashlib.sha256(f"{change.path}\0{source}\0{change.source}".encode()).hexdigest()[:16]


def _digest(*paths: str | Path) -> str:
    """Return the digest of all Python files in files and folders."""
    digest = hashlib.sha256()
    for file in (file for path in paths for file in _python(path)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _python(path: str | Path) -> list[Path]:
    return sorted((TREE / path).rglob("*.py")) if (TREE / path).is_dir() else [TREE / path]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
