"""A task folder as read, and the parts that both formats of task folders share."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import UsageError

from .dockerfile import CopiedFile, Recipe, compose_variables, other_services, read_dockerfile

FOLDER = "/app"
"""Working folder of tasks that name none."""
MIB = 2**20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTask:
    """A task folder."""

    name: str
    instruction: str
    tests: Path
    """Folder that only the judging sandbox gets."""
    shared_tests: Path | None = None
    """Folder with the tests of all steps, which the files in `tests` replace or extend."""
    script: Path | None
    """Script that checks the work, next to the tests; ``None`` runs pytest on the tests."""
    reads_pytest: bool
    """True if pytest's summary decides, if it is printed: scripts may hide the exit code."""
    needs_reward_file: bool = False
    """True if the task's format requires the script to write its reward to a file."""
    image: str | None
    """Container image, for back ends that have images."""
    verifier_image: str | None = None
    """Image of the judging sandbox, if it is another one."""
    folder: str
    """Working folder, an absolute path."""
    files: Sequence[CopiedFile]
    """Initial files of the working sandbox."""
    setup: bool
    """True if the files include a ``setup.sh`` in the working folder, which is run and removed."""
    solution: Path | None
    """Script that solves the task."""
    solution_files: Sequence[Path] = ()
    """Other files of the script's folder, which the script needs."""
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
    step_name: str = ""
    """Name of the step; empty for a task without steps."""
    step_files: Sequence[CopiedFile] = ()
    """Files that are added to the working sandbox when the step begins."""
    step_setup: bool = False
    """True if the step's files include a ``setup.sh``, which is run and removed."""
    least_reward: Mapping[str, float] = field(default_factory=dict)
    """Minimum reward of the step, and of its parts by name, with which the next step begins."""
    following: tuple[FolderTask, ...] = ()
    """Later steps of the task, in the same sandbox."""
    pays_last: bool = False
    """True if only the last step is paid; otherwise all steps count equally."""


def read_recipe(dockerfile: Path) -> Recipe:
    """Read a Dockerfile; return an empty recipe if there is none. Warn about instructions that are not run."""
    if not dockerfile.is_file():
        return Recipe()
    recipe = read_dockerfile(dockerfile)
    if recipe.commands and not (dockerfile.parent / "setup.sh").is_file():
        _log.warning(
            "%s has %d RUN instructions, which are skipped, because images are not built: name an image that was built "
            "from it (docker_image in task.toml), or put the commands into setup.sh",
            dockerfile,
            len(recipe.commands),
        )
    return recipe


def read_compose(folder: Path) -> dict[str, str]:
    """Return the variables of a folder's Compose file, if it has one. Warn about services that are not started."""
    file = next((path for path in sorted(folder.glob("docker-compose.y*ml")) if path.is_file()), None)
    if file is None:
        return {}
    if others := other_services(file):
        _log.warning("%s has the services %s, which sandboxes do not start", file, ", ".join(others))
    return compose_variables(file)


def read_yaml(file: Path) -> Any:
    """Read a YAML file.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return yaml.safe_load(read_text(file, f"a {file.name} cannot be read"))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"a {file.name} cannot be read", got=f"{file.parent}: {error}") from error


def section_of(settings: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any]:
    """Return a table of the settings; an empty one if it is missing.

    Raises:
        UsageError: it is not a table.
    """
    found = settings.get(name, {})
    if not isinstance(found, Mapping):
        raise UsageError(f"{name} of {file} is not a table", got=repr(found)[:80], expected=f"[{name}]")
    return found


def seconds_of(given: Any, default: float, file: Path) -> float:
    """Return a time limit in seconds.

    Raises:
        UsageError: it is not a number above 0.
    """
    seconds = default if given is None else given
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise UsageError(f"a time limit in {file} is not valid", got=repr(given), expected="seconds above 0")
    return float(seconds)


def size_of(environment: Mapping[str, Any], name: str, file: Path) -> int | None:
    """Read a size in bytes from ``memory_mb``, or from the older form ``memory = "2G"``.

    Raises:
        UsageError: it is not a size above 0.
    """
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
        raise UsageError(f"{name} of {file} is not valid", got=repr(given), expected=f"{name}_mb = 2048")
    return int(megabytes * MIB)


def read_text(path: Path, problem: str) -> str:
    """Read a text file; `problem` is the message if it cannot be read.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(problem, got=f"{path}: {error}") from error
