"""`agentrl export-episodes`: stored episodes as conversations, pairs or data sets for other programs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import orjson
import typer

from agentrl.builders.tools import build_tools
from agentrl.cli.help_pages import examples
from agentrl.config.config import Config
from agentrl.config.derived import per_environment_configs
from agentrl.env.lookup import resolve_environment
from agentrl.errors import AgentRLError, UsageError
from agentrl.evaluation.panel import EPISODES_FILE
from agentrl.evaluation.run_report import config_of
from agentrl.message.data_file import ToolSchema, write_dataset
from agentrl.observe.console import note
from agentrl.observe.files import write_output, writing
from agentrl.observe.run_folder import RunDirectory, require_run
from agentrl.observe.trajectory_index import EpisodeFilter, TrajectoryIndex
from agentrl.observe.trajectory_store import StoredTrajectory
from agentrl.tool import Tool
from agentrl.training.episode_export import ExportedRows, ExportFormat, chat_rows, preference_rows, sft_rows

app = typer.Typer()

FOLDER = "exports"
"""Folder of exports in a run's folder."""


@app.command(
    epilog=examples(
        "agentrl export-episodes runs/latest --to chat",
        "agentrl export-episodes runs/latest --to sft-jsonl --success --output solved.jsonl",
        "agentrl sft --data solved.jsonl --model Qwen/Qwen2.5-0.5B-Instruct",
        "agentrl export-episodes runs/latest --to preferences --from-step 40 --output pairs.jsonl",
        "agentrl export-episodes runs/latest --to hf-dataset --min-reward 0.5 --output my-dataset",
    ),
)
def export_episodes(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    to: Annotated[ExportFormat, typer.Option("--to", help="Format.")],
    output: Annotated[
        Path | None,
        typer.Option(help="File to write, or for hf-dataset a folder; default: in the folder exports of the run."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Only episodes of this training step.")] = None,
    from_step: Annotated[int | None, typer.Option("--from-step", help="Only episodes from this step on.")] = None,
    to_step: Annotated[int | None, typer.Option("--to-step", help="Only episodes up to this step.")] = None,
    success: Annotated[
        bool | None, typer.Option("--success/--failed", help="Only solved episodes, or only the others.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option("--min-reward", help="Minimum reward.")] = None,
    max_reward: Annotated[float | None, typer.Option("--max-reward", help="Maximum reward.")] = None,
    env: Annotated[str | None, typer.Option("--env", help="Only episodes of this environment.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="Only episodes of the task with this id.")] = None,
    task_type: Annotated[str | None, typer.Option("--task-type", help="Only tasks of this type.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="Only episodes with this text in a message.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of episodes: the newest ones.")] = None,
    pairs_per_task: Annotated[
        int, typer.Option("--pairs-per-task", min=1, help="Maximum number of pairs of a task, for preferences.")
    ] = 1,
) -> None:
    """Write stored episodes as conversations, as pairs of better and worse ones, or as a data set.

    chat and hf-dataset keep the reward, the task and the step of each episode. `agentrl sft --data` reads sft-jsonl,
    and `agentrl dpo --from` reads preferences.
    """
    if (run / EPISODES_FILE).is_file():
        raise UsageError(f"{run} is not a run", got="an evaluation, which stores only texts")
    folder = require_run(run)
    if not folder.trajectories.is_dir():
        raise UsageError(f"run {folder.path} has no episodes")
    where = EpisodeFilter(
        is_infrastructure=False,
        first_step=from_step if step is None else step,
        last_step=to_step if step is None else step,
        environment=env,
        task_id=task,
        task_type=task_type,
        success=success,
        least_reward=min_reward,
        most_reward=max_reward,
        text=text,
        has_sequences=True,
    )
    made = _rows(folder, to, where, limit, pairs_per_task)
    for reason, count in made.left_out.most_common():
        note(f"left out: {count} conversations {reason}")
    if not made.rows:
        raise UsageError(f"no episode of {folder.path} to export", expected="matching episodes", hint="remove filters")
    target = output or folder.path / FOLDER / (to.value if to is ExportFormat.DATASET else f"{to.value}.jsonl")
    _write(made, target, to, folder)
    note(f"wrote {len(made.rows)} rows to {target}{_next_step(to, target)}")


def _rows(
    run: RunDirectory, to: ExportFormat, where: EpisodeFilter, limit: int | None, pairs_per_task: int
) -> ExportedRows:
    with TrajectoryIndex(run.trajectories) as index:
        if index.damaged:
            note(f"{index.damaged} damaged records of {run.path} are skipped")
        episodes = _read(index, where, limit)
        if to in (ExportFormat.CHAT, ExportFormat.DATASET):
            return chat_rows(episodes)
        config = config_of(run)
        tools = {} if config is None else tool_schemas(config)
        if to is ExportFormat.SFT:
            return sft_rows(episodes, tools)
        return preference_rows(episodes, tools, per_task=pairs_per_task)


def _read(index: TrajectoryIndex, where: EpisodeFilter, limit: int | None) -> Iterator[StoredTrajectory]:
    """Read the matching episodes in the order in which they ended."""
    for row in reversed(index.select(where, descending=True, limit=limit)):
        yield index.read(row, messages=True)


def tool_schemas(config: Config) -> dict[str, ToolSchema]:
    """Return the schemas of a run's tools by name: those of the config, and the environments' own.

    Toolsets, and tools that an environment offers only after its reset, are unknown.
    """
    found: dict[str, ToolSchema] = {}
    for part in per_environment_configs(config):
        tools = [tool for tool in build_tools(part.config.agent) if isinstance(tool, Tool)]
        if part.config.environment is not None:
            tools += _environment_tools(part.config)
        found |= {tool.name: tool.schema for tool in tools}
    return found


def _environment_tools(config: Config) -> list[Tool]:
    """Return the tools that a new environment has; none if it cannot be made here."""
    section = config.sole_environment
    try:
        environment = resolve_environment(section.name).make(**section.options)
        return [tool for tool in getattr(environment, "tools", None) or () if isinstance(tool, Tool)]
    except AgentRLError:
        return []
    except Exception as error:  # raised by the user's environment
        note(f"the tools of {section.name} are unknown: {type(error).__name__}: {error}")
        return []


def _write(made: ExportedRows, target: Path, to: ExportFormat, run: RunDirectory) -> None:
    """Write the rows.

    Raises:
        UsageError: the disk is full, or the target cannot be written.
    """
    if to is not ExportFormat.DATASET:
        write_output(target, b"".join(orjson.dumps(row) + b"\n" for row in made.rows))
        return
    if target.exists():
        raise UsageError(f"{target} already exists", hint="choose another folder, or delete it first")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.partial-", dir=target.parent) as temporary:
            partial = Path(temporary) / target.name
            write_dataset(made.rows, partial / "data" / "train-00000-of-00001.parquet")
            (partial / "README.md").write_text(_dataset_card(made.rows, run), encoding="utf-8")
            partial.rename(target)


def _dataset_card(rows: list[dict[str, object]], run: RunDirectory) -> str:
    """Return the card of a data set: where its files are, and what its columns mean."""
    columns: Mapping[str, str] = {
        "messages": "the conversation, in the format of chat services",
        "id": "id of the episode in the run",
        "environment": "environment",
        "task_id": "id of the task",
        "task_type": "type of the task, if it has one",
        "step": "training step during which the episode ended",
        "reward": "return of the episode",
        "success": "whether the task was solved; null if unknown",
        "outcome": "how the episode ended",
    }
    table = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in columns.items())
    return (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*.parquet\n"
        f"tags: [agentrl, reinforcement-learning]\n---\n# Episodes of {run.path.name}\n\n{len(rows)} conversations of "
        f"an agent, written by `agentrl export-episodes`.\n\n| column | meaning |\n|---|---|\n{table}\n"
    )


def _next_step(to: ExportFormat, target: Path) -> str:
    match to:
        case ExportFormat.SFT:
            return f"\ntrain on them: agentrl sft --data {target} --model MODEL"
        case ExportFormat.PREFERENCES:
            return f"\ntrain on them: agentrl dpo CONFIG --model MODEL --from {target}"
        case ExportFormat.DATASET:
            return f"\nload them: datasets.load_dataset({str(target)!r})"
        case _:
            return ""
