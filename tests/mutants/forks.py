"""A pytest plugin that tests changes: everything is imported once, and each change has a fork of this process.

In the fork, the code of the changed function replaces that of the live function, and the tests that call it run, the
shortest first, until one fails. Subprocesses of tests read the changed file from disk.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import json
import os
import resource
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import hypothesis
import pytest

from mutants.changes import NOTE, outermost_functions, with_notes
from mutants.one_fork import in_fork

TASKS = "MUTANTS_TASKS"
"""Variable with the path of a JSON file with the paths `tree`, `results` and `calls`, the `sources` of the room, the
`digests` of test files, `changes` and `budget_s`."""

LiveFunctions = dict[tuple[str, str, int], list[FunctionType]]
Patch = tuple[FunctionType, CodeType]

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
    _import_sources(tasks["sources"])
    functions = _live_functions(tasks["tree"])
    assert functions, f"the package was not imported from {tasks['tree']}"
    calls = _calls(session, tasks, functions)
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


def _import_sources(paths: Sequence[str]) -> None:
    """Import the files that tests import only when they run, so that their functions can be replaced."""
    for path in paths:
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        with contextlib.suppress(ImportError):  # of a library that is not installed
            importlib.import_module(name)


def _calls(session: Any, tasks: dict[str, Any], functions: LiveFunctions) -> dict[str, Any]:
    """Return the seconds of each passing test, the functions that it calls, and whether it starts processes.

    Tests in files that have not changed since they were observed are not observed again.
    """
    path, digests = Path(tasks["calls"]), tasks["digests"]
    known = json.loads(path.read_text()) if path.exists() else {}
    known = {file: one for file, one in known.items() if one["digest"] == digests.get(file)}
    left = [item for item in session.items if item.nodeid.split("::")[0] not in known]
    if left:
        observed = path.with_suffix(".part")
        observed.unlink(missing_ok=True)
        patches = [patch for source in tasks["sources"] for patch in _noting_patches(functions, tasks["tree"], source)]
        outcome = in_fork(partial(_observe, left, patches, observed), 1e9)
        if not observed.exists():
            raise RuntimeError(f"the tests themselves ended early: {outcome}")
        for test, found in json.loads(observed.read_text()).items():
            file = test.split("::")[0]
            known.setdefault(file, {"digest": digests[file], "tests": {}})["tests"][test] = found
        path.write_text(json.dumps(known))
    return {test: found for one in known.values() for test, found in one["tests"].items()}


def _noting_patches(functions: LiveFunctions, tree: str, path: str) -> list[Patch]:
    """Return the live functions of a file, each with code that notes its call and goes on as before."""
    noting = with_notes((Path(tree) / path).read_text(), path)
    codes = outermost_functions(noting, str(Path(tree) / path))
    keys = [(path, code.co_qualname, code.co_firstlineno) for code in codes]
    return [(live, code) for key, code in zip(keys, codes, strict=True) for live in functions.get(key, ())]


def _replace_code(patches: Sequence[Patch]) -> None:
    for function, code in patches:
        function.__code__ = code


def _observe(items: Sequence[Any], patches: Sequence[Patch], path: Path) -> str:
    """Run the tests once, and write what they called: much faster than with a trace function."""
    _replace_code(patches)
    seen: set[str] = set()
    setattr(builtins, NOTE, seen.add)
    found = {}
    for item, following in zip_longest(items, items[1:]):
        seen.clear()
        began, children = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        if item.nodeid not in _failed:
            found[item.nodeid] = {
                "seconds": time.monotonic() - began,
                "functions": sorted(seen),
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


def _live_functions(tree: str) -> LiveFunctions:
    """Return the live functions by file, qualified name and first line."""
    found: LiveFunctions = {}
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(tree):
            code = one.__code__
            key = (os.path.relpath(code.co_filename, tree), code.co_qualname, code.co_firstlineno)
            found.setdefault(key, []).append(one)
    return found


def _patches(functions: LiveFunctions, change: dict[str, Any]) -> list[Patch]:
    """Return the live versions of the changed function, with their new code."""
    name, line = change["function"], change["first_line"]
    found = []
    for function in functions.get((change["path"], name, line), []):
        news = outermost_functions(change["source"], function.__code__.co_filename)
        code = next(code for code in news if (code.co_qualname, code.co_firstlineno) == (name, line))
        found.append((function, code))
    return found


def _play(patches: Sequence[Patch], items: Sequence[Any], calls: dict[str, Any]) -> str:
    """Name the first test that notices the change, or nothing; a test that hangs ends the process."""
    _replace_code(patches)
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
