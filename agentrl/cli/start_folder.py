"""The folder in which a run was started, where relative paths of its config begin: commands that read it go there."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.observe.console import note, paths_shown_from
from agentrl.observe.run_folder import RunDirectory
from agentrl.registry import SOURCE_SUFFIX
from agentrl.runs.start_record import start_folder

RESUMED = "the run continues in the folder in which it was started"
READ = "relative paths of the run's config and of overrides begin in the folder in which it was started"


def other_start_folder(run: Path) -> Path | None:
    """Return the folder in which a run was started; ``None`` if it is the working folder, unknown or gone."""
    there = start_folder(RunDirectory(run))
    return None if there is None or Path.cwd().samefile(there) else there


@contextmanager
def in_start_folder(run: Path | None, words: str = RESUMED) -> Iterator[Path]:
    """Change to the folder in which a run was started, if it still exists; messages show paths from the user's.

    Yields the run's folder, which is absolute after such a change. Without a run, nothing changes.
    """
    here = Path.cwd()
    if run is None or (there := other_start_folder(run)) is None:
        yield run or here
        return
    run = run.resolve()
    note(f"{words}: {there}")
    os.chdir(there)
    if str(there) not in sys.path:  # the run's module:attr names are imported from there, and not from here
        sys.path.insert(sys.path.index(str(here)) if str(here) in sys.path else len(sys.path), str(there))
    try:
        with paths_shown_from(here):
            yield run
    finally:
        os.chdir(here)


def absolute_path(path: str | None) -> str | None:
    """Return the absolute path of a file or folder that exists; other names unchanged."""
    return path if path is None or not Path(path).exists() else str(Path(path).absolute())


def absolute_name(name: str) -> str:
    """Return ``./file.py:NAME`` with the absolute path of its file; other names unchanged."""
    file, colon, rest = name.partition(":")
    return f"{Path(file).expanduser().absolute()}{colon}{rest}" if file.endswith(SOURCE_SUFFIX) else name


def absolute_names(names: Sequence[str] | None) -> list[str] | None:
    """Apply `absolute_name` to all names."""
    return None if names is None else list(map(absolute_name, names))


def absolute_command(command: str | None) -> str | None:
    """Return a command with absolute paths of the files that it names by words without spaces."""

    def absolute(word: re.Match[str]) -> str:
        return str(Path(word[0]).absolute()) if Path(word[0]).is_file() else word[0]

    return None if command is None else re.sub(r"""[^\s'"]+""", absolute, command)
