"""Rows of data sets in SWE-bench's form: an issue of a repository, its solution, and tests that the issue breaks."""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError
from agentrl.message.data_file import Row, read_rows

from ..programs.acting import without_colours

IMAGE_FOLDER = "/testbed"
"""Folder of the repository in images of SWE-bench's kind."""
_EXPECTED = '"instance_id", "problem_statement", "patch", "FAIL_TO_PASS", and "repo" with "base_commit" or an image'
_PYTEST_COMMAND = ("python3", "-m", "pytest", "-rfEsxXp", "--tb=no", "-p", "no:cacheprovider")
_FILE = re.compile(r"^diff --git a/(?P<old>.+?) b/(?P<new>.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """An issue of a repository."""

    name: str
    """Id of the data set."""
    repository: str
    """Owner and name, such as ``owner/name``."""
    commit: str
    """Commit at which the issue exists; empty for an image that has it checked out."""
    statement: str
    solution: str
    """Patch that solves the issue."""
    tests: str
    """Patch that adds or changes tests; it may be empty."""
    failing: tuple[str, ...]
    """Tests that fail before the solution and pass after it."""
    passing: tuple[str, ...]
    """Tests that pass before and after it."""
    command: str
    """Command that runs the tests."""
    image: str | None
    """Container image with the repository and what it needs, for back ends with images."""

    @property
    def test_files(self) -> tuple[str, ...]:
        """Files that the patch of tests changes."""
        return patched_files(self.tests)


def patched_files(patch: str) -> tuple[str, ...]:
    r"""Return the paths of the files that a patch changes, without repetition; a renamed file has two.

    >>> patched_files("diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n")
    ('x.py',)
    """
    return tuple(dict.fromkeys(name for found in _FILE.finditer(patch) for name in found.group("old", "new")))


@functools.lru_cache(maxsize=16)
def read_issues(path: str, split: str) -> Mapping[str, Issue]:
    """Read the issues of a file by task id.

    Raises:
        UsageError: the file cannot be read, or a row is not an issue.
    """
    found = {f"{split}-{number}": _issue(row) for number, row in enumerate(read_rows(path, "file of issues"))}
    if not found:
        raise UsageError("the file of issues is empty", got=path)
    return found


def _issue(row: Row) -> Issue:
    name, statement, solution = (row.first(key) for key in ("instance_id", "problem_statement", "patch"))
    repository, commit = row.first("repo"), row.first("base_commit")
    image = row.first("docker_image", "image_name")
    failing = _names(row, "FAIL_TO_PASS", "fail_to_pass")
    texts = (name, statement, solution)
    if not all(isinstance(text, str) and text.strip() for text in texts) or not failing or not (image or commit):
        raise UsageError(
            f"{row.location} is not an issue", got=f"the columns {', '.join(row.columns)}", expected=_EXPECTED
        )
    passing, tests = _names(row, "PASS_TO_PASS", "pass_to_pass"), str(row.first("test_patch") or "")
    return Issue(
        name=str(name),
        repository=str(repository or name),
        commit=str(commit or ""),
        statement=str(statement).strip(),
        solution=str(solution),
        tests=tests,
        failing=failing,
        passing=passing,
        command=_command(row, [*failing, *passing]),
        image=None if image is None else str(image),
    )


def _names(row: Row, *columns: str) -> tuple[str, ...]:
    """Return the names of tests in a column: a list, or its text in JSON or Python."""
    found = row.first(*columns)
    if isinstance(found, str):
        found = _parsed(found)
    if found is not None and not (isinstance(found, list) and all(isinstance(one, str) for one in found)):
        raise UsageError(
            f"{row.location} is not an issue", got=f"{columns[0]}: {found!r:.80}", expected="names of tests"
        )
    return tuple(found or ())


def _parsed(text: str) -> Any:
    """Return a list from its JSON text or, as in SWE-bench Pro, its Python text; other texts unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return ast.literal_eval(text.strip())
    return text


def _command(row: Row, names: Sequence[str]) -> str:
    """Return the command of the row, or pytest on the files of tests with its names."""
    given: Any = row.first("test_cmd", "test_cmds", "test_command")
    if given is not None:
        return str(given) if isinstance(given, str) else "\n".join(map(str, given))
    files = [name.partition("::")[0] for name in names if "::" in name]
    if not files:
        raise UsageError(
            f"{row.location} does not say how to run its tests",
            got=f"tests such as {names[0]!r:.80}",
            expected='names of pytest (tests/test_a.py::test_b), or the column "test_cmd"',
        )
    return shlex.join([*_PYTEST_COMMAND, *dict.fromkeys(files)])


_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+([^\s\[]+(?:\[.*?\](?=\s-\s|\s*$))?)", re.MULTILINE)
_UNITTEST = re.compile(
    r"^(?:(?P<name>\w+ \([\w.]+\))\n)?(?P<line>.*\S) \.\.\. (?P<status>ok|FAIL|ERROR|skipped|expected failure)",
    re.MULTILINE,
)
_UNITTEST_LATE = re.compile(
    r"^(?P<line>\w+ \([\w.]+\)) \.\.\. (?!(?:ok|FAIL|ERROR|skipped|expected failure)\b).*\n"
    r"(?:(?!.* \.\.\. ).*\n)*?(?P<status>ok|FAIL|ERROR|skipped.*|expected failure)$",
    re.MULTILINE,
)
"""A test that printed lines before its result."""
_WITH_METHOD = re.compile(r"(\w+) \(([\w.]+)\.\1\)")
"""A test's name as Python 3.11 and later print it; data sets have the name without the method in parentheses."""


def test_results(output: str) -> dict[str, bool]:
    r"""Return whether each test passed, by its names in the output of pytest (``-rA``) or unittest (``-v``).

    >>> test_results("PASSED a.py::b[1 2]\nFAILED a.py::c - assert\ntest_x (m.T.test_x) ... ok\n")
    {'a.py::b[1 2]': True, 'a.py::c': False, 'test_x (m.T.test_x)': True, 'test_x (m.T)': True}
    """
    output = without_colours(output)
    found = {name: status in ("PASSED", "XFAIL") for status, name in _PYTEST.findall(output)}
    for match in (*_UNITTEST_LATE.finditer(output), *_UNITTEST.finditer(output)):
        passed = match["status"] in ("ok", "expected failure")
        for name in filter(None, (match.groupdict().get("name"), match["line"])):
            found |= {name: passed, _WITH_METHOD.sub(r"\1 (\2)", name): passed}
    return found


def has_passed(name: str, results: Mapping[str, bool]) -> bool:
    """Return True if a test passed.

    SWE-bench has names that end at a space in the parameters; such a name stands for all tests that begin with it.

    >>> has_passed("a.py::b[1", {"a.py::b[1 2]": True, "a.py::b[1 3]": False}), has_passed("c", {"c": True})
    (False, True)
    """
    if name not in results and "[" in name and not name.endswith("]"):
        meant = [passed for other, passed in results.items() if other.startswith(name)]
        return bool(meant) and all(meant)
    return results.get(name, False)


def find_repository(folder: str, repository: str) -> Path:
    """Return the clone of a repository: ``owner/name``, ``owner__name`` or ``name`` in a folder, bare or not.

    Raises:
        UsageError: there is none.
    """
    name = repository.rpartition("/")[2]
    names = [repository, repository.replace("/", "__"), name]
    candidates = [Path(folder).expanduser() / f"{one}{end}" for one in names for end in ("", ".git")]
    found = next((path for path in candidates if (path / ".git").exists() or (path / "objects").is_dir()), None)
    if found is None:
        raise UsageError(
            f"there is no clone of {repository}",
            got=folder,
            expected=f"a folder {names[1]} in it",
            hint=f"git clone https://example.com/{repository} {Path(folder) / names[1]}",
        )
    return found
