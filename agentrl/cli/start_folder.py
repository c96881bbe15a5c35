"""The folder in which a run was started, where relative paths of its config begin: a resumed run continues there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.observe.console import note, paths_shown_from
from agentrl.observe.run_folder import RunDirectory
from agentrl.runs.start_record import start_folder


@contextmanager
def in_start_folder(run: Path) -> Iterator[Path]:
    """Change to the folder in which a run was started, if it still exists; messages show paths from the user's.

    Yields the run's folder, which is absolute after such a change.
    """
    here, there = Path.cwd(), start_folder(RunDirectory(run))
    if there is None or here.samefile(there):
        yield run
        return
    run = run.resolve()
    note(f"the run continues in the folder in which it was started: {there}")
    os.chdir(there)
    if str(there) not in sys.path:
        sys.path.append(str(there))  # the run's module:attr names are imported from there
    try:
        with paths_shown_from(here):
            yield run
    finally:
        os.chdir(here)
