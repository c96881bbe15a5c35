"""Layout of a task folder in a sandbox, and specification of its sandboxes."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Set
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from agentrl.errors import UsageError
from agentrl.sandbox import Limits, Sandbox, SandboxSpec

from ..programs.acting import run_command
from .dockerfile import filled_variables
from .task_folder import FolderTask

TESTS, LOGS, SOLUTION = "/tests", "/logs", "/solution"
"""Folders that scripts of both formats use."""
WITH_PATHS = ("local", "docker")
"""Types of sandboxes that allow any folder."""
_PACK_S = 60.0
_PACKED = ".agentrl-folders.tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Layout of a task's sandboxes."""

    spec: SandboxSpec
    """Specification of the sandboxes."""
    folder: str | None
    """Folder in which commands start; ``None`` for the sandbox's own folder."""
    further: tuple[str, ...] = ()
    """Other folders with files of the task, outside the sandbox's own."""
    is_absolute: bool = True
    """True if absolute paths are those of the task; otherwise everything is below the sandbox's folder."""
    has_own_folder: bool = False
    """True if the sandbox's folder takes the place of the task's working folder, at any path."""

    def place_of(self, target: str, task: FolderTask) -> str:
        """Return the path of a task's file in the sandbox.

        Raises:
            UsageError: sandboxes of this type do not allow this path.
        """
        if not self.has_own_folder:
            return target
        if not PurePosixPath(target).is_relative_to(task.folder):
            raise _unreachable(task, target, self.spec)
        return str(PurePosixPath(target).relative_to(task.folder))

    async def pack(self, sandbox: Sandbox) -> None:
        """Pack the further folders into the sandbox's own folder, because a snapshot contains only that."""
        if self.further:
            names = [path.lstrip("/") for path in self.further]
            await run_command(sandbox, ["tar", "-C", "/", "-cf", _PACKED, *names], seconds=_PACK_S)

    async def clean(self, sandbox: Sandbox) -> None:
        """Remove the files of `pack` from a sandbox that continues to be used."""
        if self.further:
            await run_command(sandbox, ["rm", "-f", _PACKED], seconds=_PACK_S)

    async def unpack(self, sandbox: Sandbox, task: FolderTask) -> None:
        """Unpack the further folders in a restored sandbox, without tests and rewards that the policy put into them."""
        if self.further:
            await run_command(sandbox, f"tar -C / -xf {_PACKED}; rm -f {_PACKED}", seconds=_PACK_S)
        if LOGS in (sandbox.folder, *self.further):
            await run_command(sandbox, ["rm", "-rf", f"{LOGS}/verifier"], seconds=_PACK_S)
        if TESTS in self.further:
            await run_command(sandbox, ["find", TESTS, "-mindepth", "1", "-delete"], seconds=_PACK_S)
            for file in task.files:
                if PurePosixPath(file.target).is_relative_to(TESTS):
                    await sandbox.write(file.target, file.read(), executable=file.is_executable)


def places_of(spec: SandboxSpec, task: FolderTask, *, limits: Set[str] = frozenset()) -> Places:
    """Choose the layout of a task's sandboxes.

    Args:
        spec: The user's specification of sandboxes.
        task: The task.
        limits: Names of the limits that the user has set; a task does not change them.

    Raises:
        UsageError: sandboxes of this type do not allow the task's folders.
    """
    env = {**filled_variables(task.variables, spec.env, f"task {task.name}"), **spec.env}
    spec = dataclasses.replace(spec, env=env, limits=_limits(spec.limits, task, limits))
    if spec.type not in WITH_PATHS or spec.options.get("unconfined"):
        return Places(spec=spec, folder=None, is_absolute=False, has_own_folder=True)
    if spec.type == "docker":
        spec = dataclasses.replace(spec, image=task.image or spec.image)
        if task.image is not None:  # the image has the task's files and folders
            return Places(spec=_writable(spec, [TESTS, LOGS, SOLUTION]), folder=None, has_own_folder=True)
    main = _top(task.folder)
    further = sorted({_top(one.target) for one in task.files} - {main})
    if "/" in (main, *further) or any(one.target.count("/") < 2 for one in task.files):
        raise _unreachable(task, "/", spec)
    spec = dataclasses.replace(spec, options={**spec.options, "folder": spec.options.get("folder", main)})
    folder = None if task.folder == main else task.folder
    return Places(spec=_writable(spec, [TESTS, LOGS, SOLUTION, *further]), folder=folder, further=tuple(further))


def _limits(given: Limits, task: FolderTask, own: Set[str]) -> Limits:
    """Raise the sandbox's limits to the task's requirements."""
    seconds = max(max(step.verifier_seconds, step.agent_seconds) for step in (task, *task.following))
    wanted: dict[str, Any] = {
        "seconds": max(given.seconds or 0.0, seconds),
        "cpu_seconds": max(given.cpu_seconds or 0.0, seconds),
        "memory_bytes": task.memory_bytes or given.memory_bytes,
        "disk_bytes": task.disk_bytes or given.disk_bytes,
    }
    return dataclasses.replace(given, **{name: value for name, value in wanted.items() if name not in own})


def _writable(spec: SandboxSpec, folders: list[str]) -> SandboxSpec:
    found = list(dict.fromkeys([*spec.options.get("writable", ()), *folders]))
    return dataclasses.replace(spec, options={**spec.options, "writable": found})


def _top(path: str) -> str:
    """Return the first folder of an absolute path."""
    return "/" + PurePosixPath(path).parts[1] if len(PurePosixPath(path).parts) > 1 else "/"


def _unreachable(task: FolderTask, path: str, spec: SandboxSpec) -> UsageError:
    return UsageError(
        f"task {task.name} has files at a path that sandboxes of type {spec.type} do not allow",
        got=path,
        expected=f"files below {task.folder}" if spec.type not in WITH_PATHS else "files in folders such as /app",
        hint="name an image that contains them (docker_image in task.toml) and use sandboxes of type docker",
    )


def hidden_folder(sandbox: Sandbox, places: Places) -> str:
    """Return the prefix of `TESTS` and `LOGS`: a random folder below the sandbox's if paths are not absolute."""
    return "" if places.is_absolute else f"{sandbox.folder.rstrip('/')}/.{secrets.token_hex(8)}"
