"""`agentrl trace`: convert the traces of a training step into a file for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer

from agentrl.cli.help_pages import examples
from agentrl.errors import UsageError
from agentrl.observe.console import note
from agentrl.observe.files import write_output
from agentrl.observe.run_folder import require_run, step_name
from agentrl.observe.traces import chrome_trace, read_traces, traced_steps

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl train quickstart 'trackers=[trace]' && agentrl trace",
        "agentrl trace runs/latest --step 12",
        "agentrl trace runs/latest --step 12 --output slow-step.json",
    )
)
def trace(
    run: Annotated[Path | None, typer.Argument(help="Folder of the run; default: the newest one in runs.")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Training step; default: the last traced one.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="File to write; default: step-NNNNNN.trace.json in the run's logs/trace.")
    ] = None,
) -> None:
    """Write a Chrome trace of what each episode of a training step waited for; open it in https://ui.perfetto.dev.

    The run must have been trained with the tracker named trace, as in the first example.
    """
    folder = require_run(run or "runs").path
    steps = traced_steps(folder)
    if step is None and not steps:
        raise UsageError(
            f"run {folder} has no traces",
            expected="a run with trackers=[trace]",
            hint=f"to trace its next steps: agentrl train --resume {folder} 'trackers=[trace]'",
        )
    step = steps[-1] if step is None else step
    found = read_traces(folder, step)
    target = output or folder / "logs" / "trace" / step_name(step, ".trace.json")
    write_output(target, orjson.dumps(chrome_trace(found)))
    episodes = sum(1 for one in found if one.group)
    note(f"wrote {episodes} episodes of step {step} to {target}: open it in ui.perfetto.dev or chrome://tracing")
