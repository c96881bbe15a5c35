"""A pytest plugin that tests changes: everything is imported once, and each change has a fork of this process.

In the fork, the code of the changed function replaces that of the live function, and the tests that call it run, the
shortest first, until one fails. Subprocesses of tests read the changed file from disk.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import hypothesis
import pytest

from mutants.changes import outermost_functions
from mutants.one_fork import in_fork

TASKS = "MUTANTS_TASKS"
"""Variable with the path of a JSON file with the paths `tree`, `results` and `calls`, the `digests` of test files,
`changes` and `budget_s`."""

hypothesis.settings.register_profile(
    "mutants",
    database=None,
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("mutants")

_failed: list[str] = []


def pytest_runtest_logreport(report: Any) -> None:
    """Record failures."""
    if report.failed:
        _failed.append(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: Any) -> bool:
    """Test the changes instead of running the tests."""
    tasks = json.loads(Path(os.environ[TASKS]).read_text())
    gc.unfreeze()
    calls = _calls(session, tasks)
    functions = _live_functions(tasks["tree"])
    assert functions, f"the package was not imported from {tasks['tree']}"
    times = iter(range(int(time.time()) + 10, 2**31))
    for change in tasks["changes"]:
        items = _tests_of(session, calls, change, tasks["budget_s"])
        expected_s = sum(calls[item.nodeid]["seconds"] for item in items)
        began = time.monotonic()
        patches = _patches(functions, change)
        with _on_disk(Path(tasks["tree"]) / change["path"], change["source"], times):
            outcome = in_fork(partial(_play, patches, items, calls), expected_s)
        line = {"key": change["key"], "seconds": round(time.monotonic() - began, 2), "tests": len(items), **outcome}
        with Path(tasks["results"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
    return True


def _calls(session: Any, tasks: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each passing test, the functions that it calls, and whether it starts processes.

    Tests in files that have not changed since they were traced are not traced again.
    """
    path, digests = Path(tasks["calls"]), tasks["digests"]
    known = json.loads(path.read_text()) if path.exists() else {}
    known = {file: one for file, one in known.items() if one["digest"] == digests.get(file)}
    left = [item for item in session.items if item.nodeid.split("::")[0] not in known]
    if left:
        traced = path.with_suffix(".part")
        traced.unlink(missing_ok=True)
        outcome = in_fork(partial(_trace, left, tasks["tree"], traced), 1e9)
        if not traced.exists():
            raise RuntimeError(f"the tests themselves ended early: {outcome}")
        for test, found in json.loads(traced.read_text()).items():
            file = test.split("::")[0]
            known.setdefault(file, {"digest": digests[file], "tests": {}})["tests"][test] = found
        path.write_text(json.dumps(known))
    return {test: found for one in known.values() for test, found in one["tests"].items()}


def _trace(items: Sequence[Any], tree: str, path: Path) -> str:
    seen: dict[int, CodeType] = {}

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(tree):
            seen[id(code)] = code

    found = {}
    for item, following in zip_longest(items, items[1:]):
        seen.clear()
        began, children = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        threading.settrace(on_call)
        sys.settrace(on_call)
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        sys.settrace(None)
        names = {f"{os.path.relpath(c.co_filename, tree)}:{c.co_qualname.split('.<locals>')[0]}" for c in seen.values()}
        if item.nodeid not in _failed:
            found[item.nodeid] = {
                "seconds": time.monotonic() - began,
                "functions": sorted(names),
                "processes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > children,
            }
    path.write_text(json.dumps(found))
    return ""


def _tests_of(session: Any, calls: dict[str, Any], change: dict[str, Any], budget_s: float) -> list[Any]:
    """Return tests that call the function, or else tests that start processes, within the budget."""
    name = f"{change['path']}:{change['function']}"
    passing = [item for item in session.items if item.nodeid in calls]
    items = [item for item in passing if name in calls[item.nodeid]["functions"]]
    items = items or [item for item in passing if calls[item.nodeid]["processes"]]
    taken: list[Any] = []
    left_s = budget_s
    for item in sorted(items, key=lambda item: calls[item.nodeid]["seconds"]):
        left_s -= calls[item.nodeid]["seconds"]
        if taken and left_s < 0:
            break
        taken.append(item)
    return taken


def _live_functions(tree: str) -> dict[tuple[str, str, int], list[FunctionType]]:
    """Return the live functions by file, qualified name and first line."""
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(tree):
            code = one.__code__
            key = (os.path.relpath(code.co_filename, tree), code.co_qualname, code.co_firstlineno)
            found.setdefault(key, []).append(one)
    return found


def _patches(functions: dict[Any, list[FunctionType]], change: dict[str, Any]) -> list[tuple[FunctionType, CodeType]]:
    """Return the live versions of the changed function, with their new code."""
    name, line = change["function"], change["first_line"]
    found = []
    for function in functions.get((change["path"], name, line), []):
        news = outermost_functions(change["source"], function.__code__.co_filename)
        code = next(code for code in news if (code.co_qualname, code.co_firstlineno) == (name, line))
        found.append((function, code))
    return found


def _play(patches: Sequence[tuple[FunctionType, CodeType]], items: Sequence[Any], calls: dict[str, Any]) -> str:
    """Name the first test that notices the change, or nothing; a test that hangs ends the process."""
    for function, code in patches:
        function.__code__ = code
    for item in items:
        item.add_marker(pytest.mark.timeout(15 + 8 * calls[item.nodeid]["seconds"]), append=False)
    for item, following in zip_longest(items, items[1:]):
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        if _failed:
            return _failed[0]
    return ""


@contextlib.contextmanager
def _on_disk(path: Path, source: str, times: Iterator[int]) -> Iterator[None]:
    """Write the changed file with a new time stamp, because Python caches compiled files by time and size."""
    original, before = path.read_text(), path.stat()
    path.write_text(source)
    stamp = next(times)
    os.utime(path, (stamp, stamp))
    try:
        yield
    finally:
        path.write_text(original)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
