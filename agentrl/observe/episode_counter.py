"""Live progress of an evaluation: a bar in a terminal, lines now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentrl.observe.console import err, note
from agentrl.observe.heartbeat import Heartbeat
from agentrl.trajectory import Trajectory

LINES = 10
"""Lines that a quick evaluation prints where there is no terminal; a slow one says now and then how far it is."""


@dataclass(slots=True)
class EpisodeCounter:
    """Counter of episodes, which shows each one as it ends."""

    total: int
    done: int = 0
    told: int = 0
    """Episodes that say whether they solved their task."""
    solved: int = 0
    failed: int = 0
    bar: Progress | None = field(default=None, repr=False)
    on_line: Callable[[], None] = field(default=lambda: None, repr=False)
    """Called after a line is printed."""

    def add(self, trajectory: Trajectory) -> None:
        """Count an episode that ended."""
        self.done += 1
        infrastructure = trajectory.outcome is not None and trajectory.outcome.is_infrastructure
        self.failed += infrastructure
        if not infrastructure and trajectory.success is not None:
            self.told += 1
            self.solved += trajectory.success
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done, description=self.words())
        elif self.done == self.total or self.done % max(1, self.total // LINES) == 0:
            note(self.line())
            self.on_line()

    def line(self) -> str:
        """Describe the progress on one line."""
        return f"{self.done}/{self.total} episodes, {self.words()}"

    def words(self) -> str:
        """Describe the results so far."""
        success = f"success {self.solved / self.told:.1%}" if self.told else "success unknown"
        return f"{success}, {self.failed} failed" if self.failed else success


@contextmanager
def counting(total: int) -> Iterator[EpisodeCounter]:
    """Show progress over `total` episodes on standard error."""
    if not err.is_terminal:
        counter = EpisodeCounter(total)
        heartbeat = Heartbeat(counter.line)
        counter.on_line = heartbeat.heard
        with heartbeat.beating():
            yield counter
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        bar.add_task("episodes", total=total)
        yield EpisodeCounter(total, bar=bar)
