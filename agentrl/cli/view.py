"""`agentrl view`: a run's episodes, token by token, as a page or in the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from agentrl.assembly.models import SCRATCH
from agentrl.cli.help import examples
from agentrl.cli.reports import decoder
from agentrl.config import load_config
from agentrl.errors import UsageError
from agentrl.evaluation.episode import read_episodes
from agentrl.evaluation.session import EPISODES_FILE
from agentrl.evaluation.token_view import Decode, page_html, segments
from agentrl.observe.console import note, out
from agentrl.observe.model_folder import MODEL, find_model
from agentrl.observe.run_directory import RunDirectory
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.trajectory import Source, Trajectory

app = typer.Typer()

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
    found = [
        trajectory
        for trajectory in _trajectories(run, step)
        if (task is None or trajectory.task_id == task) and not (failed and trajectory.success)
    ][-count:]
    if not found:
        raise UsageError(f"no episode in {run} fits", hint="ask for fewer conditions")
    decode = decoder(_model_of(run))
    if terminal:
        for trajectory in found:
            out.print(episode_text(trajectory, decode))
        return
    target = output or run / "episodes.html"
    target.write_text(page_html(f"Episodes of {run.resolve().name}", found, decode), encoding="utf-8")
    note(f"wrote {len(found)} episodes to {target}: open it in a browser")


def episode_text(trajectory: Trajectory, decode: Decode) -> Text:
    """One episode for the terminal, coloured by source."""
    text = Text.assemble(
        (f"{trajectory.task_id}", "bold"),
        f"  {trajectory.outcome or 'unfinished'}, reward {trajectory.reward}, {len(trajectory.turns)} turns\n",
    )
    for sequence in trajectory.sequences:
        for segment in segments(sequence, decode):
            for cell in segment.cells:
                shown = (
                    cell.text if cell.image is None else f"[image]\n{cell.image.alternative}\n".replace("\n\n", "\n")
                )
                text.append(shown.replace("↵", ""), STYLES[segment.source])
        text.append("\n")
    return text


def _trajectories(folder: Path, step: int | None) -> Iterator[Trajectory]:
    if (folder / EPISODES_FILE).is_file():
        return (episode.trajectory for episode in read_episodes(folder / EPISODES_FILE))
    run = RunDirectory.open(folder)
    if not run.trajectories.is_dir():
        raise UsageError(f"run {folder} has no episodes yet")
    stored = read_trajectories(run.trajectories)
    wanted = (found for found in stored if step is None or found.step == step)
    return (found.trajectory for found in wanted if found.trajectory.sequences)


def _model_of(folder: Path) -> str:
    """Where the tokenizer is: in the run, which for an evaluation is two folders up."""
    candidates = itertools.chain([folder], folder.resolve().parents[:2])
    run = next((path for path in candidates if (path / "config.yaml").is_file()), None)
    if run is None:
        raise UsageError(f"{folder} does not lie in a run", hint="evaluations of other models have a report instead")
    try:
        return find_model(str(run))
    except UsageError:  # no whole checkpoint; the model that the run started from has the same tokenizer
        start = load_config(run / "config.yaml").model.path
        if start == SCRATCH and not (run / MODEL).is_dir():
            raise
        return str(run / MODEL) if start == SCRATCH else find_model(start)
