"""`agentrl replay`: continue a stored episode from one of its turns, several times."""

from __future__ import annotations

import json
import shlex
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from agentrl.cli.help_pages import examples
from agentrl.cli.reports import decoder
from agentrl.cli.start_folder import READ, OptionsHere, in_start_folder
from agentrl.cli.token_text import segments_text
from agentrl.errors import AgentRLError, UsageError
from agentrl.evaluation.replay import (
    Replay,
    ReplayRequest,
    find_episode,
    make_replay_request,
    newest_episodes,
    replay_episode,
)
from agentrl.evaluation.result import MeanInterval
from agentrl.evaluation.token_view import Decode, Segment, segments
from agentrl.observe.console import note, out
from agentrl.observe.model_folder import find_model
from agentrl.observe.run_folder import RunDirectory, require_run
from agentrl.runs.stop import run_until_stopped
from agentrl.trajectory import Trajectory

app = typer.Typer()

LISTED = 20
"""Number of episodes that are listed without an id."""
LONGEST = 60
"""Maximum number of characters of an answer in the table."""


@app.command(
    epilog=examples(
        "agentrl replay runs/latest",
        "agentrl replay runs/latest 12-task-7/3.0 --turn 2 --show",
        "agentrl replay runs/latest 12-task-7/3.0 --turn 2 --n 8",
        "agentrl replay runs/latest 12-task-7/3.0 --turn 2 --n 32 --temperature 0.7 --model Qwen/Qwen2.5-0.5B-Instruct",
        "agentrl replay runs/latest 12-task-7/3.0 --turn 0 --n 16 --engine vllm --json",
    )
)
def replay(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    episode: Annotated[
        str | None, typer.Argument(help="Id of a stored episode; without it, the newest ones are listed.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the run's config.")
    ] = None,
    turn: Annotated[int, typer.Option(min=0, help="Number of turns to repeat; sampling starts at the next one.")] = 0,
    samples: Annotated[int, typer.Option("--n", min=0, help="Number of continuations; 0 only shows the history.")] = 8,
    show: Annotated[bool, typer.Option("--show", help="Print the history up to the turn.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Model, run or checkpoint; default: the run's newest checkpoint.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="local, vllm or sglang; default: the run's.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature; default: the run's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Continue a stored episode several times from one of its turns, to estimate the value of that state.

    The environment restarts from the task and its seed, and the recorded answers are repeated up to that turn. The
    command fails if a prompt is not the recorded one, token by token. The continuations are stored in the run.
    """
    folder = require_run(run)
    if episode is None:
        _list(folder)
        return
    model = OptionsHere(folder.path).path(model)
    with in_start_folder(folder.path, READ):
        found = find_episode(folder, episode)
        request = make_replay_request(
            folder,
            found,
            turn=turn,
            samples=samples,
            seed=seed,
            model=model,
            engine=engine,
            temperature=temperature,
            overrides=overrides or (),
        )
        if (show and not as_json) or not samples:
            _show_history(request)
        if not samples:
            return
        result = run_until_stopped(replay_episode(request, say=note))
        if as_json:
            typer.echo(json.dumps(result.to_json(), indent=2))
        else:
            _show(result)
        if not result.valid_continuations:
            raise AgentRLError(f"no continuation could be played: {result.continuations[0].error}")


def _list(folder: RunDirectory) -> None:
    """Print the ids of the newest episodes."""
    found = newest_episodes(folder, LISTED)
    if not found:
        raise UsageError(f"run {folder.path} has no episodes")
    table = Table(Column("episode", overflow="fold"), "task", "return", "success", "turns", box=None, pad_edge=False)
    for one in found:
        table.add_row(
            escape(one.id), escape(one.task_id), _number(one.reward), _yes_or_no(one.success), str(len(one.turns))
        )
    out.print(table)
    note(f"continue one: agentrl replay {shlex.quote(str(folder.path))} {shlex.quote(found[0].id)} --turn 1")


def _show_history(request: ReplayRequest) -> None:
    decode = decoder(find_model(request.config.model.path))
    out.print(history_text(request.episode, request.turn, decode, labelled=not out.is_terminal or out.no_color))


def history_text(episode: Trajectory, turn: int, decode: Decode, *, labelled: bool) -> Text:
    """Format the first turns of an episode, and what the model reads after them."""
    text = Text.assemble((episode.task_id, "bold"), f"  {episode.id}, {turn} of {len(episode.turns)} turns\n")
    for sequence in episode.sequences:
        if sequence.turns and sequence.turns[0].index > turn:
            break

        def is_before(segment: Segment) -> bool:
            return segment.turn is None or segment.turn.index < turn

        before = takewhile(is_before, segments(sequence, decode))
        text.append_text(segments_text(before, labelled=labelled))
    return text


def _show(result: Replay) -> None:
    episode = result.episode
    columns = ("", "return", "success", "turns", "ends", "first different answer")
    table = Table(*columns[:-1], Column(columns[-1], overflow="fold"), box=None, pad_edge=False)
    table.add_row(
        "stored",
        _number(episode.reward),
        _yes_or_no(episode.success),
        str(len(episode.turns)),
        str(episode.outcome),
        "",
    )
    for number, one in enumerate(result.continuations):
        difference = result.first_difference(one)
        where = "-" if difference is None else f"turn {difference[0] + 1}: {_short(difference[1])}"
        table.add_row(
            str(number),
            _number(one.reward),
            _yes_or_no(one.success),
            str(len(one.turns)),
            str(one.outcome),
            escape(where),
        )
    out.print(table)
    for name, found in (("success", result.success), ("mean return", result.reward)):
        if found is not None:
            out.print(f"{name} after turn {result.turn}: {_interval(found)}", highlight=False)
    for error in dict.fromkeys(one.error for one in result.continuations if one not in result.valid_continuations):
        out.print(f"failed: {error}", highlight=False, markup=False)
    note(f"wrote the episodes to {result.folder}: agentrl view {shlex.quote(str(result.folder))}")


def _interval(found: MeanInterval) -> str:
    if not found.is_bounded:
        return f"{found.mean:.3f} (no interval: all values are equal)"
    return f"{found.mean:.3f} (95 % interval {found.low:.3f} to {found.high:.3f})"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _yes_or_no(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"
