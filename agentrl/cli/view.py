"""`agentrl view`: the episodes of a run or an evaluation, token by token, as a page or in the terminal."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from agentrl.builders.models import SCRATCH
from agentrl.cli.help import examples
from agentrl.cli.reports import decoder
from agentrl.config import load_config
from agentrl.errors import UsageError
from agentrl.evaluation.panel import read_episodes
from agentrl.evaluation.session import EPISODES_FILE, FOLDER, RESULT_FILE
from agentrl.evaluation.token_view import (
    Decode,
    Segment,
    TokenCell,
    conversations,
    has_tokens,
    page_html,
    segments,
    turn_words,
)
from agentrl.observe.console import note, out
from agentrl.observe.files import writing
from agentrl.observe.model_folder import MODEL, find_model
from agentrl.observe.run_folder import find_run
from agentrl.observe.trajectory_store import read_trajectories, step_files
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
            help="A run's folder, or an evaluation's; of a folder of evaluations, the newest. Without one, the newest"
            " run or evaluation in runs."
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Only episodes of this training step; else the latest ones.")] = None,
    task: Annotated[str | None, typer.Option(help="Only episodes of this task id.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only episodes that did not solve their task.")] = False,
    count: Annotated[int, typer.Option(min=1, help="How many episodes.")] = 10,
    terminal: Annotated[bool, typer.Option("--terminal", help="Print them instead of writing a page.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="The page; episodes.html in the folder when left out."),
    ] = None,
) -> None:
    """See episodes token by token: where each token came from, how likely it was, which weights sampled it.

    Episodes without tokens, those of scripted policies and of text services, are shown as text.
    """
    folder = _newest_of_all() if run is None else _newest_evaluation(run) or run
    stored = [
        episode
        for episode in _episodes(folder)
        if (task is None or episode.trajectory.task_id == task) and not (failed and episode.trajectory.success)
    ]
    found = [episode.trajectory for episode in stored if step is None or episode.step == step][-count:]
    if not found:
        raise _nothing_fits(folder, step, [episode.step for episode in stored])
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
    """The texts of token ids, where there are any."""
    if any(map(has_tokens, found)):
        return decoder(_model_of(folder))
    if not any(trajectory.transcript for trajectory in found):
        raise UsageError(
            f"the episodes in {folder} have neither tokens nor text",
            hint="remove the folder and evaluate again: an earlier version kept no text of policies without tokens",
        )
    return str


def episode_text(trajectory: Trajectory, decode: Decode, *, labelled: bool = False) -> Text:
    """One episode for the terminal, coloured by source.

    Args:
        trajectory: The episode.
        decode: Gives the text of a token id.
        labelled: Name the sources, and list the sampled tokens, for where there are no colours.
    """
    text = Text.assemble(
        (f"{trajectory.task_id}", "bold"),
        f"  {trajectory.outcome or 'unfinished'}, reward {trajectory.reward}, {len(trajectory.turns)} turns\n",
        f"{trajectory.error}\n" if trajectory.error else "",
    )
    if not has_tokens(trajectory):
        for speaker, said in itertools.chain(*conversations(trajectory)):
            text.append(f"[{speaker}]\n", "bold").append(f"{said}\n")
        return text.append("\n")
    has_roles = any(turn.role != SOLE_ROLE for turn in trajectory.turns)
    for sequence in trajectory.sequences:
        if has_roles:
            speakers = ", ".join(dict.fromkeys(turn.role for turn in sequence.turns))
            text.append(f"{speakers}{'' if len(sequence) else ': in text, without tokens'}\n", "bold")
        for segment in segments(sequence, decode):
            if labelled:
                text.append_text(_labelled(segment))
                continue
            for cell in segment.cells:
                text.append(_cell_text(cell), STYLES[segment.source])
        text.append("\n")
    return text


def _cell_text(cell: TokenCell) -> str:
    if cell.image is None:
        return cell.text.replace("↵", "")
    return f"[image]\n{cell.image.alternative}\n".replace("\n\n", "\n")


def _labelled(segment: Segment) -> Text:
    """A segment under its source's name; what the policy sampled is also listed, one token a line."""
    turn = f" · {turn_words(segment.turn)}" if segment.turn else ""
    text = Text(f"[{segment.source.name.lower()}{turn}]\n{''.join(map(_cell_text, segment.cells)).rstrip()}\n")
    if segment.source is Source.SAMPLED:
        text.append("".join(f"  {_cell_text(cell)!r}  {cell.hint}\n" for cell in segment.cells))
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
    run = find_run(folder)
    if run is None:
        others = "no config.yaml and no episodes.jsonl"
        raise UsageError(
            f"there is neither a run nor an evaluation in {folder}",
            got=others if folder.is_dir() else "no such folder",
            expected="the folder of one, such as runs/latest or runs/evaluations",
            hint="see the newest: agentrl view",
        )
    if not run.trajectories.is_dir():
        played = run.path / FOLDER
        hint = (
            f"those of its evaluations: agentrl view {shlex.quote(str(played))}" if _newest_evaluation(played) else None
        )
        raise UsageError(f"run {run.path} has no episodes", hint=hint)
    stored = read_trajectories(run.trajectories)
    return (_Episode(found.trajectory, found.step) for found in stored if found.trajectory.sequences)


def _newest_evaluation(folder: Path) -> Path | None:
    """The evaluation in a folder of evaluations that was played last."""
    files = list(folder.glob(f"*/{EPISODES_FILE}"))
    return max(files, key=_written_at).parent if files else None


def _newest_of_all() -> Path:
    """The run or evaluation whose episodes were written last."""
    runs = Path("runs")
    evaluations = [*runs.glob(f"{FOLDER}/*/{EPISODES_FILE}"), *runs.glob(f"*/{FOLDER}/*/{EPISODES_FILE}")]
    files = [*evaluations, *(file for folder in runs.glob("*/trajectories") for file in step_files(folder))]
    if not files:
        raise UsageError(
            f"there are no episodes in {runs.resolve()}",
            expected="a run or an evaluation that has played some",
            hint="play some: agentrl eval --env guess_number --policy expert; or name another folder",
        )
    newest = max(files, key=_written_at).parent
    return newest if _is_evaluation(newest) else newest.parent


def _written_at(file: Path) -> int:
    return file.stat().st_mtime_ns


def _is_evaluation(folder: Path) -> bool:
    return (folder / EPISODES_FILE).is_file()


def _nothing_fits(folder: Path, step: int | None, others: list[int | None]) -> UsageError:
    """Why no episode is shown, and which steps have some that fit otherwise."""
    if not any(True for _ in _episodes(folder)):
        again = "the same agentrl eval command goes on with it" if _is_evaluation(folder) else None
        return UsageError(f"no episode in {folder} is finished", hint=again)
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
        model = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))["model"]
        return str(folder / MODEL) if model == SCRATCH else find_model(model)
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
