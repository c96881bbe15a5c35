"""Checks of what a policy left: on a copy of its folder, in a sandbox that it never was in."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.sandbox import Limits, Sandbox, SandboxFileError, SandboxSpec

from ..programs.acting import GRACE_S, run_command
from ..programs.judging import Verdict, fresh_sandbox
from ..programs.pipes import Deadline, Late
from .folders import FolderTask
from .kinds import Check

MOST_BYTES = 256 * 1024
RUN_SECONDS = 5.0


async def check_errand(spec: SandboxSpec, acted: Sandbox, checks: Sequence[Check]) -> Verdict:
    """Compare here what a copy of the folder holds and what its programs print.

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
    found = await (_printed(sandbox, check) if check.command else _content(sandbox, check.path or ""))
    return "" if found == (None if check.text is None else _plain(check.text)) else f"{check.what} is not right"


async def _content(sandbox: Sandbox, path: str) -> str | None:
    try:
        return _plain((await sandbox.read(path, most=MOST_BYTES)).decode(errors="replace"))
    except SandboxFileError:
        return None


async def _printed(sandbox: Sandbox, check: Check) -> str | None:
    try:
        async with Deadline(sandbox, RUN_SECONDS + GRACE_S):
            result = await sandbox.exec(
                check.command or "", stdin=check.stdin.encode(), limits=Limits(seconds=RUN_SECONDS)
            )
    except Late:
        return None
    return _plain(result.stdout.decode(errors="replace")) if result.succeeded else None


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


async def check_folder(spec: SandboxSpec, acted: Sandbox, task: FolderTask) -> Verdict:
    """Run the script of a task folder on a copy of the working folder, with the tests beside it.

    The script finds the tests in ``$TEST_DIR`` (``/tests`` in a container). Its exit code decides, or the number that
    it writes to ``$LOGS_DIR/verifier/reward.txt`` (``/logs`` in a container). What it runs of the policy's runs beside
    the tests here: how much that may be trusted is up to the script.

    Raises:
        SandboxError: a sandbox does not start, or is lost.
    """
    try:
        left = await acted.snapshot()
    except SandboxFileError as error:
        return Verdict(problems=(str(error),))
    async with fresh_sandbox(_with_places(spec)) as fresh:
        try:
            await fresh.restore(left)
        except SandboxFileError as error:
            return Verdict(problems=(str(error),))
        place = "" if spec.image is not None else f"{fresh.folder.rstrip('/')}/.{secrets.token_hex(8)}"
        await write_folder(fresh, task.tests, f"{place}/tests")
        await fresh.write(f"{place}/tests/{task.script.name}", task.script.read_bytes(), executable=True)
        await fresh.write(f"{place}/logs/verifier/.keep", b"")
        variables = {"TEST_DIR": f"{place}/tests", "LOGS_DIR": f"{place}/logs"}
        command = ["sh", f"{place}/tests/{task.script.name}"]
        result = await run_command(fresh, command, seconds=task.seconds, env=variables)
        reward = await _reward(fresh, f"{place}/logs/verifier")
    solved = result.succeeded if reward is None else reward >= 1
    return Verdict(problems=("" if solved else "the checking script does not agree",))


def _with_places(spec: SandboxSpec) -> SandboxSpec:
    """Where the system is read-only, the folders of the script are asked for."""
    if spec.type != "docker" or spec.image is None:
        return spec
    places = [*spec.options.get("writable", ()), "/tests", "/logs"]
    return dataclasses.replace(spec, options={**spec.options, "writable": places})


async def _reward(sandbox: Sandbox, folder: str) -> float | None:
    """What the script wrote, if it did."""
    for name in ("reward.txt", "reward.json"):
        try:
            text = (await sandbox.read(f"{folder}/{name}", most=4096)).decode(errors="replace")
            value = json.loads(text)
            number = float(value.get("reward", 0) if isinstance(value, dict) else value)
        except SandboxFileError:
            continue
        except (ValueError, TypeError):
            return 0.0
        return number if math.isfinite(number) else 0.0
    return None


async def write_folder(sandbox: Sandbox, folder: Path, place: str = ".") -> None:
    """Copy a folder of this machine into a sandbox."""
    for path, content, executable in _files(folder):
        await sandbox.write(f"{place}/{path}", content, executable=executable)


def _files(folder: Path) -> Iterator[tuple[Path, bytes, bool]]:
    """Path below the folder, content, and whether it can be executed."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder), path.read_bytes(), bool(path.stat().st_mode & 0o100)
