"""Task folders in the formats of Harbor and terminal-bench."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError

from .dockerfile import files_of_context
from .harbor import read_harbor_task
from .task_folder import FOLDER, FolderTask, read_compose, read_recipe, read_yaml, seconds_of

BENCH_VERIFIER_S, BENCH_AGENT_S = 60.0, 360.0
"""Default time limits of terminal-bench in seconds."""


@functools.lru_cache(maxsize=16)
def read_folder(path: str) -> Sequence[FolderTask]:
    """Read the tasks below a folder, sorted by name.

    Raises:
        UsageError: the folder does not exist, or a task is incomplete.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError("the folder of tasks does not exist", got=path, expected="a folder with a folder per task")
    found = [
        _read_task(task)
        for task in sorted(folder.iterdir())
        if (task / "task.toml").is_file() or (task / "task.yaml").is_file()
    ]
    if not found:
        raise UsageError("the folder contains no tasks", got=path, expected="folders with a task.toml or task.yaml")
    return found


def _read_task(folder: Path) -> FolderTask:
    _check_links(folder)
    return read_harbor_task(folder) if (folder / "task.toml").is_file() else _of_terminal_bench(folder)


def _check_links(folder: Path) -> None:
    """Check that links do not lead out of the folder of tasks: files of this machine would be copied into sandboxes.

    Raises:
        UsageError: a link leads to another place.
    """
    allowed = (folder.resolve(), folder.parent.resolve())
    for path in folder.rglob("*"):
        if path.is_symlink() and path.exists() and not any(map(path.resolve().is_relative_to, allowed)):
            raise UsageError(
                f"task {folder.name} has a link that leads out of the folder of tasks",
                got=f"{path.relative_to(folder)} -> {path.resolve()}",
                expected=f"links to files below {folder.parent}",
            )


def _of_terminal_bench(folder: Path) -> FolderTask:
    """Read ``task.yaml``, ``Dockerfile``, ``run-tests.sh``, ``tests/``, ``solution.sh`` or ``solution.yaml``."""
    file = folder / "task.yaml"
    settings = read_yaml(file)
    instruction = _instruction(settings) if isinstance(settings, Mapping) else ""
    if not isinstance(settings, Mapping) or not instruction:
        raise UsageError("a task.yaml has no instruction", got=folder)
    tests = folder / "tests"
    script = next((path for path in (folder / "run-tests.sh", tests / "run-tests.sh") if path.is_file()), None)
    if script is None and not list(tests.glob("test_*.py")):
        raise UsageError(
            "a task folder has no checking script", got=folder, expected="run-tests.sh, or tests/test_*.py"
        )
    recipe = read_recipe(folder / "Dockerfile")
    working = recipe.folder or FOLDER
    context = folder / "environment"
    files = recipe.copies if recipe.has_copies else files_of_context(context, working)
    solution = folder / "solution.sh"
    return FolderTask(
        name=folder.name,
        instruction=instruction.strip(),
        tests=tests,
        script=script,
        reads_pytest=settings.get("parser_name", "pytest") == "pytest",
        image=settings.get("image"),
        folder=working,
        files=files,
        setup=any(one.target == f"{working}/setup.sh" for one in files),
        solution=solution if solution.is_file() else None,
        solution_commands=None if solution.is_file() else _typed_solution(folder / "solution.yaml"),
        verifier_seconds=seconds_of(settings.get("max_test_timeout_sec"), BENCH_VERIFIER_S, file),
        agent_seconds=seconds_of(settings.get("max_agent_timeout_sec"), BENCH_AGENT_S, file),
        variables={**recipe.variables, **read_compose(folder)},
    )


def _instruction(settings: Mapping[str, Any]) -> str:
    """Return the instruction; early tasks of terminal-bench have several descriptions, one with the key ``base``."""
    given, descriptions = settings.get("instruction"), settings.get("descriptions")
    if given is None and isinstance(descriptions, list):
        texts = {one.get("key"): one.get("description") for one in descriptions if isinstance(one, Mapping)}
        given = texts.get("base", next(iter(texts.values()), None))
    return "" if given is None else str(given)


def _typed_solution(file: Path) -> str | None:
    """Join the commands of a ``solution.yaml``."""
    if not file.is_file():
        return None
    rows = read_yaml(file)
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) and "command" in row for row in rows):
        raise UsageError(f"{file} cannot be read", got=str(rows)[:80], expected="a list of commands: [{command: …}]")
    return "\n".join(str(row["command"]) for row in rows)
