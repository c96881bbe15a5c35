"""`agentrl rescore`: give stored episodes new rewards, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from agentrl.cli.arguments import Rewards
from agentrl.cli.exits import ExitCode
from agentrl.cli.help_pages import examples
from agentrl.cli.start_folder import READ, OptionsHere, in_start_folder
from agentrl.config import load_config
from agentrl.config.overrides import reward_words
from agentrl.errors import UsageError
from agentrl.evaluation.rescoring import (
    RescoringRequest,
    RescoringSummary,
    environments_played,
    find_scorers,
    find_tasks,
    rescore,
)
from agentrl.observe.console import err, note, out
from agentrl.observe.files import JsonLinesWriter
from agentrl.observe.run_folder import require_run
from agentrl.runs.stop import run_until_stopped

app = typer.Typer()

WITHOUT_OTHERS = ["agent.judge=null", "agent.reward_model=null"]
"""Overrides that make reward functions the only scorer."""


@app.command(
    epilog=examples(
        "agentrl rescore runs/latest --reward my_rewards:exact",
        "agentrl rescore runs/latest --reward my_rewards:exact --reward my_rewards:brief=0.2 --output new.jsonl",
        "agentrl rescore runs/latest --first-step 40",
    )
)
def rescore_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    reward: Rewards = None,
    first_step: Annotated[int, typer.Option(min=0, help="Only episodes that ended in this step or later.")] = 0,
    task: Annotated[str | None, typer.Option(help="Only episodes of the task with this id.")] = None,
    output: Annotated[Path | None, typer.Option(help="New JSON Lines file with the rewards of each episode.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Score the stored episodes of a run again, and compare the rewards. The run does not change, and no engine is
    needed.

    Without --reward, the run's own reward functions are called, which may have changed since. Use it to try a reward
    function before a run: are its rewards finite, do they differ within groups, are successes rewarded more?
    """
    folder = require_run(run)
    if output is not None and output.exists():
        raise UsageError(f"{output} already exists", hint="choose another file, or delete it first")
    given = OptionsHere(folder.path)
    reward, output = given.names(reward), given.output(output)
    with in_start_folder(folder.path, READ):
        config = load_config(folder.config_file, [*reward_words(reward), *(WITHOUT_OTHERS if reward else [])])
        parts = environments_played(config)
        scorers = find_scorers(parts)
        request = RescoringRequest(run=folder, parts=parts, first_step=first_step, task_id=task)
        wanted = request.tasks_by_environment()
        total = sum(tasks.total() for tasks in wanted.values())
        if not total:
            raise UsageError(f"no matching episode in {folder.path}", hint="see agentrl view --help")
        tasks, summary = find_tasks(parts, wanted), RescoringSummary()

        async def score_all() -> None:
            writer = None if output is None else JsonLinesWriter(output)
            with Progress(console=err, transient=True) as bar:
                shown = bar.add_task("episodes", total=total)
                async for episode in rescore(request, tasks, scorers, summary):
                    bar.advance(shown)
                    if writer is not None:
                        writer.append(episode.to_record())
            if writer is not None:
                writer.close()

        run_until_stopped(score_all())
        if summary.without_messages == total:
            raise UsageError(
                "the episodes were stored without messages, which reward functions read",
                got=f"{total} episodes in {folder.path}",
                hint="an earlier version of agentrl wrote them; episodes of new runs have messages",
            )
        if as_json:
            typer.echo(json.dumps(summary.to_json(), indent=2))
        else:
            _show(summary)
        if output is not None:
            note(f"wrote {summary.episodes} episodes to {output}")
        if not summary.n_scored:
            raise typer.Exit(ExitCode.FAILED)


def _show(summary: RescoringSummary) -> None:
    found = summary.to_json()
    table = Table("", "stored", "new", box=None, pad_edge=False)
    table.add_row("mean reward", _number(found["stored_reward"]), _number(found["reward"]))
    differing = (found["groups_that_differ_stored"], found["groups_that_differ"])
    table.add_row("groups whose rewards differ", *(f"{count} of {found['groups']}" for count in differing))
    out.print(table)
    lines = [f"{found['scored']} of {summary.episodes} episodes have a new reward; {found['changed']} rewards changed"]
    if found["correlation"] is not None:
        lines.append(f"correlation of stored and new rewards: {found['correlation']:.3f}")
    if found["reward_of_successes"] is not None and found["reward_of_failures"] is not None:
        lines.append(
            f"new reward of successes {found['reward_of_successes']:.4g}, of failures {found['reward_of_failures']:.4g}"
        )
    if found["abstained"]:
        lines.append(f"{found['abstained']} episodes have no reward, because the function returned None")
    if found["without_messages"]:
        lines.append(f"{found['without_messages']} episodes were stored without messages and are left out")
    lines += [f"{count} episodes failed: {error}" for error, count in summary.errors.most_common(3)]
    for line in lines:
        out.print(line, highlight=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
