"""`agentrl profile`: where the time of some training steps goes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from agentrl.cli.arguments import EnvName, ModelName, Words, read_config
from agentrl.cli.exits import ExitCode, message_when_interrupted
from agentrl.cli.help_pages import examples
from agentrl.config import shipped_configs
from agentrl.config.overrides import option_words
from agentrl.errors import ConfigError
from agentrl.observe.console import note, out
from agentrl.observe.files import check_writable, write_output
from agentrl.observe.terminal import watching
from agentrl.runs.profile import RunProfile, profile_run
from agentrl.runs.start import start_run

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl profile quickstart",
        "agentrl profile quickstart --warmup 3 --steps 1 --json profile.json",
        "agentrl profile configs/my_run.yaml engine.type=vllm",
        configs=shipped_configs(),
    )
)
def profile(
    words: Words = None,
    env: EnvName = None,
    model: ModelName = None,
    warmup: Annotated[int, typer.Option(min=0, help="Training steps before the profile.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Profiled training steps.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Train a few steps, and show where their time goes.

    Shows the seconds of the phases, the CPU time per turn by component, the lag of the event loop, and torch's slowest
    operations. The run's folder gets profile.trace.json for https://ui.perfetto.dev. The profiler itself also takes
    time.
    """
    if json_file is not None:
        check_writable(json_file)
    last = warmup + steps
    shortcuts = [*option_words("environment", env), *option_words("model", model), f"trainer.steps={last}"]
    config = read_config(words, shortcuts=shortcuts)
    if config.trainer.steps != last:
        raise ConfigError(
            "trainer.steps is set by --warmup and --steps", got=config.trainer.steps, hint="remove the override"
        )
    run = start_run(config, kind="profile")
    with watching() as watcher, message_when_interrupted(lambda: "stopped before the profile was complete"):
        found = profile_run(run, first=warmup + 1, last=last, watcher=watcher)
    if found is None:
        raise typer.Exit(ExitCode.FAILED)
    _show(found)
    if json_file is not None:
        write_output(json_file, (json.dumps(found.to_json(), indent=2) + "\n").encode())
    note(f"trace: {shlex.quote(str(found.trace))}: open it in ui.perfetto.dev or chrome://tracing")


def _show(found: RunProfile) -> None:
    shown = f"step {found.first}" if found.first == found.last else f"steps {found.first} to {found.last}"
    out.print(
        f"{shown}: {found.seconds:.2f} s, {found.cpu_seconds:.2f} CPU s, {found.turns} turns; event loop idle for "
        f"{found.idle_share:.0%}, lag {found.lag_ms['p50']:.1f} ms (p50), {found.lag_ms['p99']:.1f} (p99), "
        f"{found.lag_ms['max']:.1f} (max)"
    )
    for title, rows in (
        ("seconds by phase", [(name, f"{seconds:.2f}") for name, seconds in found.phases.items()]),
        ("ms per turn on the event loop", [(name, f"{value:.3f}") for name, value in found.components.items()]),
    ):
        table = Table(title, Column(justify="right"), box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        out.print(table)
    table = Table("operation of torch", box=None, pad_edge=False)
    for name in ("calls", "CPU ms", "GPU ms"):
        table.add_column(name, justify="right")
    for one in found.operations:
        table.add_row(one.name, str(one.calls), f"{one.self_ms:.1f}", f"{one.device_ms:.1f}" if one.device_ms else "")
    out.print(table)
