"""Task folders in Harbor's format, with one step or several."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError

from .dockerfile import CopiedFile, files_of_context
from .task_folder import FOLDER, FolderTask, read_compose, read_recipe, read_text, seconds_of, section_of, size_of

HARBOR_VERIFIER_S, HARBOR_AGENT_S = 600.0, 600.0
"""Default time limits in seconds; the one for the agent is ours, because Harbor has none."""
SHARED, SEPARATE = "shared", "separate"
MEAN, FINAL = "mean", "final"
_STEP_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_UNSUPPORTED = ("mcp_servers", "healthcheck", "gpus")
"""Keys of ``[environment]`` whose tasks may not be solvable here."""
_log = logging.getLogger(__name__)


def read_harbor_task(folder: Path) -> FolderTask:
    """Read ``task.toml``, ``instruction.md``, ``environment/``, ``tests/test.sh`` and ``solution/solve.sh``.

    A task with steps has the last three and the instruction for each step, in ``steps/NAME``, and may have tests that
    all steps share. The result is the first step, which has the others.

    Raises:
        UsageError: the task is incomplete, or a setting is not valid.
    """
    file = folder / "task.toml"
    try:
        settings = tomllib.loads(read_text(file, "a task.toml cannot be read"))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise UsageError("a task.toml cannot be read", got=f"{folder}: {error}") from error
    task = _read_common(folder, settings, file)
    steps = settings.get("steps")
    if not steps:
        return _with_texts(task, folder, settings, file)
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise UsageError(f"steps of {file} are not tables", got=repr(steps)[:80], expected="[[steps]]")
    strategy = settings.get("multi_step_reward_strategy", MEAN)
    if strategy not in (MEAN, FINAL):
        expected = f"{MEAN} or {FINAL}"
        raise UsageError(f"unknown multi_step_reward_strategy in {file}", got=repr(strategy), expected=expected)
    read = [_read_step(task, folder, settings, step, file) for step in steps]
    if len({step.step_name for step in read}) < len(read):
        raise UsageError(f"two steps of {file} have the same name", expected="unique names")
    return dataclasses.replace(read[0], following=tuple(read[1:]), pays_last=strategy == FINAL)


def _read_common(folder: Path, settings: Mapping[str, Any], file: Path) -> FolderTask:
    """Read what all steps share; texts, tests and solution are those of the folder itself."""
    environment, verifier = section_of(settings, "environment", file), section_of(settings, "verifier", file)
    for name in _UNSUPPORTED:
        if environment.get(name):
            _log.warning("%s sets environment.%s, which sandboxes do not provide", file, name)
    context = folder / "environment"
    recipe = read_recipe(context / "Dockerfile")
    working = str(environment.get("workdir") or recipe.folder or FOLDER)
    image = environment.get("docker_image")
    files = recipe.copies if recipe.has_copies else files_of_context(context, working)
    judged_in = section_of(verifier, "environment", file)
    mode = verifier.get("environment_mode", SEPARATE if judged_in else SHARED)
    if mode not in (SHARED, SEPARATE):
        expected = f"{SHARED} or {SEPARATE}"
        raise UsageError(f"unknown verifier.environment_mode in {file}", got=repr(mode), expected=expected)
    return FolderTask(
        name=folder.name,
        instruction="",
        tests=folder / "tests",
        script=None,
        reads_pytest=False,
        needs_reward_file=True,
        image=image,
        verifier_image=judged_in.get("docker_image") if mode == SEPARATE else None,
        folder=working,
        files=files if image is None or not (context / "Dockerfile").is_file() else (),
        setup=any(one.target == f"{working}/setup.sh" for one in files),
        solution=None,
        verifier_seconds=HARBOR_VERIFIER_S,
        agent_seconds=HARBOR_AGENT_S,
        memory_bytes=size_of(environment, "memory", file),
        disk_bytes=size_of(environment, "storage", file),
        variables={**recipe.variables, **read_compose(context), **section_of(environment, "env", file)},
        verifier_variables={**section_of(judged_in, "env", file), **section_of(verifier, "env", file)},
        solution_variables=section_of(section_of(settings, "solution", file), "env", file),
    )


def _with_texts(task: FolderTask, folder: Path, settings: Mapping[str, Any], file: Path) -> FolderTask:
    """Add the instruction, tests, solution and time limits in a folder: that of the task, or of a step."""
    agent, verifier = section_of(settings, "agent", file), section_of(settings, "verifier", file)
    shared = task.tests if folder / "tests" != task.tests and task.tests.is_dir() else None
    scripts = [folder / "tests" / "test.sh", *([] if shared is None else [shared / "test.sh"])]
    script = next((path for path in scripts if path.is_file()), None)
    if script is None:
        raise UsageError("a task folder has no checking script", got=folder, expected="tests/test.sh")
    solve = folder / "solution" / "solve.sh"
    return dataclasses.replace(
        task,
        instruction=read_text(folder / "instruction.md", "a task folder has no instruction").strip(),
        tests=folder / "tests",
        shared_tests=shared,
        script=script,
        solution=solve if solve.is_file() else None,
        solution_files=[one for one in sorted(solve.parent.rglob("*")) if one.is_file() and one != solve],
        verifier_seconds=seconds_of(verifier.get("timeout_sec"), HARBOR_VERIFIER_S, file),
        agent_seconds=seconds_of(agent.get("timeout_sec"), HARBOR_AGENT_S, file),
        verifier_variables={**task.verifier_variables, **section_of(verifier, "env", file)},
    )


def _read_step(
    task: FolderTask, folder: Path, settings: Mapping[str, Any], step: Mapping[str, Any], file: Path
) -> FolderTask:
    """Read a step; its agent and verifier sections override those of the task."""
    name = step.get("name")
    if not isinstance(name, str) or not _STEP_NAME.fullmatch(name):
        expected = "letters, digits, dots, dashes and underscores"
        raise UsageError(f"the name of a step of {file} is missing or not valid", got=repr(name), expected=expected)
    own = {
        section: {**section_of(settings, section, file), **section_of(step, section, file)}
        for section in ("agent", "verifier")
    }
    place = folder / "steps" / name
    files = [
        CopiedFile(source=path, target=f"{task.folder}/{path.relative_to(place / 'workdir').as_posix()}")
        for path in sorted((place / "workdir").rglob("*"))
        if path.is_file()
    ]
    return dataclasses.replace(
        _with_texts(task, place, own, file),
        step_name=name,
        step_files=files,
        step_setup=any(one.target == f"{task.folder}/setup.sh" for one in files),
        least_reward=_least(step.get("min_reward"), name, file),
    )


def _least(given: Any, step: str, file: Path) -> Mapping[str, float]:
    """Read ``min_reward``: a number, or numbers of the parts of a reward by name."""
    rows = given if isinstance(given, Mapping) else {} if given is None else {"reward": given}
    for value in rows.values():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UsageError(
                f"min_reward of step {step} in {file} is not valid", got=repr(given), expected="a number, or a table"
            )
    return {str(name): float(value) for name, value in rows.items()}
