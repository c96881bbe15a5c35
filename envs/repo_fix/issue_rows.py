"""Rows of data sets in SWE-bench's format: an issue of a repository, its solution, and tests that the issue breaks."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from agentrl.errors import UsageError
from agentrl.message.data_file import Row, list_in_text, read_rows, texts_of

from ..programs.acting import without_colours

IMAGE_FOLDER = "/testbed"
"""Folder of the repository in images of SWE-bench's kind."""
SMITH = "swesmith"
"""Owner of the repositories and images of SWE-smith."""
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
    r"""Return the paths of the files that a patch changes, without repetition; of a renamed file, both.

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
    name, statement, solution = (_text(row, key) for key in ("instance_id", "problem_statement", "patch"))
    repository, commit = _text(row, "repo"), _text(row, "base_commit")
    image = _text(row, "docker_image", "image_name")
    failing = _names(row, "FAIL_TO_PASS", "fail_to_pass")
    needed = {"instance_id": name, "problem_statement": statement, "patch": solution, "base_commit": image or commit}
    missing = [column for column, text in needed.items() if not text.strip()] + ["FAIL_TO_PASS"] * (not failing)
    if missing:
        _refuse(row, f"no {', '.join(missing)} in the columns {', '.join(row.columns)}", _EXPECTED)
    if SMITH in f"{repository} {image}":
        raise UsageError(
            f"{row.location} has a patch that makes the mistake",
            got=f"a row of SWE-smith: {name}",
            expected="a patch that solves the issue, and an image or commit in which the mistake is",
            hint="build images with the mistake in them, and reverse the patches",
        )
    passing = _names(row, "PASS_TO_PASS", "pass_to_pass")
    return Issue(
        name=name,
        repository=repository or name,
        commit=commit,
        statement=statement.strip(),
        solution=solution,
        tests=_text(row, "test_patch"),
        failing=failing,
        passing=passing,
        command=_command(row, [*failing, *passing]),
        image=image or None,
    )


def _names(row: Row, *columns: str) -> tuple[str, ...]:
    """Return the names of tests in a column: a list, or its text in JSON or Python."""
    found = list_in_text(row.first(*columns))
    if found is not None and not (isinstance(found, list) and all(isinstance(one, str) for one in found)):
        _refuse(row, f"{columns[0]}: {found!r:.80}", "names of tests")
    return tuple(found or ())


def _refuse(row: Row, got: str, expected: str) -> NoReturn:
    raise UsageError(f"{row.location} is not an issue", got=got, expected=expected)


def _text(row: Row, *columns: str) -> str:
    found = row.first(*columns)
    if found is not None and not isinstance(found, str):
        _refuse(row, f"{columns[0]}: {found!r:.80}", "text")
    return found or ""


def _command(row: Row, names: Sequence[str]) -> str:
    """Return the command of the row, or pytest on the files of tests with its names."""
    given = row.first("test_cmd", "test_cmds", "test_command")
    if given is not None:
        try:
            commands = "\n".join(texts_of(given))
        except ValueError as error:
            _refuse(row, f"test_cmd: {error}", "a command, or a list of commands")
        if commands.strip():
            return commands
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

    A test that pytest reports twice, such as one whose clean-up fails, has passed only if all its lines say so.

    >>> test_results("PASSED a.py::b[1 2]\nFAILED a.py::c - assert\ntest_x (m.T.test_x) ... ok\n")
    {'a.py::b[1 2]': True, 'a.py::c': False, 'test_x (m.T.test_x)': True, 'test_x (m.T)': True}
    """
    output = without_colours(output)
    found = dict[str, bool]()
    for status, name in _PYTEST.findall(output):
        found[name] = status in ("PASSED", "XFAIL") and found.get(name, True)
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
