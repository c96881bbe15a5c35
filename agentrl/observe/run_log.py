"""The run's own log file: warnings, retries, stall reports; and what of it the user must see at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.observe.console import VisibleFormatter

OBSERVED = "agentrl.observe"
"""What is logged here is about damaged records on disk, and trackers that failed."""


@contextmanager
def logging_to(file: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Append what agentrl logs inside the block to `file`, whatever else happens to it.

    Args:
        file: The log.
        say: Tells the user about damaged records and failed trackers.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    log = logging.FileHandler(file, encoding="utf-8", delay=True)
    log.addFilter(lambda record: file.parent.is_dir())  # the run's folder may be gone, and its log with it
    log.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    screen = _Screen(say)
    logger, observed = logging.getLogger("agentrl"), logging.getLogger(OBSERVED)
    logger.addHandler(log)
    observed.addHandler(screen)
    try:
        yield
    finally:
        observed.removeHandler(screen)
        logger.removeHandler(log)
        log.close()


class _Screen(logging.Handler):
    """Passes warnings on to the user.

    Args:
        say: Shows one.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Show the message."""
        self._say(record.getMessage())
