"""Task folders in the forms of Harbor and of terminal-bench."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import UsageError

CHECK_SECONDS = 15.0
"""The most that a checking script gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTask:
    """A task folder."""

    name: str
    instruction: str
    tests: Path
    """A folder that only the judging sandbox gets."""
    script: Path
    """Which file decides; it is put beside the tests."""
    image: str | None
    """The container image, for back ends that have such."""
    start: Path | None
    """A folder that is copied into the working folder; its ``setup.sh`` is run there."""
    solution: str | None
    """A shell script that solves the task."""
    seconds: float
    """For the checking script."""


@functools.lru_cache(maxsize=16)
def read_folder(path: str) -> Sequence[FolderTask]:
    """The tasks below a folder, sorted by name.

    Raises:
        UsageError: there is no such folder, or a task is incomplete.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError("there is no folder of tasks here", got=path, expected="a folder with a folder per task")
    found = [
        _read_task(task)
        for task in sorted(folder.iterdir())
        if (task / "task.toml").is_file() or (task / "task.yaml").is_file()
    ]
    if not found:
        raise UsageError("the folder holds no tasks", got=path, expected="folders with a task.toml or task.yaml")
    return found


def _read_task(folder: Path) -> FolderTask:
    return _of_harbor(folder) if (folder / "task.toml").is_file() else _of_terminal_bench(folder)


def _of_harbor(folder: Path) -> FolderTask:
    """``task.toml``, ``instruction.md``, ``environment/``, ``tests/test.sh``, ``solution/solve.sh``."""
    try:
        settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError("a task.toml cannot be read", got=f"{folder}: {error}") from error
    return _task(
        folder,
        instruction=_text(folder / "instruction.md"),
        script=folder / "tests" / "test.sh",
        tests=folder / "tests",
        image=settings.get("environment", {}).get("docker_image"),
        start=folder / "environment",
        solution=folder / "solution" / "solve.sh",
        seconds=settings.get("verifier", {}).get("timeout_sec", CHECK_SECONDS),
    )


def _of_terminal_bench(folder: Path) -> FolderTask:
    """``task.yaml``, ``Dockerfile``, ``run-tests.sh``, ``tests/``, ``solution.sh``."""
    try:
        settings = yaml.safe_load((folder / "task.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UsageError("a task.yaml cannot be read", got=f"{folder}: {error}") from error
    if not isinstance(settings, Mapping) or not settings.get("instruction"):
        raise UsageError("a task.yaml has no instruction", got=folder)
    script = folder / "run-tests.sh"
    return _task(
        folder,
        instruction=str(settings["instruction"]),
        script=script if script.is_file() else folder / "tests" / "run-tests.sh",
        tests=folder / "tests",
        image=settings.get("image"),
        start=folder / "environment",
        solution=folder / "solution.sh",
        seconds=settings.get("max_test_timeout_sec", CHECK_SECONDS),
    )


def _task(
    folder: Path,
    *,
    instruction: str,
    script: Path,
    tests: Path,
    image: str | None,
    start: Path,
    solution: Path,
    seconds: Any,
) -> FolderTask:
    if not script.is_file():
        raise UsageError("a task folder has no checking script", got=folder, expected=script.relative_to(folder))
    return FolderTask(
        name=folder.name,
        instruction=instruction.strip(),
        tests=tests,
        script=script,
        image=image,
        start=start if start.is_dir() else None,
        solution=solution.read_text(encoding="utf-8") if solution.is_file() else None,
        seconds=min(float(seconds), CHECK_SECONDS),
    )


def _text(path: Path) -> str:
    if not path.is_file():
        raise UsageError("a task folder has no instruction", got=path)
    return path.read_text(encoding="utf-8")
