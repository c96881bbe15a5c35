"""The environment on issues of data sets in SWE-bench's format: a shell in a repository, judged by its tests."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox import Sandbox, SandboxFileError, SandboxSpec, read_spec

from ..programs.acting import run_command
from ..programs.judging import Verdict, fresh_sandbox
from ..programs.shell import MAX_COMMAND, ShellEnv
from ..split_files import file_of, files_by_split
from ..task_ids import SPLITS, TRAIN, NumberedTasks, check_split, parse_task_id
from .issue_rows import IMAGE_FOLDER, Issue, find_repository, has_passed, read_issues, test_results
from .tasks import ENVIRONMENT

ISSUE_TEST_S = 600.0
"""Default time limit of the tests in seconds."""
ISSUE_START_S = 120.0
"""Seconds to start and fill two sandboxes, in addition to the tests."""
GIT_S = 120.0
"""Deadline in seconds of git on this machine, and in a sandbox."""
MAX_PATCH = 4 * 2**20
"""Maximum size of the policy's changes in bytes."""
TEST_OUTPUT = 16 * 2**20
"""Bytes of the output of tests that are read."""
NO_TESTS = ("conftest.py", "pytest.ini", "sitecustomize.py", "usercustomize.py")
"""Files by which the policy could change how tests run; its changes to them are not judged."""
_ARCHIVE, _PATCH = ".agentrl-repository.tar", ".agentrl-changes.patch"
_GIT = "git -c core.hooksPath=/dev/null -c user.name=agent -c user.email=agent@localhost"
_DATES = "export GIT_AUTHOR_DATE=2020-01-01T00:00:00Z GIT_COMMITTER_DATE=2020-01-01T00:00:00Z"
_BEGIN = (
    f"tar -xf {_ARCHIVE} && rm {_ARCHIVE} && {_GIT} init -q . && {_GIT} add -A -f && {_DATES} && "
    f"{_GIT} commit -q -m Begin"
)
FORGET = (
    f'{_DATES} && {_GIT} add -A && base=$({_GIT} commit-tree "$({_GIT} write-tree)" -m Begin) && '
    f'{_GIT} update-ref --no-deref HEAD "$base" && '
    f"{_GIT} for-each-ref --format='delete %(refname)' | {_GIT} update-ref --stdin && "
    f"{_GIT} reflog expire --expire=now --all && rm -f .git/FETCH_HEAD .git/ORIG_HEAD && "
    f"{_GIT} repack -adq && {_GIT} prune --expire=now"
)
"""Command that leaves one commit of an image's repository, with the present files: later commits and branches may
contain the solution, and files that were never committed do not count as changes of the policy."""


class IssueFix(ShellEnv):
    """Environment in which the policy solves an issue of a real repository.

    The policy's changes are applied to a new copy of the repository in another sandbox, together with the tests of the
    data set, which the policy never saw. The reward is 1 if all tests of the issue pass. Tests run in one process with
    the policy's code.

    Args:
        files: Data files by split, or one name with ``{split}`` in it.
        repositories: Folder with a clone of each repository, for tasks without an image.
        max_steps: Number of commands after which the repository is judged.
        seconds: Time limit of a command.
        test_seconds: Time limit of the tests.
        sandbox: Sandbox back end: its name, or its settings. Docker uses the image of a task, if it names one.
    """

    def __init__(
        self,
        *,
        files: str | Mapping[str, str],
        repositories: str | None,
        max_steps: int,
        seconds: float,
        test_seconds: float,
        sandbox: Any,
    ) -> None:
        self._spec = read_spec(sandbox)
        super().__init__(name=ENVIRONMENT, sandbox=self._spec, seconds=seconds, max_steps=max_steps)
        self.files = files_by_split(files, SPLITS, "issues of repo_fix")
        self.repositories = repositories
        self.test_seconds = test_seconds
        self._issue: Issue | None = None
        self._base = ""
        """Commit at which the policy begins."""

    @property
    def issue(self) -> Issue:
        """The current issue.

        Raises:
            UsageError: `reset` was not called yet.
        """
        if self._issue is None:
            raise UsageError("the repo_fix environment has no episode yet", expected="reset before anything else")
        return self._issue

    @property
    def working_folder(self) -> str | None:
        """Folder of the repository; ``None`` for the sandbox's own folder."""
        return IMAGE_FOLDER if self._uses_image else None

    @property
    def _uses_image(self) -> bool:
        return self._issue is not None and self._issue.image is not None and self._spec.type == "docker"

    def _draw(self, seed: int) -> str:
        return IssueTasks(TRAIN, self.files).draw(seed)

    def _pose(self, task_id: str) -> str:
        self._issue = issue = issue_of(task_id, self.files)
        self._content, self._base = repr(issue), ""
        self._acting.spec = self._sandbox_spec()
        if not self._uses_image:
            self._clone()
        return (
            f"The current folder contains the repository {issue.repository}. Solve this issue, without changes to its "
            f"tests, then submit:\n\n{issue.statement}"
        )

    def _sandbox_spec(self) -> SandboxSpec:
        limits = self._spec.limits
        most: dict[str, Any] = {
            name: max(getattr(limits, name) or 0.0, self.test_seconds) for name in ("seconds", "cpu_seconds")
        }
        most["output_bytes"] = max(limits.output_bytes or 0, TEST_OUTPUT)
        image = self.issue.image if self._uses_image else self._spec.image
        return dataclasses.replace(self._spec, image=image, limits=dataclasses.replace(limits, **most))

    def _clone(self) -> Path:
        if self.repositories is None or not self.issue.commit:
            raise UsageError(
                f"the repository of {self.issue.name} is not available",
                got="no repositories" if self.repositories is None else "no base_commit",
                expected="environment.options.repositories=FOLDER, or an image and sandboxes of type docker",
            )
        return find_repository(self.repositories, self.issue.repository)

    async def _prepare(self, sandbox: Sandbox) -> None:
        if not self._uses_image:
            await sandbox.write(_ARCHIVE, await _archive(self._clone(), self.issue.commit))
            await self._git(sandbox, _BEGIN)
        if not self._base:  # in the policy's own sandbox, which is filled first
            if self._uses_image:
                await self._git(sandbox, FORGET)
            self._base = (await self._git(sandbox, f"{_GIT} rev-parse HEAD")).strip()

    async def _git(self, sandbox: Sandbox, command: str) -> str:
        """Run git before the policy acts; return its output.

        Raises:
            SandboxError: it failed.
        """
        result = await run_command(sandbox, ["sh", "-c", command], seconds=GIT_S, cwd=self.working_folder)
        if not result.is_success:
            errors = (result.stderr or result.stdout).decode(errors="replace")[-300:]
            raise SandboxError(f"the repository of {self.issue.name} cannot be prepared", got=errors)
        return result.stdout.decode(errors="replace")

    async def _judge(self, sandbox: Sandbox) -> Verdict:
        names = [*self.issue.failing, *self.issue.passing]
        changes = await self._changes(sandbox)
        if changes is None:
            return Verdict(problems=("the changes cannot be read",) * len(names))
        async with fresh_sandbox(self._acting.spec, keeps_network=True) as fresh:
            await self._prepare(fresh)
            restored = [
                f"{_GIT} checkout -q HEAD -- {quoted} 2>/dev/null || rm -rf {quoted}"
                for quoted in map(shlex.quote, self.issue.test_files)
            ]
            if not await self._apply(fresh, changes, without=NO_TESTS):
                return Verdict(problems=("the changes do not apply",) * len(names))
            await run_command(fresh, ["sh", "-c", "\n".join(restored)], seconds=GIT_S, cwd=self.working_folder)
            if not await self._apply(fresh, self.issue.tests.encode()):
                return Verdict(problems=("the tests do not apply",) * len(names))
            result = await run_command(
                fresh, ["sh", "-c", self.issue.command], seconds=self.test_seconds, cwd=self.working_folder
            )
        results = test_results(result.stdout.decode(errors="replace") + result.stderr.decode(errors="replace"))
        return Verdict(problems=tuple("" if has_passed(name, results) else f"{name} does not pass" for name in names))

    async def _changes(self, sandbox: Sandbox) -> bytes | None:
        """Return the policy's changes as a patch; ``None`` if it cannot be made."""
        hidden = [*NO_TESTS, *(f"**/{name}" for name in NO_TESTS), *self.issue.test_files, _PATCH]
        excluded = " ".join(shlex.quote(f":(exclude,glob){name}") for name in hidden)
        diff = f"{_GIT} diff --cached --binary --no-color --no-renames --no-ext-diff {self._base} -- . {excluded}"
        command = ["sh", "-c", f"{_GIT} add -A && {diff} > {_PATCH}"]
        result = await run_command(sandbox, command, seconds=GIT_S, cwd=self.working_folder)
        if not result.is_success:
            return None
        with suppress(SandboxFileError):
            return await sandbox.read(self._at(_PATCH), most=MAX_PATCH)
        return None

    async def _apply(self, sandbox: Sandbox, patch: bytes, *, without: Sequence[str] = ()) -> bool:
        """Apply a patch, except for files with some names; return True if it applies."""
        if not patch.strip():
            return True
        await sandbox.write(self._at(_PATCH), patch if patch.endswith(b"\n") else patch + b"\n")
        excluded = " ".join(shlex.quote(f"--exclude={folder}{name}") for name in without for folder in ("", "*/"))
        command = ["sh", "-c", f"{_GIT} apply --whitespace=nowarn {excluded} {_PATCH} && rm {_PATCH}"]
        return (await run_command(sandbox, command, seconds=GIT_S, cwd=self.working_folder)).is_success

    def _progress(self, verdict: Verdict) -> float:
        """Return the share of the issue's failing tests that pass; 0 if another test fails now."""
        count = len(self.issue.failing)
        broken = any(verdict.problems[count:])
        return 0.0 if broken else sum(not problem for problem in verdict.problems[:count]) / count

    def _expert_commands(self) -> list[str]:
        patch = self.issue.solution if self.issue.solution.endswith("\n") else f"{self.issue.solution}\n"
        command = f"git apply --whitespace=nowarn - <<'END_OF_PATCH'\n{patch}END_OF_PATCH"
        if len(command) > MAX_COMMAND or "```" in patch:
            got = f"{len(command):,} characters" if len(command) > MAX_COMMAND else "a patch with ```"
            raise UsageError(f"the solution of {self.issue.name} cannot be written as a shell command", got=got)
        return [command]

    def secrets(self) -> list[str]:
        """Return the solution and the hidden tests."""
        return [text for text in (self.issue.solution, self.issue.tests) if text]

    def _info(self) -> dict[str, Any]:
        longest = self.test_seconds + ISSUE_START_S + GIT_S
        return {"success": False, "task_type": self.issue.repository, "step_timeout_s": longest}


async def _archive(repository: Path, commit: str) -> bytes:
    """Return the files of a commit as a tar archive, made by git on this machine.

    Archives lack what ``export-ignore`` names, often the tests, so git reads attributes in an empty folder.

    Raises:
        UsageError: git is missing, or the commit does not exist.
    """
    _, place, _ = await _run_git("-C", str(repository), "rev-parse", "--absolute-git-dir")
    with tempfile.TemporaryDirectory(prefix="agentrl-repository-") as empty:
        words = (f"--git-dir={place.decode().strip()}", "--work-tree=.", "archive", "--worktree-attributes", commit)
        code, found, errors = await _run_git(*words, folder=empty)
    if code:
        raise UsageError(f"{repository} has no commit {commit}", got=errors.decode(errors="replace").strip()[-200:])
    return found


async def _run_git(*words: str, folder: str | None = None) -> tuple[int | None, bytes, bytes]:
    """Run git on this machine, in a folder without an index; return its exit code, output and errors."""
    pipe = asyncio.subprocess.PIPE
    variables = {**os.environ, "GIT_INDEX_FILE": f"{folder}/index"} if folder else None
    try:
        process = await asyncio.create_subprocess_exec(
            "git", *words, stdout=pipe, stderr=pipe, cwd=folder, env=variables
        )
    except OSError as error:
        raise UsageError("issues need git on this machine", got=error) from error
    try:
        found, errors = await asyncio.wait_for(process.communicate(), GIT_S)
    except BaseException:
        with suppress(ProcessLookupError):
            process.kill()
        raise
    return process.returncode, found, errors


class IssueTasks(NumberedTasks):
    """The issues of a split's file.

    Raises:
        UsageError: the split does not exist, or its file cannot be read.
    """

    def __init__(self, split: str, files: Mapping[str, str]) -> None:
        self._issues = issues_of(check_split(split, ENVIRONMENT), files)
        super().__init__(ENVIRONMENT, split, range(len(self._issues)))

    def _task_fields(self, task_id: str) -> Mapping[str, Any]:
        return {"type": self._issues[task_id].repository}


def issues_of(split: str, files: Mapping[str, str]) -> Mapping[str, Issue]:
    """Return the issues of a split by task id."""
    return read_issues(file_of(files, split, "issues of repo_fix"), split)


def issue_of(task_id: str, files: Mapping[str, str]) -> Issue:
    """Return the issue of a task id.

    Raises:
        UsageError: the task does not exist.
    """
    parse_task_id(task_id, ENVIRONMENT, lambda split: len(issues_of(split, files)))
    return issues_of(task_id.rpartition("-")[0], files)[task_id]


def issue_tasks(split: str, files: str | Mapping[str, str]) -> IssueTasks:
    """Return the task source of a split."""
    return IssueTasks(split, files_by_split(files, SPLITS, "issues of repo_fix"))
