"""The environment: a shell in a small repository, whose package is judged in another sandbox by hidden calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import UsageError
from agentrl.sandbox import Sandbox, SandboxFileError, read_spec

from ..programs.acting import run_command
from ..programs.judging import SECONDS, Solution, Verdict, judge
from ..programs.shell import FENCED, ShellEnv
from ..puzzles.rules import share_gained
from ..task_ids import SPLITS, TRAIN
from .issues import ISSUE_TEST_S, IssueFix, IssueTasks, issue_tasks
from .mutations import with_mistakes
from .tasks import ENVIRONMENT, SHOWN, Fault, RepoTasks, cases_of, fault_of, share_right

MAX_STEPS = 15
REPOSITORY = "repository"
"""Folder of the judging sandbox for the copy of the package."""
MAX_FILES = 20
MAX_BYTES = 64 * 1024
_TEST_SECONDS = re.compile(r"(Ran \d+ tests?) in [\d.]+s")
_COMMIT = (
    "command -v git >/dev/null || exit 0; export GIT_COMMITTER_DATE=2020-01-01T00:00:00Z; git init -q . && git add -A"
    " && git -c user.name=agent -c user.email=agent@localhost commit -q -m 'Begin' --date 2020-01-01T00:00:00Z"
)


class RepoFix(ShellEnv):
    """Environment in which the policy fixes a small repository whose tests fail.

    The contents of the package's folder are copied into a new sandbox, where its functions are called with arguments
    that the policy never saw. The repository's tests are ignored. `reset` takes the option ``task_id``; without it the
    seed draws a training task.

    Args:
        mistakes: Number of mistakes in each repository: 1 or 2, or 0 for both kinds of repositories.
        max_steps: Number of commands after which the repository is judged.
        seconds: Time limit of a command.
        sandbox: Sandbox back end: its name, or its settings.
    """

    def __init__(
        self, *, mistakes: int = 0, max_steps: int = MAX_STEPS, seconds: float = 10.0, sandbox: Any = "local"
    ) -> None:
        super().__init__(name=ENVIRONMENT, sandbox=read_spec(sandbox), seconds=seconds, max_steps=max_steps)
        self.mistakes = check_mistakes(mistakes)
        self._fault: Fault | None = None

    @property
    def fault(self) -> Fault:
        """The current repository.

        Raises:
            UsageError: `reset` was not called yet.
        """
        if self._fault is None:
            raise UsageError("the repo_fix environment has no episode yet", expected="reset before anything else")
        return self._fault

    def _draw(self, seed: int) -> str:
        return RepoTasks(TRAIN, self.mistakes).draw(seed)

    def _pose(self, task_id: str) -> str:
        self._fault = fault_of(task_id)
        self._content = self._fault.source
        library, failing = self._fault.library, ", ".join(f"test_{name}" for name in self._fault.failing)
        return (
            f"The repository in the current folder contains the Python package {library.package}. {library.about}\n"
            f"Tests fail in tests/test_{library.module}.py: {failing}.\n"
            f"Run them with: python3 -m unittest discover tests\n"
            f"The tests are correct. Fix {library.package}/{library.module}.py, then submit."
        )

    async def _prepare(self, sandbox: Sandbox) -> None:
        library = self.fault.library
        for path, text in repository_files(self.fault).items():
            await sandbox.write(path, text.encode())
        await run_command(sandbox, _COMMIT, seconds=self.seconds)
        await sandbox.list(library.package)

    async def _judge(self, sandbox: Sandbox) -> Verdict:
        library = self.fault.library
        package = await _python_files(sandbox, library.package)

        async def fill(fresh: Sandbox) -> None:
            for path, content in package.items():
                await fresh.write(f"{REPOSITORY}/{path}", content)

        return await judge(
            self._acting.spec,
            Solution(path=(REPOSITORY,)),
            cases=[case for cases in cases_of(library).values() for case in cases[SHOWN:]],
            fill=fill,
            seconds=SECONDS,
        )

    def _progress(self, verdict: Verdict) -> float:
        """Return the share of the failing hidden calls that were repaired; calls that never failed do not count."""
        return share_gained(share_right(self.fault), verdict.share)

    async def _run(self, command: str) -> str:
        """Run a command; remove the duration of tests from its output, because it varies."""
        return _TEST_SECONDS.sub(r"\1", await super()._run(command))

    def _expert_commands(self) -> list[str]:
        library = self.fault.library
        path = f"{library.package}/{library.module}.py"
        wrong, right = self.fault.source.splitlines(), with_mistakes(library.source, ()).splitlines()
        lines = [number for number, (one, other) in enumerate(zip(wrong, right, strict=True), 1) if one != other]
        edits = [f"lines[{number - 1}] = {right[number - 1]!r}" for number in lines]
        body = "\n".join([f"lines = open({path!r}).read().splitlines()", *edits])
        mend = f"python3 - <<'END'\n{body}\nopen({path!r}, 'w').write('\\n'.join(lines) + '\\n')\nEND"
        return [f"cat {path}", mend, "python3 -m unittest discover tests"]

    def secrets(self) -> list[str]:
        """Return the hidden calls and the correct module."""
        cases = cases_of(self.fault.library).values()
        return [*(str(case) for found in cases for case in found[SHOWN:]), with_mistakes(self.fault.library.source, ())]

    def _info(self) -> dict[str, Any]:
        return {"success": False, "task_type": self.fault.type}


def repository_files(fault: Fault) -> dict[str, str]:
    """Return the files of a repository, by path."""
    library = fault.library
    return {
        "README.md": f"# {library.package}\n{library.about}\n\nTests: `python3 -m unittest discover tests`\n",
        f"{library.package}/__init__.py": "",
        f"{library.package}/{library.module}.py": fault.source,
        f"tests/test_{library.module}.py": _tests(fault),
    }


def _tests(fault: Fault) -> str:
    library = fault.library
    lines = [
        "import sys",
        "import unittest",
        "",
        "sys.path.insert(0, '.')",
        f"from {library.package} import {library.module}",
        "",
        "",
        f"class {library.module.capitalize()}Test(unittest.TestCase):",
    ]
    for name, cases in cases_of(library).items():
        lines.append(f"    def test_{name}(self):")
        for case in cases[:SHOWN]:
            call = f"{library.module}.{name}({', '.join(map(repr, case.arguments))})"
            lines.append(f"        self.assertEqual({call}, {case.value!r})")
        lines.append("")
    return "\n".join([*lines, "", "if __name__ == '__main__':", "    unittest.main()", ""])


async def _python_files(sandbox: Sandbox, folder: str) -> dict[str, bytes]:
    """Read the Python files of a folder, which are judged, up to limits of number and size; others are ignored."""
    found: dict[str, bytes] = {}
    try:
        entries = [entry for entry in await sandbox.list(folder) if entry.name.endswith(".py")]
    except SandboxFileError:
        return found
    for entry in entries[:MAX_FILES]:
        try:
            found[f"{folder}/{entry.name}"] = await sandbox.read(f"{folder}/{entry.name}", most=MAX_BYTES)
        except SandboxFileError:  # a folder, a broken link, or too large: ignored
            continue
    return found


def check_mistakes(mistakes: int) -> int:
    """Return the option if it is valid.

    Raises:
        UsageError: it is not valid.
    """
    if mistakes not in (0, 1, 2):
        raise UsageError("unknown number of mistakes in repo_fix", got=mistakes, expected="1, 2, or 0 for both")
    return mistakes


def make_repo_fix(
    *,
    files: str | Mapping[str, str] | None = None,
    repositories: str | None = None,
    test_seconds: float | None = None,
    mistakes: int = 0,
    max_steps: int = MAX_STEPS,
    seconds: float = 10.0,
    sandbox: Any = "local",
) -> RepoFix | IssueFix:
    """Create the environment: with `files`, on issues of real repositories (`IssueFix`), else on generated ones.

    Raises:
        UsageError: an option is not valid, or has no effect.
    """
    if files is None:
        unused = {"repositories": repositories, "test_seconds": test_seconds}
        if given := [name for name, value in unused.items() if value is not None]:
            raise UsageError("options of repo_fix have no effect without files", got=", ".join(given))
        return RepoFix(mistakes=mistakes, max_steps=max_steps, seconds=seconds, sandbox=sandbox)
    if mistakes:
        raise UsageError("repo_fix has two kinds of tasks", got="files and mistakes", expected="only one of them")
    return IssueFix(
        files=files,
        repositories=repositories,
        max_steps=max_steps,
        seconds=seconds,
        test_seconds=ISSUE_TEST_S if test_seconds is None else test_seconds,
        sandbox=sandbox,
    )


def tasks(
    split: str, *, files: str | Mapping[str, str] | None = None, mistakes: int = 0, **_options: Any
) -> RepoTasks | IssueTasks:
    """Return the task source of a split."""
    return RepoTasks(split, check_mistakes(mistakes)) if files is None else issue_tasks(split, files)


SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=make_repo_fix,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "Small git repositories with failing tests, made by mutating code: a shell in a sandbox, and hidden calls in a"
        " second one. Each split has its own repositories. Or issues of real repositories, from data files in"
        " SWE-bench's format (options files and repositories)."
    ),
    instructions=(
        "You fix a small Python repository in a shell. "
        + FENCED
        + "When the tests pass, answer with the single word submit. Your work is then checked by more tests, which you"
        " cannot see."
    ),
    answer_format="free",
    tool_instructions=(
        "You fix a small Python repository with the tools bash, read_file and write_file. When the tests pass, do not"
        " call a tool: answer with the single word submit. Your work is then checked by more tests, which you cannot"
        " see."
    ),
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    isolation=Isolation.INLINE,
    scores={"random": 0.0, "expert": 1.0},
    version=1,
)
