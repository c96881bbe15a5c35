"""`agentrl view`: show the episodes of a run or an evaluation token by token, as a page or in the terminal."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.help import examples
from agentrl.cli.reports import decoder
from agentrl.cli.token_text import episode_text
from agentrl.config.config import SCRATCH
from agentrl.errors import UsageError
from agentrl.evaluation.session import EPISODES_FILE, FOLDER, RESULT_FILE
from agentrl.evaluation.token_view import (
    Decode,
    has_tokens,
    page_html,
)
from agentrl.observe.console import note, out
from agentrl.observe.files import writing
from agentrl.observe.model_folder import MODEL, find_model
from agentrl.observe.run_folder import find_run
from agentrl.observe.terminal import open_with_progress
from agentrl.observe.trajectory_index import EpisodeFilter, TrajectoryIndex
from agentrl.observe.trajectory_store import step_files
from agentrl.training.stored_episodes import model_of_run
from agentrl.trajectory import Trajectory

app = typer.Typer()

EPISODES_PAGE = "episodes.html"


@app.command(
    epilog=examples(
        "agentrl view",
        "agentrl view runs/latest --step 40 --failed --count 20 --output failed.html",
        "agentrl view runs/latest --terminal --count 1",
        "agentrl view runs/evaluations",
        "agentrl view runs/latest/evaluations/engine-4f0c2a9d1b3e",
    )
)
def view(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of a run or an evaluation; in a folder of evaluations, the newest one. Default: the newest"
            " run or evaluation in runs."
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Only episodes of this training step; default: the latest ones.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only episodes of the task with this id.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only episodes that did not solve their task.")] = False,
    count: Annotated[int, typer.Option(min=1, help="Maximum number of episodes.")] = 10,
    terminal: Annotated[bool, typer.Option("--terminal", help="Print the episodes instead of writing a page.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="File of the page; default: episodes.html in the folder."),
    ] = None,
) -> None:
    """Show episodes token by token: the source of each token, its probability, and the weights that sampled it.

    Episodes without tokens, from scripted policies and text services, are shown as text.
    """
    folder = _newest_of_all() if run is None else _newest_evaluation(run) or run
    where = EpisodeFilter(
        task_id=task, success=False if failed else None, first_step=step, last_step=step, has_sequences=True
    )
    with _open_index(folder) as index:
        rows = [] if step is not None and _is_evaluation(folder) else index.select(where, descending=True, limit=count)
        if not rows:
            raise _no_match_error(folder, index, where)
        found = [stored.trajectory for stored in map(index.read, reversed(rows))]
        if index.damaged:
            note(f"{index.damaged} damaged records of {folder} are skipped")
    decode = _decoder_of(folder, found)
    if terminal:
        for trajectory in found:
            out.print(episode_text(trajectory, decode, labelled=not out.is_terminal or out.no_color))
        return
    target = output or folder / EPISODES_PAGE
    page = page_html(f"Episodes of {folder.resolve().name}", found, decode)
    if target.is_dir():
        target /= EPISODES_PAGE
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
    note(f"wrote {len(found)} episodes to {target}: open it in a browser")


def _decoder_of(folder: Path, found: list[Trajectory]) -> Decode:
    """Return the decoder of token ids, or `str` if the episodes hold only text."""
    if any(map(has_tokens, found)):
        return decoder(_model_of(folder))
    if not any(trajectory.transcript for trajectory in found):
        raise UsageError(
            f"the episodes in {folder} have neither tokens nor text",
            hint="delete the folder and evaluate again: an earlier version did not store texts of such policies",
        )
    return str


def _open_index(folder: Path) -> TrajectoryIndex:
    """Open the index of an evaluation, or of the run that contains the folder."""
    if _is_evaluation(folder):
        return open_with_progress(folder / EPISODES_FILE)
    run = find_run(folder)
    if run is None:
        others = "no config.yaml and no episodes.jsonl"
        raise UsageError(
            f"{folder} is neither a run nor an evaluation",
            got=others if folder.is_dir() else "no such folder",
            expected="a folder such as runs/latest or runs/evaluations",
            hint="show the newest: agentrl view",
        )
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


def _model_of(folder: Path) -> str:
    """Find the model whose tokenizer wrote the episodes."""
    if _is_evaluation(folder) and (folder / RESULT_FILE).is_file():
        model = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))["model"]
        return str(folder / MODEL) if model == SCRATCH else find_model(model)
    run = find_run(folder)
    if run is None:
        raise UsageError(
            f"evaluation {folder} is not finished and does not name its model yet",
            hint="the same agentrl eval command resumes it",
        )
    return model_of_run(run)
