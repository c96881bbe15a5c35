"""`agentrl plan`: estimate the memory of a run per rank, and check that it fits; or simulate staleness limits."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from agentrl.builders.checks import check_training
from agentrl.builders.models import resolve_model
from agentrl.cli.arguments import EnvName, ModelName, Words, read_config
from agentrl.cli.help_pages import examples
from agentrl.config import Config, shipped_configs
from agentrl.config.estimate import shown_bytes
from agentrl.config.overrides import option_words
from agentrl.config.step_settings import at_largest
from agentrl.errors import ConfigError, UsageError
from agentrl.models.load import accelerators
from agentrl.models.memory import memory_limit
from agentrl.observe.console import note, out
from agentrl.observe.run_folder import RunDirectory
from agentrl.runs.simulate import SETTINGS, MeasuredRun, read_measured_run
from agentrl.training.diagnostics.memory_plan import MemoryPlan, remedies
from agentrl.training.diagnostics.memory_plan import plan as memory_plan

app = typer.Typer()

LEAST = 1000
"""Smallest number that counts as bytes without a unit; a smaller one probably lacks a unit such as GB."""
UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@app.command(
    epilog=examples(
        "agentrl plan quickstart",
        "agentrl plan configs/my_run.yaml trainer.processes=8 --memory 80GiB",
        "agentrl plan --env household --model Qwen/Qwen3-8B model.dtype=bfloat16 --memory 80GiB --json",
        "agentrl plan --simulate runs/latest",
        configs=shipped_configs(),
    )
)
def plan(
    words: Words = None,
    env: EnvName = None,
    model: ModelName = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory of each rank, such as 80GiB; default: that of this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    simulated: Annotated[
        Path | None,
        typer.Option(
            "--simulate",
            metavar="RUN",
            help="Simulate the scheduler with a run's measured durations, for several values of rollout.max_staleness.",
        ),
    ] = None,
) -> None:
    """Estimate the memory of a run, part by part, from the model's config.json; fails if the run does not fit."""
    if simulated is not None:
        if words or env or model or memory:
            raise UsageError("--simulate takes its settings from the run", expected="no config and no other options")
        _simulate(read_measured_run(RunDirectory.open(simulated)), as_json=as_json)
        return
    limit = None if memory is None else parse_memory(memory)
    config = resolve_model(
        read_config(words, shortcuts=[*option_words("environment", env), *option_words("model", model)])
    )
    check_training(config)
    if limit is None:
        limit = detected_memory(config)
    planned = memory_plan(at_largest(config))
    if as_json:
        typer.echo(json.dumps(as_plain(planned, limit), indent=2))
    else:
        _show(planned, limit)
    check_fits(config, planned, limit)


def _simulate(measured: MeasuredRun, *, as_json: bool) -> None:
    """Print steps per hour, idle shares, dropped groups and bias for each staleness and batch order."""
    rows = []
    for staleness, order in SETTINGS:
        found = measured.simulate(staleness, order)
        rows.append(
            {
                "max_staleness": staleness,
                "batch_order": order if staleness else "",
                "steps_per_hour": found.steps_per_hour,
                "engine_idle": found.engine_idle,
                "requests": found.requests,
                "trainer_idle": found.trainer_idle,
                "dropped": found.dropped / (found.dropped + len(found.groups)),
                "bias_turns": found.bias["bias/turns"],
                "bias_seconds": found.bias["time/bias/seconds"],
            }
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    names = ("staleness", "batch order", "steps per hour", "engine idle", "requests", "trainer idle", "dropped groups")
    headings = (*names, "bias of turns", "bias of seconds")
    formats = ("{}", "{}", "{:.0f}", "{:.0%}", "{:.1f}", "{:.0%}", "{:.1%}", "{:+.1%}", "{:+.1%}")
    cells = [[style.format(value) for style, value in zip(formats, row.values(), strict=True)] for row in rows]
    widths = [max(map(len, (*name.split(), *found))) for name, *found in zip(headings, *cells, strict=True)]
    table = Table(box=None, pad_edge=False)
    for name, width in zip(headings, widths, strict=True):
        table.add_column(name, min_width=width)
    for row in cells:
        table.add_row(*row)
    out.print(table)
    rollout = measured.config.rollout
    note(
        f"measured: {3600 / measured.step_s:.0f} steps per hour with rollout.max_staleness {rollout.max_staleness}; "
        "the simulation assumes that the engine answers as fast as in the run, and omits failures and evaluations"
    )


def parse_memory(text: str) -> int:
    """Parse an amount of memory such as ``80GiB``; return bytes.

    Raises:
        UsageError: the text is not an amount of memory.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if (
        found is None
        or found[2].upper() not in UNITS
        or not float(found[1])
        or (not found[2] and float(found[1]) < LEAST)
    ):
        raise UsageError(
            "--memory is not an amount of memory", got=repr(text), expected="such as 80GiB, 24GB or 512MiB"
        )
    return int(float(found[1]) * UNITS[found[2].upper()])


def detected_memory(config: Config) -> int:
    """Return the bytes of each rank on this machine: its first GPU's memory, or an equal share of the CPU memory."""
    gpus = accelerators() if config.model.device != "cpu" else []
    return gpus[0].memory_bytes if gpus else memory_limit() // config.trainer.processes


def as_plain(planned: MemoryPlan, limit: int) -> dict[str, Any]:
    """Return the plan as plain JSON types."""
    return {
        "total_bytes": planned.total,
        "memory_bytes": limit,
        "fits": planned.total <= limit,
        **{key: value for key, value in dataclasses.asdict(planned).items() if key != "footprint"},
        "model": dataclasses.asdict(planned.footprint),
    }


def check_fits(config: Config, planned: MemoryPlan, limit: int) -> None:
    """Check that a run fits into memory.

    Raises:
        ConfigError: it does not fit; the message suggests settings that need less memory.
    """
    if planned.total <= limit:
        return
    changes, then = remedies(config, planned, limit)
    largest = max(planned.items, key=lambda item: item.bytes)
    if not changes:
        hint = "shard the model over more processes: trainer.processes"
    elif then.total <= limit:
        hint = f"it needs {shown_bytes(then.total)} with {' '.join(changes)}"
    else:
        hint = (
            f"it still needs {shown_bytes(then.total)} with {' '.join(changes)}: shard the model over more processes "
            "(trainer.processes), or use a smaller model"
        )
    raise ConfigError(
        "this run does not fit into the memory of a rank",
        got=f"{shown_bytes(planned.total)} ({largest.name}: {shown_bytes(largest.bytes)})",
        expected=f"at most {shown_bytes(limit)}",
        hint=hint,
    )


def _show(planned: MemoryPlan, limit: int) -> None:
    model = planned.footprint
    table = Table("memory of a rank", "bytes", "from", box=None, pad_edge=False)
    for item in planned.items:
        when = f" (only in the {item.when})" if item.when else ""
        table.add_row(item.name, shown_bytes(item.bytes), item.how + when)
    table.add_row(Text("peak", style="bold"), shown_bytes(planned.total), f"of {shown_bytes(limit)}")
    for item in planned.off_device:
        table.add_row(item.name, shown_bytes(item.bytes), item.how)
    out.print(table)
    out.print(
        f"{model.parameters:,} parameters in {model.layers} layers; an update has at most "
        f"{planned.sequences_per_update:,} sequences in {planned.micro_batches:,} micro-batches of at most "
        f"{planned.tokens_per_micro_batch:,} tokens"
    )
    kept = (model.activations, model.checkpointed)
    without, with_it = (shown_bytes(round(each * planned.tokens_per_micro_batch / model.tokens)) for each in kept)
    out.print(f"activations: {without}; {with_it} with trainer.gradient_checkpointing")
    if model.estimated is not None:
        note(f"activations are estimated from the model's sizes, because measuring them failed: {model.estimated}")
