"""Checks of the policy's work, on a copy of its folder in a fresh sandbox."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl.sandbox import ExecResult, Limits, Sandbox, SandboxFileError, SandboxSpec

from ..programs.acting import ACTION_GRACE_S, run_command, without_colours
from ..programs.judging import Verdict, fresh_sandbox
from ..programs.pipes import Deadline, DeadlineExceeded
from .dockerfile import filled_variables
from .kinds import Check
from .places import LOGS, TESTS, Places, hidden_folder
from .task_folder import FolderTask

MAX_BYTES = 256 * 1024
MAX_REWARD_BYTES = 64 * 1024
RUN_SECONDS = 5.0
_log = logging.getLogger(__name__)
_RESULT = re.compile(r"^(PASSED|FAILED|ERROR|XPASS|XFAIL|SKIPPED)\b", re.MULTILINE)


async def check_errand(spec: SandboxSpec, acted: Sandbox, checks: Sequence[Check]) -> Verdict:
    """Check the files of a copy of the folder, and the output of its programs, against expected texts.

    Raises:
        SandboxError: a sandbox does not start, or is lost.
    """
    try:
        left = await acted.snapshot()
    except SandboxFileError as error:
        return Verdict(problems=(str(error),) * len(checks))
    async with fresh_sandbox(spec) as fresh:
        try:
            await fresh.restore(left)
        except SandboxFileError as error:
            return Verdict(problems=(str(error),) * len(checks))
        return Verdict(problems=tuple([await _problem(fresh, check) for check in checks]))


async def _problem(sandbox: Sandbox, check: Check) -> str:
    found = await (_run_check(sandbox, check) if check.command else _content(sandbox, check.path or ""))
    return "" if found == (None if check.text is None else _plain(check.text)) else f"{check.what} is not right"


async def _content(sandbox: Sandbox, path: str) -> str | None:
    try:
        return _plain((await sandbox.read(path, most=MAX_BYTES)).decode(errors="replace"))
    except SandboxFileError:
        return None


async def _run_check(sandbox: Sandbox, check: Check) -> str | None:
    try:
        async with Deadline(sandbox, RUN_SECONDS + ACTION_GRACE_S):
            result = await sandbox.exec(
                check.command or "", stdin=check.stdin.encode(), limits=Limits(seconds=RUN_SECONDS)
            )
    except DeadlineExceeded:
        return None
    return _plain(result.stdout.decode(errors="replace")) if result.is_success else None


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


async def check_folder(places: Places, acted: Sandbox, task: FolderTask) -> Verdict:
    """Run the script of a task folder on a copy of the working folder, with the tests next to it.

    The script is executed, so its first line selects the interpreter. It finds the tests in ``$TEST_DIR`` (``/tests``
    if the sandbox allows any path). The reward is the content of ``$LOGS_DIR/verifier/reward.json`` or ``reward.txt``
    (``/logs``); without these files, pytest's summary or the exit code decides. If the script runs the policy's
    programs, these can reach the tests: the script decides how far to trust them.

    Raises:
        SandboxError: a sandbox does not start, or is lost.
    """
    try:
        await places.pack(acted)
        left = await acted.snapshot()
    except SandboxFileError as error:
        return Verdict(problems=(str(error),))
    spec = places.spec if task.verifier_image is None else dataclasses.replace(places.spec, image=task.verifier_image)
    async with fresh_sandbox(spec, keeps_network=True) as fresh:
        try:
            await fresh.restore(left)
        except SandboxFileError as error:
            return Verdict(problems=(str(error),))
        await places.unpack(fresh, task)
        hidden = hidden_folder(fresh, places)
        result = await _run_script(fresh, places, task, hidden)
        rewards = await _rewards(fresh, f"{hidden}{LOGS}/verifier", task)
    if rewards is None:
        solved = _has_passed(result, task)
        rewards = {"reward": float(solved)}
        if task.needs_reward_file and not result.timed_out:
            code = f"its exit code {result.exit_code} decides"
            _warn(task.name, f"its verifier wrote no reward.json or reward.txt, which Harbor requires: {code}")
        if result.timed_out:
            _warn(task.name, f"its verifier was stopped after its limit of {task.verifier_seconds:g} s: reward 0")
    right = rewards["reward"] >= 1
    return Verdict(problems=("" if right else "the checking script does not agree",), given=rewards)


async def _run_script(sandbox: Sandbox, places: Places, task: FolderTask, hidden: str) -> ExecResult:
    tests, logs = f"{hidden}{TESTS}", f"{hidden}{LOGS}"
    for folder in (task.shared_tests, task.tests):
        if folder is not None:
            await write_folder(sandbox, folder, tests)
    await sandbox.write(f"{logs}/verifier/.keep", b"")
    known = places.spec.env
    own = filled_variables(task.verifier_variables, known, f"the verifier of task {task.name}")
    variables = {"TEST_DIR": tests, "LOGS_DIR": logs, **own}
    command: list[str] = ["python3", "-m", "pytest", "-rA", tests]
    if task.script is not None:
        content = task.script.read_bytes().replace(b"\r\n", b"\n")  # no shell runs a script with Windows line ends
        await sandbox.write(f"{tests}/{task.script.name}", content, executable=True)
        command = [f"{tests}/{task.script.name}"]
        if not content.startswith(b"#!"):
            command = ["sh", "-c", 'command -v bash >/dev/null && exec bash "$0"; exec sh "$0"', *command]
    return await run_command(sandbox, command, seconds=task.verifier_seconds, cwd=places.folder, env=variables)


def _has_passed(result: ExecResult, task: FolderTask) -> bool:
    """Return True if the tests passed, by pytest's summary if present: ``pytest | tee`` hides exit codes."""
    if task.reads_pytest:
        output = without_colours(result.stdout.decode(errors="replace"))
        _, title, summary = output.rpartition("short test summary info")
        found = _RESULT.findall(summary)
        if title and found:
            return not result.timed_out and set(found) <= {"PASSED", "XFAIL", "SKIPPED"} and "PASSED" in found
    return result.is_success


async def _rewards(sandbox: Sandbox, folder: str, task: FolderTask) -> dict[str, float] | None:
    """Read the reward and its parts that the script wrote; ``None`` if it wrote nothing."""
    parts, text = await _read_text(sandbox, f"{folder}/reward.json"), await _read_text(sandbox, f"{folder}/reward.txt")
    if parts is None and text is None:
        return None
    found = {} if parts is None else _numbers(parts)
    if "reward" not in found and text is not None:
        found |= _numbers(text)
    if "reward" not in found:  # without a total, the parts count equally
        if not found:
            _warn(task.name, f"its verifier wrote a reward that is not a number: {(parts or text or '')[:80]!r}")
        found["reward"] = math.fsum(found.values()) / len(found) if found else 0.0
    return found


async def _read_text(sandbox: Sandbox, path: str) -> str | None:
    try:
        return (await sandbox.read(path, most=MAX_REWARD_BYTES)).decode(errors="replace").strip("\ufeff\0 \t\r\n")
    except SandboxFileError:
        return None


def _numbers(text: str) -> dict[str, float]:
    """Read a number, or the numbers of an object by name."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    rows = value.items() if isinstance(value, dict) else [("reward", value)]
    found = {str(name): _number(one) for name, one in rows}
    return {name: number for name, number in found.items() if number is not None}


def _number(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


@functools.cache
def _warn(task: str, problem: str) -> None:
    """Warn once about a problem that a reward does not show."""
    _log.warning("task %s: %s", task, problem)


async def write_folder(sandbox: Sandbox, folder: Path, place: str = ".") -> None:
    """Copy a folder of this machine into a sandbox."""
    for path, content, executable in _files(folder):
        await sandbox.write(f"{place}/{path}", content, executable=executable)


def _files(folder: Path) -> Iterator[tuple[Path, bytes, bool]]:
    """Yield each file's path below the folder, its content, and true if it is executable."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder), path.read_bytes(), bool(path.stat().st_mode & 0o100)
