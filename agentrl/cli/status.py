"""`agentrl status`: what a run is doing, what waits for what, and whether its process is alive."""

from __future__ import annotations

import json
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentrl.cli.exits import ExitCode
from agentrl.cli.help_pages import examples
from agentrl.errors import UsageError
from agentrl.observe.console import out
from agentrl.observe.progress import LiveStatus
from agentrl.observe.run_folder import LATEST, require_run
from agentrl.observe.run_status import (
    INTERVAL_S,
    STATUS_FILE,
    CurrentWait,
    EpisodeInFlight,
    Liveness,
    RunSnapshot,
    read_status,
)

app = typer.Typer()
RUNS = Path("runs")
OLDEST = 8
"""Number of episodes in flight that are listed."""
STYLES = {Liveness.RUNNING: "green", Liveness.FINISHED: "green", Liveness.STOPPED: "yellow"}


@app.command(
    epilog=examples(
        "agentrl status",
        "agentrl status runs/latest --watch",
        "agentrl status runs/my_run --json",
    )
)
def status(
    run: Annotated[Path | None, typer.Argument(help="Folder of a run. Default: the newest run in runs.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second until the run ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON.")] = False,
) -> None:
    """Show a run's phase and step, what waits for what and for how long, its episodes, engines, memory and time left.

    Reads a file that the run's process writes every second, even while the run hangs. Shows whether the process is
    alive, hung, suspended or gone. The exit code is 1 if the run has hung, failed or crashed.
    """
    folder = _newest_run() if run is None else require_run(run).path
    with _display(folder, as_json=as_json, watch=watch) as show:
        while not (state := show()).is_over and watch:
            time.sleep(INTERVAL_S)
    if state.is_trouble:
        raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _display(folder: Path, *, as_json: bool, watch: bool) -> Iterator[Callable[[], Liveness]]:
    """Yield a function that shows the current status of a run, and returns its state."""

    def show(write: Callable[[RunSnapshot, float], object]) -> Liveness:
        snapshot, now = _read(folder), time.time()
        write(snapshot, now)
        return snapshot.liveness(now)

    if as_json:
        yield lambda: show(lambda snapshot, now: typer.echo(_as_json(folder, snapshot, now, indent=not watch)))
    elif watch:
        with Live(console=out, auto_refresh=False) as live:
            yield lambda: show(lambda snapshot, now: live.update(describe(folder, snapshot, now), refresh=True))
    else:
        yield lambda: show(lambda snapshot, now: out.print(describe(folder, snapshot, now)))


def _as_json(folder: Path, snapshot: RunSnapshot, now: float, *, indent: bool) -> str:
    found = {"run": str(folder), "state": snapshot.liveness(now), "age_s": round(now - snapshot.time, 1)}
    return json.dumps({**found, **asdict(snapshot)}, indent=2 if indent else None)


def _newest_run() -> Path:
    """Return the run that wrote its status last."""
    found = [file.parent for file in RUNS.glob(f"*/{STATUS_FILE}") if file.parent.name != LATEST]
    if not found:
        raise UsageError(
            f"no run with a status in {RUNS.resolve()}",
            expected="a run of this version",
            hint="name its folder: agentrl status RUN",
        )
    return max(found, key=lambda folder: (folder / STATUS_FILE).stat().st_mtime_ns)


def _read(folder: Path) -> RunSnapshot:
    snapshot = read_status(folder)
    if snapshot is None:
        raise UsageError(
            f"{folder} has no status",
            got=f"no readable {STATUS_FILE}",
            expected="a run that this version of agentrl started",
            hint=f"its log: {folder / 'logs' / 'agentrl.log'}",
        )
    return snapshot


def describe(folder: Path, snapshot: RunSnapshot, now: float) -> Group:
    """Format a status for the terminal."""
    state = snapshot.liveness(now)
    at = min(now, snapshot.time) if state in (Liveness.CRASHED, Liveness.FAILED) else now
    style = STYLES.get(state, "red")
    lines = [
        Text.assemble((f"{_state_words(state, snapshot, now)}  ", f"bold {style}"), (str(folder), "bold")),
        Text("  ".join(_progress_words(snapshot))),
    ]
    if snapshot.live is not None:
        lines += [Text(line) for line in _live_lines(snapshot.live)]
    if snapshot.error:
        lines.append(Text(f"error: {snapshot.error}", style="red"))
    if snapshot.latest_failure:
        lines.append(
            Text(f"failed attempts: {snapshot.attempts_failed}, the latest: {snapshot.latest_failure}", style="yellow")
        )
    if snapshot.resumed_by and state in (Liveness.STOPPED, Liveness.FAILED, Liveness.CRASHED):
        lines.append(
            Text(f"resume it with: agentrl {snapshot.resumed_by} --resume {shlex.quote(str(folder))}", style="cyan")
        )
    if state in (Liveness.FINISHED, Liveness.STOPPED):
        return Group(*lines)
    if snapshot.blocked is not None:
        lines.append(
            Text(
                f"the event loop has been blocked for {_seconds(at - snapshot.blocked.since)} by {snapshot.blocked.by}",
                style="yellow",
            )
        )
    tables = [table for table in (_engines(snapshot), _oldest(snapshot, at)) if table is not None]
    return Group(*lines, *_wait_lines(snapshot, at), *(part for table in tables for part in (Text(), table)))


def _state_words(state: Liveness, snapshot: RunSnapshot, now: float) -> str:
    age, pid = _seconds(now - snapshot.time), snapshot.pid
    where = f"process {pid}" if not snapshot.host else f"process {pid} on {snapshot.host}"
    match state:
        case Liveness.RUNNING:
            return f"running ({where})"
        case Liveness.HUNG if snapshot.is_elsewhere:
            return f"NO STATUS for {age}: {where}, which cannot be examined from here, has hung or is gone"
        case Liveness.HUNG:
            return (
                f"HUNG: {where} is alive, but has not written its status for {age}: code never releases the "
                f"interpreter, or a disk does not respond. To see where: py-spy dump --pid {pid}"
            )
        case Liveness.SUSPENDED:
            return f"SUSPENDED: {where} was stopped by a signal {age} ago; to continue it: kill -CONT {pid}"
        case Liveness.CRASHED:
            return f"CRASHED: {where} ended without a reason (killed, or out of memory?); last status {age} ago"
        case _:
            word = "interrupted" if state is Liveness.STOPPED else state
            return f"{word} {_seconds(now - (snapshot.ended or snapshot.time))} ago"


def _progress_words(snapshot: RunSnapshot) -> Iterator[str]:
    yield f"phase {snapshot.phase}"
    yield f"step {snapshot.step}/{snapshot.steps}"
    counts = [f"{count} {state}" for state, count in snapshot.episodes.items() if count]
    if counts:
        yield f"episodes: {', '.join(counts)} ({snapshot.episodes_done} done for the next step)"
    if snapshot.seconds_left is not None and snapshot.end is None:
        yield f"about {_seconds(snapshot.seconds_left)} left"
    if snapshot.memory_bytes is not None:
        yield f"{snapshot.memory_bytes / 2**30:.1f} GiB of memory"


def _live_lines(live: LiveStatus) -> Iterator[str]:
    """Describe live traffic."""
    yield f"live traffic at {live.url}: {live.open} open sessions, {live.waiting} of {live.batch} rewarded for a step"
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in live.counts.items() if count)
    if counts:
        yield f"  since its start: {counts}"


def _wait_lines(snapshot: RunSnapshot, now: float) -> Iterator[Text]:
    """Describe the waits by kind, the one with most episodes first, like a stall report."""
    rows: defaultdict[tuple[str, str], list[CurrentWait]] = defaultdict(list)
    for wait in snapshot.waits:
        rows[wait.kind, wait.what].append(wait)
    if rows:
        yield Text(f"\n{snapshot.waiting} waiting:")
    for (kind, what), same in sorted(rows.items(), key=lambda row: -len(row[1])):
        oldest = same[0]
        left = None if oldest.deadline is None else oldest.deadline - now
        limit = "no deadline" if left is None else f"deadline in {_seconds(left)}" if left > 0 else "deadline is over"
        yield Text(
            f"  {len(same):5d}  {kind:<12} {what}; longest {_seconds(now - oldest.since)} ({limit}): {oldest.owner}; "
            f"unblocked by {oldest.unblocks}"
        )


def _engines(snapshot: RunSnapshot) -> Table | None:
    if not snapshot.engines:
        return None
    table = Table("engine", "running", "queue", "tokens/s", box=None, pad_edge=False)
    for engine in snapshot.engines:
        speed = "-" if engine.tokens_per_s is None else f"{engine.tokens_per_s:,.0f}"
        table.add_row(engine.name, str(engine.running), str(engine.queue), speed)
    return table


def _oldest(snapshot: RunSnapshot, now: float) -> Table | None:
    if not snapshot.in_flight:
        return None
    table = Table("episode in flight", "state", "for", "turns", "last message", box=None, pad_edge=False)
    for one in sorted(snapshot.in_flight, key=lambda one: one.since)[:OLDEST]:
        table.add_row(one.id, one.state, _seconds(now - one.since), str(one.n_turns), _last_line(one))
    return table


def _last_line(one: EpisodeInFlight) -> str:
    if not one.turns:
        return ""
    words = " ".join(one.turns[-1].text.split())
    return f"{one.turns[-1].role}: {words[:60]}{'…' if len(words) > 60 else ''}"


def _seconds(seconds: float) -> str:
    """Format a duration.

    >>> _seconds(7.4), _seconds(200), _seconds(7300)
    ('7 s', '3 min 20 s', '2 h 1 min')
    """
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
