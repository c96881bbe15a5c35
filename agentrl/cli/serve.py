"""`agentrl serve`: vLLM or SGLang servers alone, for runs and evaluations that attach to them."""

from __future__ import annotations

import asyncio
import enum
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from agentrl.builders.checks import refuse_cluster
from agentrl.builders.run import stop_signals
from agentrl.builders.servers import LOGS, SERVED_MODEL, make_launcher
from agentrl.cli.arguments import shortcut
from agentrl.cli.help import examples
from agentrl.config import load_config
from agentrl.config.engines import ServerEngineConfig
from agentrl.errors import EngineError, UsageError
from agentrl.observe.console import note, out
from agentrl.observe.model_folder import check_fetchable, find_model
from agentrl.serving.launch import Launcher, ServerProcess

app = typer.Typer()


class Engine(enum.StrEnum):
    """What can be launched."""

    VLLM = "vllm"
    SGLANG = "sglang"


@app.command(
    epilog=examples(
        "agentrl serve --engine vllm --model runs/latest",
        "agentrl serve --engine sglang --model Qwen/Qwen2.5-0.5B-Instruct --replicas 2 --port 8000",
        "agentrl serve --engine vllm --model my-model --gpus 0,1 --tensor-parallel 2 engine.max_running=128",
    )
)
def serve(
    engine: Annotated[Engine, typer.Option(help="Which server.")],
    model: Annotated[str, typer.Option(help="A model folder or name, a run, a checkpoint.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="More keys: engine.… and model.dtype.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="How many servers.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Of the first server, the others follow; free ones if not set.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs to use, such as 0,1; all when left out.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(min=1, help="GPUs per server.")] = None,
    max_context: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.")] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter that has the engine; see agentrl doctor.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="For the logs; runs/serve-TIME when left out.", show_default=False)
    ] = None,
) -> None:
    """Start vLLM or SGLang servers alone; Ctrl-C ends them.

    Prints their addresses when they are ready; attach to them with engine.servers=[ADDRESS, …].
    """
    shortcuts = [
        *shortcut("engine.replicas", replicas),
        *shortcut("engine.gpus", None if gpus is None else f"[{gpus}]"),
        *shortcut("engine.tensor_parallel", tensor_parallel),
        *shortcut("engine.max_context", max_context),
        *shortcut("engine.python", python and json.dumps(python)),
    ]
    # a config needs an environment; which one does not matter here
    config = load_config(None, ["environment=none", f"engine={engine}", *shortcuts, *(overrides or [])])
    refuse_cluster(config, "agentrl serve")
    place = folder or Path("runs") / time.strftime("serve-%Y%m%d-%H%M%S")
    section = config.engine
    if not isinstance(section, ServerEngineConfig) or section.servers != "launch":
        raise UsageError("nothing is to be launched", expected="--engine vllm or sglang, without engine.servers")
    served = find_model(model)
    check_fetchable(served)
    make_folder(place)
    ports = None if port is None else range(port, port + section.replicas)
    try:
        launcher = make_launcher(section, served, place, dtype=config.model.dtype, say=note, ports=ports)
        note(f"serves {served}, logs: {place / LOGS}")
        asyncio.run(_serve(launcher))
    finally:
        shutil.rmtree(place / SERVED_MODEL, ignore_errors=True)
        with suppress(OSError):  # it holds logs
            place.rmdir()


def make_folder(folder: Path) -> None:
    """Make a folder that a person named.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expected = "--folder with one that can be written to"
        raise UsageError(f"the folder {folder} cannot be made", got=error.strerror, expected=expected) from error


async def _serve(launcher: Launcher) -> None:
    stop = asyncio.Event()
    with stop_signals(stop.set):
        async with launcher:
            ended = await serve_until(launcher, stop, print_addresses)
            note("ending the servers")
    if ended is not None:
        said = "\n  ".join(ended.last_lines())
        hint = f"its log, {ended.log}, ends with:\n  {said}"
        raise EngineError(f"{ended.name} ended", got=f"exit code {ended.code}", hint=hint)


async def serve_until(
    launcher: Launcher, stop: asyncio.Event, on_ready: Callable[[Sequence[ServerProcess]], None]
) -> ServerProcess | None:
    """Start the servers and wait for `stop`, or for the end of one of them, which is returned then."""
    stopping, starting = asyncio.create_task(stop.wait()), asyncio.create_task(launcher.start())
    ends: dict[asyncio.Task[int], ServerProcess] = {}
    try:
        await asyncio.wait((stopping, starting), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return None
        on_ready(servers := await starting)
        ends.update({asyncio.create_task(server.wait()): server for server in servers})
        done, _ = await asyncio.wait((stopping, *ends), return_when=asyncio.FIRST_COMPLETED)
        return next((server for task, server in ends.items() if task in done), None)
    finally:
        tasks = (stopping, starting, *ends)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def print_addresses(servers: Sequence[ServerProcess]) -> None:
    """One address per line, and how to use them."""
    for server in servers:
        out.print(server.url)
    note(f"attach with engine.servers=[{','.join(server.url for server in servers)}]; Ctrl-C ends them")
