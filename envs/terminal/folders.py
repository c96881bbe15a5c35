"""Task folders in the formats of Harbor and terminal-bench."""

from __future__ import annotations

import functools
import logging
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import UsageError

from .dockerfile import CopiedFile, Recipe, compose_variables, files_of_context, read_dockerfile

FOLDER = "/app"
"""Working folder of tasks that name none."""
HARBOR_VERIFIER_S, HARBOR_AGENT_S = 600.0, 600.0
BENCH_VERIFIER_S, BENCH_AGENT_S = 60.0, 360.0
"""Default time limits of the two formats in seconds; the one for Harbor's agent is ours, because Harbor has none."""
MIB = 2**20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTask:
    """A task folder."""

    name: str
    instruction: str
    tests: Path
    """Folder that only the judging sandbox gets."""
    script: Path | None
    """Script that checks the work, next to the tests; ``None`` runs pytest on the tests."""
    reads_pytest: bool
    """True if pytest's summary decides, if it is printed: scripts may hide the exit code."""
    needs_reward_file: bool = False
    """True if the task's format requires the script to write its reward to a file."""
    image: str | None
    """Container image, for back ends that have images."""
    folder: str
    """Working folder, an absolute path."""
    files: Sequence[CopiedFile]
    """Initial files of the working sandbox."""
    setup: bool
    """True if the files include a ``setup.sh`` in the working folder, which is run and removed."""
    solution: Path | None
    """Script that solves the task."""
    solution_files: Sequence[Path] = ()
    """Other files of the script's folder, which it needs."""
    solution_commands: str | None = None
    """Commands that solve the task, in place of a script."""
    verifier_seconds: float
    agent_seconds: float
    """Time limit of a command of the policy."""
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Environment variables of all commands."""
    verifier_variables: Mapping[str, Any] = field(default_factory=dict)
    solution_variables: Mapping[str, Any] = field(default_factory=dict)


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
    return _of_harbor(folder) if (folder / "task.toml").is_file() else _of_terminal_bench(folder)


def _of_harbor(folder: Path) -> FolderTask:
    """Read ``task.toml``, ``instruction.md``, ``environment/``, ``tests/test.sh``, ``solution/solve.sh``."""
    file = folder / "task.toml"
    try:
        settings = tomllib.loads(_text(file, "a task.toml cannot be read"))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise UsageError("a task.toml cannot be read", got=f"{folder}: {error}") from error
    if settings.get("steps"):
        raise UsageError(
            "a task has several steps", got=f"steps in {file}", expected="one instruction and one verifier"
        )
    environment, verifier = _section(settings, "environment", file), _section(settings, "verifier", file)
    agent, solution = _section(settings, "agent", file), _section(settings, "solution", file)
    script, context = folder / "tests" / "test.sh", folder / "environment"
    if not script.is_file():
        raise UsageError("a task folder has no checking script", got=folder, expected="tests/test.sh")
    recipe = _recipe(context / "Dockerfile")
    working = recipe.folder or FOLDER
    image = environment.get("docker_image")
    files = recipe.copies if recipe.has_copies else files_of_context(context, working)
    solve = folder / "solution" / "solve.sh"
    return FolderTask(
        name=folder.name,
        instruction=_text(folder / "instruction.md", "a task folder has no instruction").strip(),
        tests=folder / "tests",
        script=script,
        reads_pytest=False,
        needs_reward_file=True,
        image=image,
        folder=working,
        files=files if image is None or not (context / "Dockerfile").is_file() else (),
        setup=any(one.target == f"{working}/setup.sh" for one in files),
        solution=solve if solve.is_file() else None,
        solution_files=[one for one in sorted(solve.parent.rglob("*")) if one.is_file() and one != solve],
        verifier_seconds=_seconds(verifier.get("timeout_sec"), HARBOR_VERIFIER_S, file),
        agent_seconds=_seconds(agent.get("timeout_sec"), HARBOR_AGENT_S, file),
        memory_bytes=_size(environment, "memory", file),
        disk_bytes=_size(environment, "storage", file),
        variables={**recipe.variables, **_section(environment, "env", file)},
        verifier_variables=_section(verifier, "env", file),
        solution_variables=_section(solution, "env", file),
    )


def _of_terminal_bench(folder: Path) -> FolderTask:
    """Read ``task.yaml``, ``Dockerfile``, ``run-tests.sh``, ``tests/``, ``solution.sh`` or ``solution.yaml``."""
    file = folder / "task.yaml"
    settings = _yaml(file)
    instruction = _instruction(settings) if isinstance(settings, Mapping) else ""
    if not isinstance(settings, Mapping) or not instruction:
        raise UsageError("a task.yaml has no instruction", got=folder)
    tests = folder / "tests"
    script = next((path for path in (folder / "run-tests.sh", tests / "run-tests.sh") if path.is_file()), None)
    if script is None and not list(tests.glob("test_*.py")):
        raise UsageError(
            "a task folder has no checking script", got=folder, expected="run-tests.sh, or tests/test_*.py"
        )
    recipe = _recipe(folder / "Dockerfile")
    working = recipe.folder or FOLDER
    context = folder / "environment"
    files = recipe.copies if recipe.has_copies else files_of_context(context, working)
    compose = next((path for path in folder.glob("docker-compose.y*ml") if path.is_file()), None)
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
        verifier_seconds=_seconds(settings.get("max_test_timeout_sec"), BENCH_VERIFIER_S, file),
        agent_seconds=_seconds(settings.get("max_agent_timeout_sec"), BENCH_AGENT_S, file),
        variables={**recipe.variables, **(compose_variables(compose) if compose else {})},
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
    rows = _yaml(file)
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) and "command" in row for row in rows):
        raise UsageError(f"{file} cannot be read", got=str(rows)[:80], expected="a list of commands: [{command: …}]")
    return "\n".join(str(row["command"]) for row in rows)


def _recipe(dockerfile: Path) -> Recipe:
    if not dockerfile.is_file():
        return Recipe()
    recipe = read_dockerfile(dockerfile)
    if recipe.commands and not (dockerfile.parent / "setup.sh").is_file():
        _log.warning(
            "%s has %d RUN instructions, which are not run, because images are not built: name an image that was built "
            "from it (docker_image in task.toml), or put the commands into setup.sh",
            dockerfile,
            len(recipe.commands),
        )
    return recipe


def _yaml(file: Path) -> Any:
    try:
        return yaml.safe_load(_text(file, f"a {file.name} cannot be read"))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"a {file.name} cannot be read", got=f"{file.parent}: {error}") from error


def _section(settings: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any]:
    found = settings.get(name, {})
    if not isinstance(found, Mapping):
        raise UsageError(f"{name} of {file} is not a table", got=repr(found)[:80], expected=f"[{name}]")
    return found


def _seconds(given: Any, default: float, file: Path) -> float:
    seconds = default if given is None else given
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise UsageError(f"a time limit of {file} cannot be used", got=repr(given), expected="seconds above 0")
    return float(seconds)


def _size(environment: Mapping[str, Any], name: str, file: Path) -> int | None:
    """Read a size in bytes from ``memory_mb``, or from the older form ``memory = "2G"``."""
    given = environment.get(f"{name}_mb", environment.get(name))
    if given is None:
        return None
    text = str(given).strip().upper().removesuffix("B")
    unit = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}.get(text[-1:])
    try:
        megabytes = float(text if unit is None else text[:-1]) * (unit or 1.0)
    except ValueError:
        megabytes = math.nan
    if not 0 < megabytes < math.inf:
        raise UsageError(f"{name} of {file} cannot be used", got=repr(given), expected=f"{name}_mb = 2048")
    return int(megabytes * MIB)


def _text(path: Path, problem: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(problem, got=f"{path}: {error}") from error
