"""Issues of repositories from rows in SWE-bench's format."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agentrl.envs.repo_fix import issue_rows
from agentrl.envs.repo_fix.environment import make_repo_fix, tasks
from agentrl.envs.repo_fix.issue_rows import read_issues
from agentrl.envs.repo_fix.issues import FORGET, NO_TESTS, IssueFix

from agentrl.errors import UsageError
from agentrl.testing.env_session import EnvSession

SOURCE = "def half(x):\n    return x // 3\n\n\ndef twice(x):\n    return 2 * x\n"
TESTS = """import unittest

from sums import twice


class Sums(unittest.TestCase):
    def test_twice(self):
        self.assertEqual(twice(2), 4)
"""
MORE = TESTS.replace("import twice", "import half, twice") + (
    "\n    def test_half(self):\n        self.assertEqual(half(6), 3)\n"
)
FIX = "sed -i 's,// 3,// 2,' sums.py"


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    """A row whose repository is cloned in the folder `clones`."""
    folder = tmp_path / "clones" / "my__sums"
    folder.mkdir(parents=True)
    git(folder, "init", "-q", ".")
    (folder / "sums.py").write_text(SOURCE)
    (folder / "test_sums.py").write_text(TESTS)
    (folder / ".gitattributes").write_text("test_* export-ignore\nsums.py export-subst\n")  # satis#471
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "Begin")
    base = git(folder, "rev-parse", "HEAD").strip()
    patches = []
    for name, text in (("sums.py", SOURCE.replace("// 3", "// 2")), ("test_sums.py", MORE)):
        (folder / name).write_text(text)
        patches.append(git(folder, "diff"))
        git(folder, "checkout", "-q", "--", ".")
    return {
        "repo": "my/sums",
        "instance_id": "my__sums-1",
        "base_commit": base,
        "patch": patches[0],
        "test_patch": patches[1],
        "problem_statement": "half(6) is 2.",
        "FAIL_TO_PASS": json.dumps(["test_half (test_sums.Sums)"]),
        "PASS_TO_PASS": ["test_twice (test_sums.Sums)"],
        "test_cmd": f"{sys.executable} -c 'import unittest; unittest.TestCase.__str__ = "
        'lambda t: "%s (%s.%s)" % (t._testMethodName, type(t).__module__, type(t).__name__); '
        'unittest.main("test_sums", argv=["x", "-v"])\'',
    }


def written(tmp_path: Path, *rows: dict[str, Any]) -> dict[str, str]:
    file = tmp_path / "issues.jsonl"
    file.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    read_issues.cache_clear()
    return {"test": str(file)}


def played(world: IssueFix, *commands: str) -> tuple[Any, ...]:
    session = EnvSession(lambda: world, {})
    task = tasks("test", files=dict(world.files))[0]
    observation, info = session.start(task)
    assert "half(6) is 2." in str(observation)
    assert info["task_type"] == "my/sums"
    expert = session.call("expert")
    actions = [f"```bash\n{command}\n```" for command in commands] + ["submit"]
    try:
        while True:
            action = actions.pop(0) if commands else expert.act("")
            result = session.step(action)
            if result.done:
                return result.reward, result.info["reward_components"]["checks"], result.info["success"]
    finally:
        session.close()


@pytest.mark.slow
def test_only_a_solution_of_the_issue_is_paid(tmp_path: Path, row: dict[str, Any], plain: str) -> None:
    options = {"files": written(tmp_path, row), "repositories": str(tmp_path / "clones"), "sandbox": plain}
    world = make_repo_fix(**options, test_seconds=60)
    assert isinstance(world, IssueFix)
    assert played(world) == (1.0, 1.0, True), "the solution of the row"
    assert played(world, f"{FIX} && git -c user.name=x -c user.email=x@x commit -qam Done") == (1.0, 1.0, True)
    assert played(world, "true") == (0.0, 0.0, False)
    assert played(world, f"{FIX} && sed -i 's,2 . x,x,' sums.py") == (0.0, 0.0, False), "another test fails now"
    cheat = "printf 'import unittest\\nclass Sums(unittest.TestCase): pass' > test_sums.py; echo 'x' > conftest.py"
    assert played(world, cheat) == (0.0, 0.0, False), "tests are restored"


async def test_a_patch_with_files_that_change_how_tests_run_is_applied_without_them(
    tmp_path: Path, row: dict[str, Any], plain: str
) -> None:
    clone = tmp_path / "clones" / "my__sums"
    (clone / "more").mkdir()
    for name in ("conftest.py", "more/conftest.py", "more/kept.py"):
        (clone / name).write_text("x = 1\n")
    git(clone, "add", "-A")
    patch = git(clone, "diff", "--cached")  # as a policy can write it that has replaced git in its sandbox
    world = make_repo_fix(files=written(tmp_path, row), repositories=str(tmp_path / "clones"), sandbox=plain)
    assert isinstance(world, IssueFix)
    await world.reset(options={"task_id": "test-0"})
    sandbox = await world._acting.get()
    assert await world._apply(sandbox, patch.encode(), without=NO_TESTS)
    listed = await world.bash("git log --format=%cI; git rev-parse HEAD; git status --short -uall")
    await world.close()
    assert "more/kept.py" in listed
    assert "conftest" not in listed
    assert listed.startswith("2020-01-01"), "commits have the same id in each episode"


def test_an_images_repository_keeps_one_commit(tmp_path: Path, row: dict[str, Any]) -> None:
    clone = tmp_path / "clones" / "my__sums"
    begin = git(clone, "rev-parse", "HEAD").strip()
    (clone / ".gitignore").write_text("*.log\n")
    (clone / "kept.log").write_text("tracked")
    git(clone, "add", "-A", "-f")
    git(clone, "commit", "-q", "-m", "Base")
    base, branch = git(clone, "rev-parse", "HEAD").strip(), git(clone, "branch", "--show-current").strip()
    (clone / "sums.py").write_text("the solution")
    git(clone, "commit", "-q", "-a", "-m", "Solve")
    git(clone, "tag", "-a", "v2", "-m", "Next")
    later = git(clone, "rev-parse", "HEAD").strip()
    for start in (["checkout", "-q", base], ["checkout", "-q", "-B", branch, base]):
        shutil.copytree(clone, folder := tmp_path / start[-2])
        git(folder, *start)
        (folder / "new.py").write_text("made with the image")
        (folder / "sums.py").write_text("changed with the image")
        subprocess.run(["sh", "-c", FORGET], cwd=folder, check=True)
        assert git(folder, "status", "--short") == ""
        assert git(folder, "show", "HEAD:kept.log") == "tracked"
        assert git(folder, "show", "HEAD:new.py") == "made with the image"
        assert git(folder, "log", "--all", "--format=%s") == "Begin\n"
        for commit in (begin, base, later):
            with pytest.raises(subprocess.CalledProcessError):
                git(folder, "cat-file", "-e", commit)


def test_pytest_and_unittest_are_read() -> None:
    text = "PASSED a.py::b\nXFAIL a.py::e\nFAILED a.py::c - x\nSKIPPED [1] a.py:3: no\ntest_d (m.T) ... FAIL\n"
    results = issue_rows.test_results(text + "test_e (m.T)\nIt works. ... ok\ntest_f (m.T.test_f) ... ok\n")
    passed = {name for name, value in results.items() if value}
    assert passed == {"a.py::b", "a.py::e", "test_e (m.T)", "It works.", "test_f (m.T.test_f)", "test_f (m.T)"}
    twice = issue_rows.test_results("FAILED a.py::b - x\nPASSED a.py::b\nERROR a.py::c - x\nPASSED a.py::c\n")
    assert twice == {"a.py::b": False, "a.py::c": False}, "a line that the policy's code prints at the end"


def test_a_test_may_print_lines_before_its_result() -> None:  # SWE-bench#165
    printed = "test_a (m.T) ... File x opened.\nclosed\nok\ntest_b (m.T) ... Wait\ntest_c (m.T) ... !\nFAIL\n"
    assert issue_rows.test_results(printed) == {"test_a (m.T)": True, "test_c (m.T)": False}


def test_colours_are_not_part_of_results() -> None:  # agent-lightning#599
    results = issue_rows.test_results(
        "\x1b[32mPASSED\x1b[0m a.py::\x1b[1mb\x1b[0m\n\x1b[31mFAILED\x1b[0m a.py::c - E\n"
    )
    assert results == {"a.py::b": True, "a.py::c": False}


def test_names_that_the_data_set_cut_at_a_space_stand_for_all_tests_that_begin_with_them() -> None:
    # SWE-bench#290: 662 names of SWE-bench Verified are cut
    results = issue_rows.test_results(
        "PASSED a.py::b[x y]\nPASSED a.py::b[x z]\nFAILED a.py::c[x y] - E\nPASSED a.py::c[x]\n"
    )
    assert issue_rows.has_passed("a.py::b[x", results)
    assert not issue_rows.has_passed("a.py::c[x", results)
    assert not issue_rows.has_passed("a.py::d[x", results)


def test_rows_say_how_their_tests_are_run(tmp_path: Path, row: dict[str, Any]) -> None:
    named = {**row, "FAIL_TO_PASS": ["tests/test_a.py::test_b"], "PASS_TO_PASS": [], "test_cmd": None}
    (issue,) = read_issues(written(tmp_path, named)["test"], "test").values()
    assert issue.command.endswith("no:cacheprovider tests/test_a.py")
    assert issue.test_files == ("test_sums.py",)


def test_lists_may_be_texts_of_python_and_renamed_tests_are_restored(tmp_path: Path, row: dict[str, Any]) -> None:
    # SWE-bench_Pro-os#14
    moved = "diff --git a/tests/a.py b/tests/b.py\nrename from tests/a.py\nrename to tests/b.py\n"
    given = {**row, "FAIL_TO_PASS": """["it's", 'b']""", "test_patch": moved}
    (issue,) = read_issues(written(tmp_path, given)["test"], "test").values()
    assert issue.failing == ("it's", "b")
    assert issue.test_files == ("tests/a.py", "tests/b.py")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": None}, "line 1 is not an issue: got no patch in the columns repo, instance_id"),
        ({"FAIL_TO_PASS": "[]"}, "line 1 is not an issue: got no FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": "['a.py::b'\n 'a.py::c']"}, "expected names of tests"),  # two names, as NumPy writes them
        ({"test_cmd": {"pre": "pytest"}}, "test_cmd: {'pre': 'pytest'}, not texts"),
        ({"repo": "swesmith/my__sums"}, "a patch that makes the mistake: got a row of SWE-smith"),  # SWE-smith#106
        ({"FAIL_TO_PASS": "test_a"}, "line 1 is not an issue"),
        ({"PASS_TO_PASS": [3]}, "got PASS_TO_PASS: "),
        ({"base_commit": None}, "line 1 is not an issue"),
        ({"test_cmd": None}, "does not say how to run its tests"),
    ],
)
def test_a_row_that_is_no_issue_is_named(
    tmp_path: Path, row: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        tasks("test", files=written(tmp_path, {**row, **changes}))


async def test_what_is_missing_is_named(tmp_path: Path, row: dict[str, Any], plain: str) -> None:
    files = written(tmp_path, row)
    for given, message in (
        ({}, "the repository of my__sums-1 is not available: got no repositories"),
        ({"repositories": str(tmp_path / "none")}, "there is no clone of my/sums"),
    ):
        world = make_repo_fix(files=files, sandbox=plain, **given)
        with pytest.raises(UsageError, match=message):
            await world.reset(options={"task_id": "test-0"})
    with pytest.raises(UsageError, match="have no effect without files: got repositories"):
        make_repo_fix(repositories="x")
    lost = written(tmp_path, {**row, "base_commit": "0" * 40})
    world = make_repo_fix(files=lost, sandbox=plain, repositories=str(tmp_path / "clones"))
    await world.reset(options={"task_id": "test-0"})
    with pytest.raises(UsageError, match="has no commit 0000"):
        await world.step("```bash\nls\n```")
    await world.close()
