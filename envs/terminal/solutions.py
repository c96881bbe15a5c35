"""Commands that write and run the solution of a task folder, as a policy would."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from agentrl.errors import UsageError

from ..programs.shell import MAX_COMMAND
from .dockerfile import filled_variables
from .places import SOLUTION, Places
from .task_folder import FolderTask

_SHELL_LINE = re.compile(rb"#!\s*(/usr/bin/env\s+|\S*/)?(ba)?sh\s*$")
_OWN_PLACE = ("$0", "BASH_SOURCE", SOLUTION)
"""Words in scripts that look for files next to them."""
_END = "END_OF_FILE"
_FENCE = "```"


def solving_commands(task: FolderTask, places: Places) -> list[str]:
    """Return commands that solve a task: the text of a shell script, or else commands that write its files and run it.

    Raises:
        UsageError: the task has no solution, or the solution is too long for a command.
    """
    if task.solution is None and task.solution_commands is None:
        raise UsageError(f"task {task.name} has no solution", expected="solution/solve.sh, or solution.sh")
    variables = filled_variables(task.solution_variables, places.spec.env, f"the solution of task {task.name}")
    if task.solution is None:
        return _short([task.solution_commands or ""], task)
    content = task.solution.read_bytes()
    if _is_plain(content, task, variables):
        return _short([content.decode()], task)
    folder = SOLUTION if places.is_absolute else "${TMPDIR:-/tmp}/solution"
    root = task.solution.parent
    names = {path: path.relative_to(root).as_posix() for path in (task.solution, *task.solution_files)}
    script = f"{folder}/{names[task.solution]}"
    settings = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
    run = script if content.startswith(b"#!") else f"bash {script}"
    written = [_write_command(path, f"{folder}/{name}") for path, name in names.items()]
    return _short(_join_commands([*written, f"chmod +x {script}\n{settings}{run}\n"]), task)


def _is_plain(content: bytes, task: FolderTask, variables: Mapping[str, str]) -> bool:
    """Return True if a script has the same effect when its text is a command."""
    first, _, _ = content.partition(b"\n")
    if task.solution_files or variables or (content.startswith(b"#!") and not _SHELL_LINE.match(first)):
        return False
    text = _text(content)
    return text is not None and not any(word in text for word in (*_OWN_PLACE, _FENCE))


def _text(content: bytes) -> str | None:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text or "\r" in text else text


def _write_command(path: Path, target: str) -> str:
    """Return a command that writes a file."""
    content = path.read_bytes()
    text = _text(content)
    made = f'mkdir -p "$(dirname "{target}")"\n'
    if text is None or not text.endswith("\n") or _FENCE in text or _END in text:
        encoded = "\n".join(re.findall(".{1,76}", base64.b64encode(content).decode()))
        command, text = "base64 -d", f"{encoded}\n"
    else:
        command = "cat"
    mode = f'chmod +x "{target}"\n' if path.stat().st_mode & 0o100 else ""
    return f"{made}{command} > \"{target}\" <<'{_END}'\n{text}{_END}\n{mode}"


def _join_commands(pieces: list[str]) -> list[str]:
    """Join commands while they are short enough for one command."""
    found: list[str] = []
    for piece in pieces:
        if found and len(found[-1]) + len(piece) <= MAX_COMMAND:
            found[-1] += piece
        else:
            found.append(piece)
    return found


def _short(commands: list[str], task: FolderTask) -> list[str]:
    longest = max(map(len, commands))
    if longest > MAX_COMMAND:
        raise UsageError(
            f"the solution of task {task.name} is too long for a command",
            got=f"{longest:,} characters",
            expected=f"files of at most {MAX_COMMAND:,} characters",
        )
    return commands
