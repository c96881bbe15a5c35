"""`agentrl serve`: vLLM or SGLang servers to which runs and evaluations attach."""

from __future__ import annotations

import asyncio
import enum
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from agentrl.builders.cluster import refuse_cluster
from agentrl.builders.servers import LOGS, SERVED_MODEL, make_launcher
from agentrl.cli.help_pages import examples
from agentrl.config import load_config
from agentrl.config.engines import ServerEngineConfig
from agentrl.config.overrides import option_words
from agentrl.errors import EngineError, UsageError
from agentrl.observe.console import note, out
from agentrl.observe.model_folder import check_fetchable, find_model
from agentrl.runs.stop import run_with_stop_event
from agentrl.serving.launch import Launcher, ServerProcess

app = typer.Typer()


class Engine(enum.StrEnum):
    """Type of server."""

    VLLM = "vllm"
    SGLANG = "sglang"


@app.command(
    epilog=examples(
        "agentrl serve --engine vllm --model runs/latest",
        "agentrl serve --engine sglang --model Qwen/Qwen2.5-0.5B-Instruct --replicas 2 --port 8000",
        "agentrl serve --engine vllm --model my-model --gpus 0,1 --tensor-parallel 2 engine.max_num_seqs=128",
    )
)
def serve(
    engine: Annotated[Engine, typer.Option(help="Type of server.")],
    model: Annotated[str, typer.Option(help="Model folder or name, run, or checkpoint.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys: engine.… and model.dtype.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Number of servers.")] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the first server; the next ones follow. Default: free ports."),
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs to use, such as 0,1; default: all.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(min=1, help="GPUs per server.")] = None,
    max_context: Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens in a sequence.")] = None,
    python: Annotated[
        str | None, typer.Option(help="Interpreter with the engine installed; see agentrl doctor.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for the logs; default runs/serve-TIME.", show_default=False)
    ] = None,
) -> None:
    """Start vLLM or SGLang servers without a run; stop with Ctrl-C.

    Prints their addresses when they are ready; attach to them with engine.servers=[ADDRESS, …].
    """
    shortcuts = [
        *option_words("engine.replicas", replicas),
        *option_words("engine.gpus", None if gpus is None else f"[{gpus}]"),
        *option_words("engine.tensor_parallel", tensor_parallel),
        *option_words("engine.max_context", max_context),
        *option_words("engine.python", python),
    ]
    # a config needs an environment, which is not used here
    config = load_config(None, ["environment=none", f"engine={engine}", *shortcuts, *(overrides or [])])
    refuse_cluster(config, "agentrl serve")
    target = folder or Path("runs") / time.strftime("serve-%Y%m%d-%H%M%S")
    section = config.engine
    if not isinstance(section, ServerEngineConfig) or section.servers != "launch":
        raise UsageError("no server to launch", expected="--engine vllm or sglang, without engine.servers")
    served = find_model(model)
    check_fetchable(served)
    make_folder(target)
    ports = None if port is None else range(port, port + section.replicas)
    try:
        launcher = make_launcher(section, served, target, dtype=config.model.dtype, say=note, ports=ports)
        note(f"serving {served}; logs: {target / LOGS}")
        run_with_stop_event(lambda stop: _serve(launcher, stop))
    finally:
        shutil.rmtree(target / SERVED_MODEL, ignore_errors=True)
        with suppress(OSError):  # not empty if logs were written
            target.rmdir()


def make_folder(folder: Path) -> None:
    """Create a folder.

    Raises:
        UsageError: the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expected = "--folder with a writable folder"
        raise UsageError(f"cannot create the folder {folder}", got=error.strerror, expected=expected) from error


async def _serve(launcher: Launcher, stop: asyncio.Event) -> None:
    async with launcher:
        ended = await serve_until(launcher, stop, print_addresses)
        note("stopping the servers")
    if ended is not None:
        last_lines = "\n  ".join(ended.last_lines())
        hint = f"its log, {ended.log}, ends with:\n  {last_lines}"
        raise EngineError(f"{ended.name} ended", got=f"exit code {ended.code}", hint=hint)


async def serve_until(
    launcher: Launcher, stop: asyncio.Event, on_ready: Callable[[Sequence[ServerProcess]], None]
) -> ServerProcess | None:
    """Start the servers and wait for `stop`, or until one of them ends, which is then returned."""
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
    """Print one address per line, and how to attach to the servers."""
    for server in servers:
        out.print(server.url)
    note(f"attach with engine.servers=[{','.join(server.url for server in servers)}]; stop with Ctrl-C")
