"""Progress display of a run or an evaluation: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.observe.console import err, note, shown_path
from agentrl.observe.idle_steps import share_that_differs
from agentrl.observe.metrics import ENVIRONMENT_PREFIX, SuccessCounts
from agentrl.observe.progress import RolloutProgress, RunStatus, RunWatcher
from agentrl.observe.trajectory_index import TrajectoryIndex
from agentrl.trajectory import Trajectory

QUIET_S = 15.0
"""Seconds without output after which a status line is printed."""


class Heartbeat:
    """Printer of a status line whenever there was no output for `quiet_s` seconds.

    Args:
        words: Returns the line; called in a separate thread, so that a busy event loop does not delay it.
        quiet_s: Seconds without output.
    """

    def __init__(self, words: Callable[[], str], *, quiet_s: float = QUIET_S) -> None:
        self._words = words
        self._quiet_s = quiet_s
        self._began = self._last_output = time.monotonic()

    def reset(self) -> None:
        """Restart the interval, after other output."""
        self._last_output = time.monotonic()

    def beat(self, now: float) -> float:
        """Print the line if it is due at `now` (monotonic clock, in seconds); return the seconds until the next."""
        if now - self._last_output >= self._quiet_s:
            self._last_output = now
            note(f"{self._words()}, {now - self._began:.0f} s")
        return self._last_output + self._quiet_s - now

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Print status lines during the block."""
        with repeating("heartbeat", lambda: self.beat(time.monotonic())):
            yield


@contextmanager
def repeating(name: str, work: Callable[[], float]) -> Iterator[None]:
    """Call `work` repeatedly in a separate thread while the block runs, at least once.

    `work` returns the seconds until its next call.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(work()):
            pass

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


WINDOW_S = 20.0
"""Seconds over which speed is measured; longer if it is read less often."""


class Speed:
    """Growth of a total per second, over the last `WINDOW_S` seconds.

    Args:
        now: Monotonic clock, in seconds; default: the current time.
    """

    def __init__(self, now: float | None = None) -> None:
        self._readings = deque([(time.monotonic() if now is None else now, 0.0)])

    def at(self, total: float, now: float | None = None) -> float:
        """Return the speed at `now`, when `total` was reached; 0 if no time has passed.

        >>> speed = Speed(now=0.0)
        >>> speed.at(500, now=10.0), speed.at(500, now=20.0), speed.at(500, now=30.0)
        (50.0, 25.0, 0.0)
        """
        now = time.monotonic() if now is None else now
        while len(self._readings) > 1 and now - self._readings[1][0] >= WINDOW_S:
            self._readings.popleft()
        began, before = self._readings[0]
        self._readings.append((now, total))
        return (total - before) / (now - began) if now > began else 0.0


RECENT = 8
"""Number of steps in the live panel."""


@dataclass(frozen=True, slots=True)
class MetricColumn:
    """A metric in the line or row of a step."""

    metric: str
    title: str
    format: str
    is_trouble: bool = False
    """True to hide the metric while it is 0."""


COLUMNS = (
    MetricColumn("success/mean", "success", "{:.1%}"),
    MetricColumn("reward/mean", "reward", "{:.3f}"),
    MetricColumn("groups/differ", "groups that differ", "{:.0%}"),
    MetricColumn("curriculum/turns", "horizon", "{:.0f}"),
    MetricColumn("sft/loss", "loss", "{:.3f}"),
    MetricColumn("preferences/loss", "loss", "{:.3f}"),
    MetricColumn("preferences/accuracy", "accuracy", "{:.1%}"),
    MetricColumn("reward_model/loss", "loss", "{:.3f}"),
    MetricColumn("reward_model/accuracy", "accuracy", "{:.1%}"),
    MetricColumn("eval/success", "evaluated", "{:.1%}"),
    MetricColumn("rollout/retries", "retries", "{:.0f}", is_trouble=True),
    MetricColumn("rollout/groups_failed", "failed groups", "{:.0f}", is_trouble=True),
    MetricColumn("train/loss", "loss", "{:.4f}"),
    MetricColumn("train/kl_reference", "KL to reference", "{:.4f}"),
    MetricColumn("train/kl_old", "KL", "{:.4f}"),
    MetricColumn("train/entropy", "entropy", "{:.3f}"),
    MetricColumn("train/grad_norm", "gradient norm", "{:.3g}"),
    MetricColumn("turns/mean", "turns", "{:.1f}"),
    MetricColumn("time/tokens_per_s", "tokens/s", "{:,.0f}"),
    MetricColumn("staleness/mean", "staleness", "{:.2f}"),
    MetricColumn("time/share/rollout", "waiting for episodes", "{:.0%}"),
    MetricColumn("time/step_s", "seconds", "{:.1f}"),
)


def columns_of(metrics: Iterable[str]) -> list[MetricColumn]:
    """Choose the columns of a step: fixed ones, and after the success, that in each of several environments.

    >>> [column.title for column in columns_of(["reward/mean", "env/maze/success", "success/mean"])]
    ['success', 'maze', 'reward']
    """
    names = sorted(metrics)
    found = [column for column in COLUMNS if column.metric in names]
    labels = [name for name in names if name.startswith(ENVIRONMENT_PREFIX) and name.endswith("/success")]
    environments = [MetricColumn(name, name.split("/")[1], "{:.1%}") for name in labels]
    first = sum(column.metric == "success/mean" for column in found)
    return [*found[:first], *environments, *found[first:]]


def _worth_showing(metrics: Mapping[str, float]) -> set[str]:
    """Return the metrics without those that count problems and are 0."""
    return set(metrics) - {column.metric for column in COLUMNS if column.is_trouble and not metrics.get(column.metric)}


def with_share(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Return a step's metrics with the share of its groups in which some episodes did better than others."""
    share = share_that_differs(metrics)
    return metrics if share is None else {**metrics, "groups/differ": share}


def step_words(step: int, steps: int, metrics: Mapping[str, float | None]) -> str:
    """Describe a training step in one line; a number that a metrics file has as null was not finite.

    >>> step_words(3, 60, {"success/mean": 0.25, "reward/mean": 0.25, "time/tokens_per_s": 1234.0})
    'step 3/60  success 25.0%  reward 0.250  tokens/s 1,234'
    """
    shown = with_share({name: math.nan if value is None else value for name, value in metrics.items()})
    parts = [f"{c.title} {c.format.format(shown[c.metric])}" for c in columns_of(_worth_showing(shown))]
    return "  ".join([f"step {step}/{steps}", *parts])


def status_words(status: RunStatus, tokens_per_s: float = 0.0) -> str:
    """Describe the status of a run in one line.

    >>> status_words(RunStatus(step=3, steps=60, episodes_running=16, episodes_done=2), 1234.5)
    'prepare, step 3/60, 16 episodes running, 2 done, 1,234 tokens/s'
    """
    parts = [status.phase.value]
    if status.steps:
        parts.append(f"step {status.step}/{status.steps}")
    if status.episodes_running:
        parts.append(f"{status.episodes_running} episodes running, {status.episodes_done} done")
    if tokens_per_s:
        parts.append(f"{tokens_per_s:,.0f} tokens/s")
    if status.attempts_failed:
        parts.append(failed_words(status))
    return ", ".join(parts)


def failed_words(status: RunStatus) -> str:
    """Describe the failed attempts of a run.

    >>> failed_words(RunStatus(attempts_failed=3, latest_failure="the program ended with 1"))
    '3 failed attempts, the latest: the program ended with 1'
    """
    counted = "1 failed attempt" if status.attempts_failed == 1 else f"{status.attempts_failed} failed attempts"
    return f"{counted}, the latest: {status.latest_failure}"


class LineWatcher(RunWatcher):
    """Watcher that prints plain lines, for logs; `heartbeat` prints the status if there is no other output."""

    def __init__(self) -> None:
        self._status = RunStatus()
        self._speed = Speed()
        self.heartbeat = Heartbeat(lambda: status_words(self._status, self._speed.at(self._status.sampled_tokens)))

    def on_start(self, folder: Path, status: RunStatus) -> None:
        """Print the run's folder."""
        self._status, self._speed = status, Speed()
        self._say(f"run {shown_path(folder)}")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one line; only for some of the many short steps of a warm start."""
        self._speed.at(self._status.sampled_tokens)
        every = max(1, self._status.steps // 20) if "sft/loss" in metrics else 1
        if step % every == 0 or step == self._status.steps:
            self._say(step_words(step, self._status.steps, metrics))

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Print the checkpoint's folder."""
        self._say(f"saved {shown_path(folder)}")

    def on_message(self, text: str) -> None:
        """Print the message."""
        self._say(text)

    def _say(self, text: str) -> None:
        note(text)
        self.heartbeat.reset()


class LiveWatcher(RunWatcher):
    """Watcher that shows a panel, redrawn a few times per second."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._status = RunStatus()
        self._speed = Speed()
        self._folder = Path()
        self._recent: list[tuple[int, Mapping[str, float]]] = []

    def on_start(self, folder: Path, status: RunStatus) -> None:
        """Keep the status, which is updated in place; a second run starts with an empty table."""
        self._folder, self._status, self._speed, self._recent = folder, status, Speed(), []
        self._live.update(self)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a row to the table."""
        self._recent = [*self._recent[-(RECENT - 1) :], (step, with_share(metrics))]

    def on_message(self, text: str) -> None:
        """Print the message above the panel."""
        self._live.console.print(Text(text))

    def __rich__(self) -> Group:
        """Return the current panel."""
        status = self._status
        head = Text(f"{self._folder}  {status.phase.value}  step {status.step}/{status.steps}", style="bold")
        episodes = Text(f"{status.episodes_running} episodes running, {status.episodes_done} done for the next step")
        if speed := self._speed.at(status.sampled_tokens):
            episodes.append(f", {speed:,.0f} tokens/s")
        if status.attempts_failed:
            episodes.append(f"\n{failed_words(status)}", style="yellow")
        bar = Table.grid()
        bar.add_row(ProgressBar(total=max(1, status.steps), completed=status.step, width=60))
        return Group(head, bar, episodes, self._table())

    def _table(self) -> Table:
        columns = columns_of({name for _, metrics in self._recent for name in _worth_showing(metrics)})
        table = Table("step", *(column.title for column in columns), box=None)
        for step, metrics in self._recent:
            cells = (c.format.format(metrics[c.metric]) if c.metric in metrics else "" for c in columns)
            table.add_row(str(step), *cells)
        return table


@contextmanager
def watching() -> Iterator[RunWatcher]:
    """Yield a watcher for standard error: a panel in terminals and notebooks that support it, otherwise plain lines."""
    if not (err.is_terminal or (err.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)):
        lines = LineWatcher()
        with lines.heartbeat.beating():
            yield lines
        return
    with Live(console=err, refresh_per_second=4) as live:
        yield LiveWatcher(live)


LINES = 10
"""Number of lines that a fast evaluation prints without a terminal; a slow one also prints status lines."""


@dataclass(slots=True)
class EpisodeCounter:
    """Counter of episodes, which updates the display when one ends."""

    total: int
    playing: Callable[[], RolloutProgress] = RolloutProgress
    """Returns the current progress."""
    done: int = 0
    failed: int = 0
    successes: SuccessCounts = field(default_factory=SuccessCounts, repr=False)
    rewards: list[float] = field(default_factory=list, repr=False)
    bar: Progress | None = field(default=None, repr=False)
    on_line: Callable[[], None] = field(default=lambda: None, repr=False)
    """Called after a line is printed."""
    _speed: Speed = field(default_factory=Speed, repr=False)

    def add(self, trajectory: Trajectory) -> None:
        """Count an episode that ended."""
        self.done += 1
        infrastructure = trajectory.outcome is not None and trajectory.outcome.is_infrastructure
        self.failed += infrastructure
        if not infrastructure:
            self.successes.count_success(trajectory)
        if not infrastructure and trajectory.reward is not None:
            self.rewards.append(trajectory.reward)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done)
        elif self.done == self.total or self.done % max(1, self.total // LINES) == 0:
            note(self.line())
            self.on_line()

    def line(self) -> str:
        """Describe the progress in one line."""
        return ", ".join(filter(None, (f"{self.done}/{self.total} episodes", self.words())))

    def words(self) -> str:
        """Describe the results so far, and the running episodes."""
        parts = []
        if judged := self.successes.judged:
            parts.append(f"success {self.successes.solved / judged:.1%}")
        elif self.rewards:
            parts.append(f"reward {sum(self.rewards) / len(self.rewards):.3f}")
        if self.failed:
            parts.append(f"{self.failed} failed")
        playing = self.playing()
        if playing.episodes:
            parts.append(f"{playing.episodes} running")
        if playing.turns:
            parts.append(f"{playing.turns:,} turns")
        if speed := self._speed.at(playing.tokens):
            parts.append(f"{speed:,.0f} tokens/s")
        return ", ".join(parts)


class _DescriptionColumn(ProgressColumn):
    """Progress column with the counter's description."""

    def __init__(self, counter: EpisodeCounter) -> None:
        super().__init__()
        self._counter = counter

    def render(self, task: Task) -> Text:
        return Text(self._counter.words())


@contextmanager
def counting(total: int, playing: Callable[[], RolloutProgress] = RolloutProgress) -> Iterator[EpisodeCounter]:
    """Show progress over `total` episodes on standard error.

    `playing` returns the current progress; it is called in a separate thread.
    """
    counter = EpisodeCounter(total, playing)
    if not err.is_terminal:
        heartbeat = Heartbeat(counter.line)
        counter.on_line = heartbeat.reset
        with heartbeat.beating():
            yield counter
        return
    columns = (_DescriptionColumn(counter), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        bar.add_task("episodes", total=total)
        counter.bar = bar
        yield counter


def open_with_progress(store: Path) -> TrajectoryIndex:
    """Open the index of stored episodes, and show on standard error how much of a large store is read for it."""
    with Progress("reading {task.description}", BarColumn(), TimeRemainingColumn(), console=err, transient=True) as bar:
        shown = bar.add_task(str(store), visible=False)

        def show(done: int, size: int) -> None:
            bar.update(shown, completed=done, total=size, visible=done < size)

        return TrajectoryIndex(store, on_progress=show)
