"""Progress of a run or an evaluation for people: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
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

from agentrl.observe.console import err, note
from agentrl.observe.learning import share_that_differs
from agentrl.observe.metrics import ENVIRONMENT_PREFIX
from agentrl.observe.progress import RolloutProgress, RunStatus, RunWatcher
from agentrl.trajectory import Trajectory

QUIET_S = 15.0
"""Seconds without a line after which one is printed."""


class Heartbeat:
    """Prints a line after `quiet_s` seconds without one.

    Args:
        words: Makes the line; called in a thread of its own, so that a busy event loop does not delay it.
        quiet_s: Seconds without a line.
    """

    def __init__(self, words: Callable[[], str], *, quiet_s: float = QUIET_S) -> None:
        self._words = words
        self._quiet_s = quiet_s
        self._began = self._said = time.monotonic()

    def heard(self) -> None:
        """Note that another line was printed just now."""
        self._said = time.monotonic()

    def beat(self, now: float) -> float:
        """Print the line if it is due at `now` (monotonic clock, in seconds); return the seconds until the next."""
        if now - self._said >= self._quiet_s:
            self._said = now
            note(f"{self._words()}, {now - self._began:.0f} s")
        return self._said + self._quiet_s - now

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Watch the clock inside the block."""
        with repeating("heartbeat", lambda: self.beat(time.monotonic())):
            yield


@contextmanager
def repeating(name: str, work: Callable[[], float]) -> Iterator[None]:
    """Call `work` again and again while the block runs, at least once, in a thread of its own.

    Args:
        name: Of the thread.
        work: Returns the seconds until the next call.
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
"""Seconds over which speed is measured; more where it is asked for less often."""


class Speed:
    """Units per second, of a total that grows, over the last seconds.

    Args:
        now: Monotonic clock, in seconds; the present when left out.
    """

    def __init__(self, now: float | None = None) -> None:
        self._readings = deque([(time.monotonic() if now is None else now, 0.0)])

    def at(self, total: float, now: float | None = None) -> float:
        """Return the speed as of `now`, when `total` was reached; 0 without a clock's tick.

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
"""Steps that the live panel shows."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A metric that is shown at every step."""

    metric: str
    title: str
    format: str
    is_trouble: bool = False
    """Shown where it is not 0 only."""


COLUMNS = (
    Shown("success/mean", "success", "{:.1%}"),
    Shown("reward/mean", "reward", "{:.3f}"),
    Shown("groups/differ", "groups that differ", "{:.0%}"),
    Shown("curriculum/turns", "horizon", "{:.0f}"),
    Shown("sft/loss", "loss", "{:.3f}"),
    Shown("preferences/loss", "loss", "{:.3f}"),
    Shown("preferences/accuracy", "accuracy", "{:.1%}"),
    Shown("reward_model/loss", "loss", "{:.3f}"),
    Shown("reward_model/accuracy", "accuracy", "{:.1%}"),
    Shown("eval/success", "evaluated", "{:.1%}"),
    Shown("rollout/retries", "retries", "{:.0f}", is_trouble=True),
    Shown("rollout/groups_failed", "failed groups", "{:.0f}", is_trouble=True),
    Shown("train/loss", "loss", "{:.4f}"),
    Shown("train/kl_reference", "KL to reference", "{:.4f}"),
    Shown("train/kl_old", "KL", "{:.4f}"),
    Shown("train/entropy", "entropy", "{:.3f}"),
    Shown("train/grad_norm", "gradient norm", "{:.3g}"),
    Shown("turns/mean", "turns", "{:.1f}"),
    Shown("time/tokens_per_s", "tokens/s", "{:,.0f}"),
    Shown("staleness/mean", "staleness", "{:.2f}"),
    Shown("time/share/rollout", "waiting for episodes", "{:.0%}"),
    Shown("time/step_s", "seconds", "{:.1f}"),
)


def columns_of(metrics: Iterable[str]) -> list[Shown]:
    """Choose the columns of a step: the fixed ones, and the success in each of several environments after the first.

    >>> [column.title for column in columns_of(["reward/mean", "env/maze/success", "success/mean"])]
    ['success', 'maze', 'reward']
    """
    names = sorted(metrics)
    found = [column for column in COLUMNS if column.metric in names]
    labels = [name for name in names if name.startswith(ENVIRONMENT_PREFIX) and name.endswith("/success")]
    environments = [Shown(name, name.split("/")[1], "{:.1%}") for name in labels]
    first = sum(column.metric == "success/mean" for column in found)
    return [*found[:first], *environments, *found[first:]]


def _worth_showing(metrics: Mapping[str, float]) -> set[str]:
    """Return all metrics but those of troubles that did not occur."""
    return set(metrics) - {column.metric for column in COLUMNS if column.is_trouble and not metrics.get(column.metric)}


def with_share(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Return a step's metrics, and the share of its groups in which some episodes did better than others."""
    share = share_that_differs(metrics)
    return metrics if share is None else {**metrics, "groups/differ": share}


def step_words(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """Return one training step on one line.

    >>> step_words(3, 60, {"success/mean": 0.25, "reward/mean": 0.25, "time/tokens_per_s": 1234.0})
    'step 3/60  success 25.0%  reward 0.250  tokens/s 1,234'
    """
    metrics = with_share(metrics)
    parts = [f"{c.title} {c.format.format(metrics[c.metric])}" for c in columns_of(_worth_showing(metrics))]
    return "  ".join([f"step {step}/{steps}", *parts])


def status_words(status: RunStatus, tokens_per_s: float = 0.0) -> str:
    """Describe on one line what a run is doing.

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
    """Plain lines, for logs; between them `heartbeat` reports what the run is doing."""

    def __init__(self) -> None:
        self._status = RunStatus()
        self._speed = Speed()
        self.heartbeat = Heartbeat(lambda: status_words(self._status, self._speed.at(self._status.sampled_tokens)))

    def on_start(self, folder: Path, status: RunStatus) -> None:
        """Say where the run lies."""
        self._status, self._speed = status, Speed()
        self._say(f"run {folder}")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line; of the many short steps of a warm start only some."""
        self._speed.at(self._status.sampled_tokens)
        every = max(1, self._status.steps // 20) if "sft/loss" in metrics else 1
        if step % every == 0 or step == self._status.steps:
            self._say(step_words(step, self._status.steps, metrics))

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Say where it is."""
        self._say(f"saved {folder}")

    def on_message(self, text: str) -> None:
        """Pass it on."""
        self._say(text)

    def _say(self, text: str) -> None:
        note(text)
        self.heartbeat.heard()


class LiveWatcher(RunWatcher):
    """A panel that is drawn again a few times per second.

    Args:
        live: Where it is drawn.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._status = RunStatus()
        self._speed = Speed()
        self._folder = Path()
        self._recent: list[tuple[int, Mapping[str, float]]] = []

    def on_start(self, folder: Path, status: RunStatus) -> None:
        """Keep the status, which changes from now on; a second run begins with an empty table."""
        self._folder, self._status, self._speed, self._recent = folder, status, Speed(), []
        self._live.update(self)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a row."""
        self._recent = [*self._recent[-(RECENT - 1) :], (step, with_share(metrics))]

    def on_message(self, text: str) -> None:
        """Print it above the panel."""
        self._live.console.print(Text(text))

    def __rich__(self) -> Group:
        """The panel as it is now."""
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
    """A watcher that suits where standard error goes: a panel in terminals and notebooks that can draw one."""
    if not (err.is_terminal or (err.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)):
        lines = LineWatcher()
        with lines.heartbeat.beating():
            yield lines
        return
    with Live(console=err, refresh_per_second=4) as live:
        yield LiveWatcher(live)


LINES = 10
"""Lines that a quick evaluation prints where there is no terminal; a slow one says now and then how far it is."""


@dataclass(slots=True)
class EpisodeCounter:
    """Counter of episodes, which shows each one as it ends."""

    total: int
    playing: Callable[[], RolloutProgress] = RolloutProgress
    """Gives what goes on at the moment."""
    done: int = 0
    failed: int = 0
    judged: int = 0
    """Episodes with a known success."""
    solved: int = 0
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
        if not infrastructure and trajectory.success is not None:
            self.judged += 1
            self.solved += trajectory.success
        if not infrastructure and trajectory.reward is not None:
            self.rewards.append(trajectory.reward)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done)
        elif self.done == self.total or self.done % max(1, self.total // LINES) == 0:
            note(self.line())
            self.on_line()

    def line(self) -> str:
        """Describe the progress on one line."""
        return ", ".join(filter(None, (f"{self.done}/{self.total} episodes", self.words())))

    def words(self) -> str:
        """Describe the results so far, and what goes on."""
        said = []
        if self.judged:
            said.append(f"success {self.solved / self.judged:.1%}")
        elif self.rewards:
            said.append(f"reward {sum(self.rewards) / len(self.rewards):.3f}")
        if self.failed:
            said.append(f"{self.failed} failed")
        playing = self.playing()
        if playing.episodes:
            said.append(f"{playing.episodes} running")
        if playing.turns:
            said.append(f"{playing.turns:,} turns")
        if speed := self._speed.at(playing.tokens):
            said.append(f"{speed:,.0f} tokens/s")
        return ", ".join(said)


class _Words(ProgressColumn):
    """What a counter says, each time that the bar is drawn."""

    def __init__(self, counter: EpisodeCounter) -> None:
        super().__init__()
        self._counter = counter

    def render(self, task: Task) -> Text:
        return Text(self._counter.words())


@contextmanager
def counting(total: int, playing: Callable[[], RolloutProgress] = RolloutProgress) -> Iterator[EpisodeCounter]:
    """Show progress over `total` episodes on standard error.

    Args:
        total: Episodes that will end.
        playing: Gives what goes on at the moment; called in a thread of its own.
    """
    counter = EpisodeCounter(total, playing)
    if not err.is_terminal:
        heartbeat = Heartbeat(counter.line)
        counter.on_line = heartbeat.heard
        with heartbeat.beating():
            yield counter
        return
    columns = (_Words(counter), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        bar.add_task("episodes", total=total)
        counter.bar = bar
        yield counter
