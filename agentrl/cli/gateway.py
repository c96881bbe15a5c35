"""`agentrl gateway`: OpenAI and Anthropic interfaces for a model or service, with recording."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import orjson
import typer

from agentrl.builders.models import resolve_model
from agentrl.cli.help_pages import examples
from agentrl.config.config import Config
from agentrl.config.engines import OpenAIEngineConfig
from agentrl.errors import UsageError
from agentrl.evaluation.evaluate import PolicyKind, open_policy
from agentrl.evaluation.live_traffic import CONVERSATIONS, EPISODES, PROMPTS, LiveTraffic
from agentrl.evaluation.panel import RESULT_FILE
from agentrl.evaluation.settings import evaluation_config
from agentrl.observe.console import note, out
from agentrl.observe.files import replace_file, writing
from agentrl.rollout.loop_choice import show_tools
from agentrl.runs.stop import run_with_stop_event

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl gateway --model smollm2-135m-instruct --port 8080",
        "agentrl gateway --model runs/latest --engine vllm --record traffic",
        "agentrl gateway --url https://api.example.com/v1 --model their-model --record traffic",
        "agentrl gateway --model runs/latest --host 0.0.0.0 --port 8080 --key-variable MY_KEY",
        "agentrl sft quickstart sft.data=traffic/conversations.jsonl",
        "agentrl eval --model runs/latest --prompts traffic/prompts.jsonl",
    )
)
def gateway(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys: engine.…, model.…, sampling.….")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or name, run, or checkpoint.")] = None,
    engine: Annotated[str | None, typer.Option(help="local, vllm, sglang or openai.")] = None,
    url: Annotated[str | None, typer.Option(help="Address of a running server or service.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free port.")] = 0,
    key_variable: Annotated[
        str | None, typer.Option(help="Environment variable with the key that clients must send.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Record tokens, conversations and prompts in this folder.")
    ] = None,
    idle: Annotated[float, typer.Option(min=1, help="Seconds without a request after which a session ends.")] = 300.0,
) -> None:
    """Serve OpenAI and Anthropic clients with a model or a service; stop with Ctrl-C.

    Clients use ADDRESS/v1 (OpenAI) or ADDRESS (Anthropic) as their base address. With ADDRESS/s/NAME instead, the
    conversations of each NAME form one session. The client sets temperature and top-p.
    """
    key = _key(host, key_variable)
    # a config needs an environment and a loop, which are not used here
    words = ["agent.loop=react_text", "agent.max_answer_tokens=4096", *(overrides or [])]
    config = evaluation_config(env="guess_number/test", model=model, engine=engine, url=url, overrides=words)
    if record is not None:
        with writing(record):
            record.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = record or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-gateway-")))
        traffic = run_with_stop_event(
            lambda stop: _serve(
                config, folder, stop, keeps=record is not None, idle_s=idle, host=host, port=port, key=key
            )
        )
    note(f"{traffic.ended} sessions, {traffic.answers} answers")
    if record is not None and traffic.answers:
        note(f"in {record}: {EPISODES} for agentrl view, {CONVERSATIONS} for agentrl sft, {PROMPTS} for agentrl eval")


def _key(host: str, variable: str | None) -> str | None:
    """Return the key that clients must send.

    Raises:
        UsageError: the variable is not set, or the address is not local and no variable is named.
    """
    if variable is not None:
        if key := os.environ.get(variable):
            return key
        raise UsageError(f"the environment variable {variable} is not set", expected="the key that clients must send")
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if not is_local:
        raise UsageError(
            "anyone who can reach this address could use the model",
            got=f"--host {host} without a key",
            expected="--key-variable with the name of an environment variable that holds a key",
        )
    return None


def _describe(config: Config, folder: Path) -> None:
    """Write a result file that names the model, so that `agentrl view` can decode the tokens."""
    settings = {"engine": {"type": config.engine.type}}
    result = {"model": config.model.path, "policy": PolicyKind.ENGINE.value, "settings": settings}
    replace_file(folder / RESULT_FILE, orjson.dumps(result))


async def _serve(
    config: Config,
    folder: Path,
    stop: asyncio.Event,
    *,
    keeps: bool,
    idle_s: float,
    host: str,
    port: int,
    key: str | None,
) -> LiveTraffic:
    resolved = config if isinstance(config.engine, OpenAIEngineConfig) else show_tools(resolve_model(config), say=note)
    async with open_policy(resolved, PolicyKind.ENGINE, folder) as policy:
        kept = folder if keeps else None
        if keeps:
            _describe(resolved, folder)
        traffic = LiveTraffic(policy, resolved, folder=kept, idle_s=idle_s, host=host, port=port, key=key)
        async with traffic:
            url = traffic.gateway.url
            out.print(f"OPENAI_BASE_URL={url}/v1\nANTHROPIC_BASE_URL={url}")
            await stop.wait()
            note("ending the sessions")
    return traffic
