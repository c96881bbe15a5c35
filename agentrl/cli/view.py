"""`agentrl view`: a run's episodes, token by token, as a page or in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from agentrl.builders.models import SCRATCH
from agentrl.cli.help import examples
from agentrl.cli.reports import decoder
from agentrl.config import load_config
from agentrl.errors import UsageError
from agentrl.evaluation.panel import read_episodes
from agentrl.evaluation.session import EPISODES_FILE, RESULT_FILE
from agentrl.evaluation.token_view import Decode, page_html, segments
from agentrl.observe.console import note, out
from agentrl.observe.model_folder import MODEL, find_model
from agentrl.observe.run_folder import RunDirectory, find_run
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.trajectory import SOLE_ROLE, Source, Trajectory

app = typer.Typer()

EPISODES_PAGE = "episodes.html"

STYLES = {
    Source.PROMPT: "",
    Source.TEMPLATE: "dim",
    Source.OBSERVATION: "blue",
    Source.SAMPLED: "bold green",
    Source.FORCED: "yellow",
    Source.MISTAKE: "red",
}


@app.command(
    epilog=examples(
        "agentrl view runs/latest",
        "agentrl view runs/latest --step 40 --failed --count 20 --output failed.html",
        "agentrl view runs/latest --terminal --count 1",
        "agentrl view runs/latest/evaluations/engine-4f0c2a9d1b3e",
    )
)
def view(
    run: Annotated[Path, typer.Argument(help="A run's folder, or an evaluation's folder.")] = Path("runs/latest"),
    step: Annotated[int | None, typer.Option(help="Only episodes of this training step; else the latest ones.")] = None,
    task: Annotated[str | None, typer.Option(help="Only episodes of this task id.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only episodes that did not solve their task.")] = False,
    count: Annotated[int, typer.Option(min=1, help="How many episodes.")] = 10,
    terminal: Annotated[bool, typer.Option("--terminal", help="Print them instead of writing a page.")] = False,
    output: Annotated[Path | None, typer.Option(help="The page; episodes.html in the folder when left out.")] = None,
) -> None:
    """See episodes token by token: where each token came from, how likely it was, which weights sampled it."""
    stored = [
        episode
        for episode in _episodes(run)
        if (task is None or episode.trajectory.task_id == task) and not (failed and episode.trajectory.success)
    ]
    found = [episode.trajectory for episode in stored if step is None or episode.step == step][-count:]
    if not found:
        raise _nothing_fits(run, step, [episode.step for episode in stored])
    decode = decoder(_model_of(run))
    if terminal:
        for trajectory in found:
            out.print(episode_text(trajectory, decode))
        return
    target = output or run / EPISODES_PAGE
    target.write_text(page_html(f"Episodes of {run.resolve().name}", found, decode), encoding="utf-8")
    note(f"wrote {len(found)} episodes to {target}: open it in a browser")


def episode_text(trajectory: Trajectory, decode: Decode) -> Text:
    """One episode for the terminal, coloured by source."""
    text = Text.assemble(
        (f"{trajectory.task_id}", "bold"),
        f"  {trajectory.outcome or 'unfinished'}, reward {trajectory.reward}, {len(trajectory.turns)} turns\n",
    )
    has_roles = any(turn.role != SOLE_ROLE for turn in trajectory.turns)
    for sequence in trajectory.sequences:
        if has_roles:
            speakers = ", ".join(dict.fromkeys(turn.role for turn in sequence.turns))
            text.append(f"{speakers}{'' if len(sequence) else ': in text, without tokens'}\n", "bold")
        for segment in segments(sequence, decode):
            for cell in segment.cells:
                shown = (
                    cell.text if cell.image is None else f"[image]\n{cell.image.alternative}\n".replace("\n\n", "\n")
                )
                text.append(shown.replace("↵", ""), STYLES[segment.source])
        text.append("\n")
    return text


@dataclass(frozen=True, slots=True)
class _Episode:
    """A stored episode; an evaluation's has no training step."""

    trajectory: Trajectory
    step: int | None


def _episodes(folder: Path) -> Iterator[_Episode]:
    """The episodes of an evaluation's folder, or of the run that a folder is or lies in."""
    if _is_evaluation(folder):
        return (_Episode(episode.trajectory, None) for episode in read_episodes(folder / EPISODES_FILE))
    run = find_run(folder) or RunDirectory.open(folder)
    if not run.trajectories.is_dir():
        raise UsageError(f"run {run.path} has no episodes yet")
    stored = read_trajectories(run.trajectories)
    return (_Episode(found.trajectory, found.step) for found in stored if found.trajectory.sequences)


def _is_evaluation(folder: Path) -> bool:
    return (folder / EPISODES_FILE).is_file()


def _nothing_fits(folder: Path, step: int | None, others: list[int | None]) -> UsageError:
    """Why no episode is shown, and which steps have some that fit otherwise."""
    steps = sorted({number for number in others if number is not None})
    if step is None or not others:
        return UsageError(f"no episode in {folder} fits", hint="ask for fewer conditions")
    if not steps:
        return UsageError("--step chooses episodes of a training run", got=f"{folder}, an evaluation")
    return UsageError(f"no episode in {folder} is of this step", got=step, expected=_ranges(steps))


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers in words.

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
        result = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
        return _model_of_evaluation(folder, result)
    run = find_run(folder)
    if run is None:
        raise UsageError(
            f"evaluation {folder} is not finished, so it does not say which model has played",
            hint="the same agentrl eval command goes on with it",
        )
    try:
        return find_model(str(run.path))
    except UsageError:  # no whole checkpoint; the model that the run started from has the same tokenizer
        start = load_config(run.config_file).model.path
        if start == SCRATCH and not run.model.is_dir():
            raise
        return str(run.model) if start == SCRATCH else find_model(start)


def _model_of_evaluation(folder: Path, result: Mapping[str, Any]) -> str:
    engine = result["settings"].get("engine", {}).get("type")
    if result["model"] is None or engine == "openai":
        who = "a service behind --engine openai" if engine == "openai" else f"--policy {result['policy']}"
        raise UsageError(
            f"the episodes in {folder} have no tokens to view",
            got=who,
            expected="an evaluation of a model with an engine that samples tokens",
        )
    return str(folder / MODEL) if result["model"] == SCRATCH else find_model(result["model"])
