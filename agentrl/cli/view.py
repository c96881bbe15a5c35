"""`agentrl view`: show runs and evaluations in a browser, or their episodes as one page or in the terminal."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import threading
import webbrowser
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from yarl import URL

from agentrl.cli.help_pages import examples
from agentrl.cli.server import read_token, token_option
from agentrl.cli.token_text import episode_text
from agentrl.errors import UsageError
from agentrl.evaluation.panel import EPISODES_FILE, FOLDER
from agentrl.evaluation.token_view import (
    Decode,
    has_tokens,
    page_html,
)
from agentrl.observe.console import note, out
from agentrl.observe.files import writing
from agentrl.observe.run_folder import RUN_OR_EVALUATION, require_run
from agentrl.observe.terminal import open_with_progress
from agentrl.observe.trajectory_index import EpisodeFilter, TrajectoryIndex
from agentrl.observe.trajectory_store import step_files
from agentrl.runs.stop import run_with_stop_event
from agentrl.trajectory import Trajectory
from agentrl.viewer.decoding import load_decoder, model_of_evaluation, model_of_run
from agentrl.viewer.security import TOKEN
from agentrl.viewer.server import LOOPBACK, ViewerServer, ViewerSettings

app = typer.Typer()

EPISODES_PAGE = "episodes.html"
TOKEN_VARIABLE = "AGENTRL_VIEW_TOKEN"


@app.command(
    epilog=examples(
        "agentrl view",
        "agentrl view runs/latest --step 40 --failed",
        "agentrl view runs evaluations --port 8800 --no-browser",
        "agentrl view runs/latest --failed --count 20 --output failed.html",
        "agentrl view runs/latest --terminal --count 1",
        "agentrl view runs/latest/evaluations/engine-4f0c2a9d1b3e",
    )
)
def view(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN|EVALUATION|FOLDER]...",
            help="Runs, evaluations, or folders that contain some. Default: the folder runs; with --output or"
            " --terminal, the newest run or evaluation in it.",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Only episodes of this training step; default: the latest ones.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only episodes of the task with this id.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only episodes that did not solve their task.")] = False,
    count: Annotated[int, typer.Option(min=1, help="Maximum number of episodes, with --output or --terminal.")] = 10,
    terminal: Annotated[bool, typer.Option("--terminal", help="Print the episodes instead of serving pages.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the episodes as one page to this file, or into this folder, instead of serving."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free port.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other machines need the token in the printed address.")
    ] = "127.0.0.1",
    token_file: Annotated[Path | None, token_option(TOKEN_VARIABLE)] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address of the pages.")] = False,
) -> None:
    """Show runs and evaluations in a browser, live: curves, episodes turn by turn and token by token, comparisons.

    Runs a local server until Ctrl-C, which only this machine can reach unless --host is set. With --output or
    --terminal, shows the newest episodes token by token: the source of each token, its probability, and the weights
    that sampled it. Episodes without tokens, from scripted policies and chat services, are shown as text.
    """
    where = EpisodeFilter(
        task_id=task, success=False if failed else None, first_step=step, last_step=step, has_sequences=True
    )
    if output is None and not terminal:
        token = read_token(token_file, TOKEN_VARIABLE)
        settings = ViewerSettings(folders=folders or [_runs()], host=host, port=port, token=choose_token(host, token))
        chosen = {"step_from": step, "step_to": step, "task": task, "success": "false" if failed else None}
        filters = {name: str(value) for name, value in chosen.items() if value is not None}
        run_with_stop_event(lambda stop: serve(settings, filters, stop, opens=not no_browser))
        return
    if folders is not None and len(folders) > 1:
        raise UsageError("--output and --terminal show one run", got=f"{len(folders)} folders", expected="one folder")
    show_episodes(folders[0] if folders else None, where, count=count, output=None if terminal else output)


def choose_token(host: str, token: str | None) -> str | None:
    """Return the token that clients must show: a new one if other machines can reach the server and none is given."""
    return token or (None if host in LOOPBACK else secrets.token_urlsafe(24))


def _runs() -> Path:
    """Return the default folder of runs."""
    runs = Path("runs")
    if not runs.is_dir():
        raise UsageError(
            f"no folder {runs} in the current folder",
            expected="the folder of some runs or evaluations",
            hint="name one: agentrl view FOLDER; or play some: agentrl eval --env guess_number --policy expert",
        )
    return runs


async def serve(settings: ViewerSettings, filters: Mapping[str, str], stop: asyncio.Event, *, opens: bool) -> None:
    """Serve the pages, and print their address.

    Args:
        settings: Settings of the server.
        filters: Query of the list of episodes that the address shows, if it is that of one run or evaluation.
        stop: Ends the server once it is set.
        opens: True to open a browser.
    """
    server = ViewerServer(settings)
    try:
        await server.start()
        sole, address = server.library.sole(), URL(server.url)
        if sole is not None:
            address /= f"r/{sole.source.key}"
            address = (address / "episodes").with_query(filters) if filters else address
        if settings.token is not None:
            address = address.update_query({TOKEN: settings.token})
        out.print(str(address), soft_wrap=True)
        note(f"runs and evaluations: {len(server.library.newest_first())}; stop with Ctrl-C")
        if opens:  # in a thread, as text browsers block
            threading.Thread(target=webbrowser.open, args=(str(address),), daemon=True).start()
        await stop.wait()
    finally:
        await server.close()


def show_episodes(run: Path | None, where: EpisodeFilter, *, count: int, output: Path | None) -> None:
    """Write the newest matching episodes as one page, or print them.

    Without `run`, they are those of the newest of all; without `output`, they are printed.

    Raises:
        UsageError: no episode matches, or the page cannot be written.
    """
    folder = _newest_of_all() if run is None else _newest_evaluation(run) or run
    with _open_index(folder) as index:
        is_impossible = where.first_step is not None and _is_evaluation(folder)
        rows = [] if is_impossible else index.select(where, descending=True, limit=count)
        if not rows:
            raise _no_match_error(folder, index, where)
        found = [stored.trajectory for stored in map(index.read, reversed(rows))]
        if index.damaged:
            note(f"{index.damaged} damaged records of {folder} are skipped")
    decode = _decoder_of(folder, found)
    if output is None:
        for trajectory in found:
            out.print(episode_text(trajectory, decode, labelled=not out.is_terminal or out.no_color))
        return
    page = page_html(f"Episodes of {folder.resolve().name}", found, decode)
    target = output / EPISODES_PAGE if output.is_dir() else output
    if target.is_file() and target.suffix not in (".html", ".htm"):
        raise UsageError(f"{target} already exists", hint="choose another file, or delete it first")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
    note(f"wrote {len(found)} episodes to {target}: open it in a browser")


def _decoder_of(folder: Path, found: list[Trajectory]) -> Decode:
    """Return the decoder of token ids, or `str` if the episodes hold only text."""
    if any(map(has_tokens, found)):
        decoder = load_decoder(model_of_evaluation(folder) if _is_evaluation(folder) else _model_of_run(folder))
        return lambda number: decoder.text([number])
    if not any(trajectory.transcript for trajectory in found):
        raise UsageError(
            f"the episodes in {folder} have neither tokens nor text",
            hint="delete the folder and evaluate again: an earlier version did not store the text of such episodes",
        )
    return str


def _open_index(folder: Path) -> TrajectoryIndex:
    """Open the index of an evaluation, or of the run that contains the folder."""
    if _is_evaluation(folder):
        return open_with_progress(folder / EPISODES_FILE)
    run = require_run(folder, RUN_OR_EVALUATION)
    if not run.trajectories.is_dir():
        played = run.path / FOLDER
        hint = f"show its evaluations: agentrl view {shlex.quote(str(played))}" if _newest_evaluation(played) else None
        raise UsageError(f"run {run.path} has no episodes", hint=hint)
    return open_with_progress(run.trajectories)


def _newest_evaluation(folder: Path) -> Path | None:
    """Return the latest evaluation in a folder of evaluations; ``None`` if it has none."""
    files = list(folder.glob(f"*/{EPISODES_FILE}"))
    return max(files, key=_written_at).parent if files else None


def _newest_of_all() -> Path:
    """Return the run or evaluation whose episodes were written last."""
    runs = Path("runs")
    evaluations = [*runs.glob(f"{FOLDER}/*/{EPISODES_FILE}"), *runs.glob(f"*/{FOLDER}/*/{EPISODES_FILE}")]
    files = [*evaluations, *(file for folder in runs.glob("*/trajectories") for file in step_files(folder))]
    if not files:
        raise UsageError(
            f"no episodes found in {runs.resolve()}",
            expected="a run or an evaluation with episodes",
            hint="play some: agentrl eval --env guess_number --policy expert; or name another folder",
        )
    newest = max(files, key=_written_at).parent
    return newest if _is_evaluation(newest) else newest.parent


def _written_at(file: Path) -> int:
    return file.stat().st_mtime_ns


def _is_evaluation(folder: Path) -> bool:
    return (folder / EPISODES_FILE).is_file()


def _no_match_error(folder: Path, index: TrajectoryIndex, where: EpisodeFilter) -> UsageError:
    """Return an error that explains why no episode matches, with the steps that have matching episodes."""
    if not index.count(EpisodeFilter(has_sequences=True)):
        again = "the same agentrl eval command resumes it" if _is_evaluation(folder) else None
        return UsageError(f"no finished episode in {folder}", hint=again)
    step, steps = where.first_step, index.steps(replace(where, first_step=None, last_step=None))
    if step is None or not steps:
        return UsageError(f"no matching episode in {folder}", hint="remove some conditions")
    if _is_evaluation(folder):
        return UsageError("--step needs a training run", got=f"{folder}, an evaluation")
    return UsageError(f"no matching episode of this step in {folder}", got=step, expected=_ranges(steps))


def _ranges(numbers: list[int]) -> str:
    """Format sorted numbers as ranges.

    >>> _ranges([1, 2, 3, 7])
    '1 to 3, 7'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts)


def _model_of_run(folder: Path) -> str:
    return model_of_run(require_run(folder))
