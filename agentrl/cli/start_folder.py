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


class OptionsHere:
    """Options that name files of the current folder, for a command that then goes to a run's start folder.

    They become absolute only if the command will leave this folder; ``None`` and other names stay as they are.

    Args:
        run: Folder of the run; ``None`` if the command reads none.
    """

    def __init__(self, run: Path | None) -> None:
        self._leaves = run is not None and other_start_folder(run) is not None

    def path(self, path: str | None) -> str | None:
        """Return the absolute path of a file or folder that exists."""
        return str(Path(path).absolute()) if self._leaves and path is not None and Path(path).exists() else path

    def output(self, file: Path | None) -> Path | None:
        """Return the absolute path of a file that the command will write."""
        return file.absolute() if self._leaves and file is not None else file

    def name(self, name: str | None) -> str | None:
        """Return ``./file.py:NAME`` with the absolute path of its file."""
        file, colon, rest = (name or "").partition(":")
        is_file = self._leaves and file.endswith(SOURCE_SUFFIX)
        return f"{Path(file).expanduser().absolute()}{colon}{rest}" if is_file else name

    def names(self, names: Sequence[str] | None) -> list[str] | None:
        """Apply `name` to all names."""
        return None if names is None else [self.name(name) or name for name in names]

    def command(self, command: str | None) -> str | None:
        """Return a command with absolute paths of the files that it names by words without spaces."""

        def absolute(word: re.Match[str]) -> str:
            return str(Path(word[0]).absolute()) if Path(word[0]).is_file() else word[0]

        return re.sub(r"""[^\s'"]+""", absolute, command) if self._leaves and command is not None else command
