"""`agentrl model check`: find out how usable a model's answers are, and recommend settings."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from agentrl.config import load_config
from agentrl.config.estimate import shown_bytes
from agentrl.errors import UsageError, did_you_mean
from agentrl.evaluation.model_check import TEXT_LOOP, TOOL_LOOP, ModelCheck, check_model
from agentrl.observe.console import note, out
from agentrl.observe.files import check_writable, replace_file

REPLACED = ("agent.loop=", "agent.options", "agent.few_shot_turns=")
"""Settings that a check chooses."""
ENVIRONMENT = "guess_number"
"""Default environment."""


def check(
    name: Annotated[str, typer.Argument(help="Model folder or name, run, or checkpoint.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys: engine, sampling, environment.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help=f"Environment whose tasks the model answers; may be repeated. Default: {ENVIRONMENT}."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="local, vllm or sglang.")] = None,
    loop: Annotated[
        list[str] | None, typer.Option(help=f"Try only this agent loop ({TOOL_LOOP} or {TEXT_LOOP}); may be repeated.")
    ] = None,
    answers: Annotated[int, typer.Option(min=4, help="Number of first answers for each choice of settings.")] = 24,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Check a model before the first run: template, share of usable answers, speed, agreement of engine and trainer.

    Samples a few dozen first answers as tool calls and as text, recommends settings, and saves them: `agentrl train`
    and `agentrl eval` use them for this model and environment unless you choose an agent loop.
    """
    if json_file is not None:
        check_writable(json_file)
    loops = tuple(loop or (TOOL_LOOP, TEXT_LOOP))
    for wrong in set(loops) - {TOOL_LOOP, TEXT_LOOP}:
        hint = did_you_mean(wrong, (TOOL_LOOP, TEXT_LOOP))
        raise UsageError(
            "model check does not try this loop", got=wrong, expected=f"{TOOL_LOOP} or {TEXT_LOOP}", hint=hint
        )
    found = []
    for environment in env or [ENVIRONMENT]:
        settings = ["model.dtype=auto", *([f"engine={engine}"] if engine else [])]
        settings += [] if temperature is None else [f"sampling.temperature={temperature}"]
        settings += words or []
        config = load_config(None, [f"environment={environment}", f"model.path={name}", *settings])
        result = asyncio.run(check_model(config, answers=answers, loops=loops, say=note))
        kept = [word for word in settings if not word.startswith(REPLACED)]
        _print(result, ["agentrl", "train", "--env", environment, "--model", name, *kept])
        found.append(result.to_json())
    if json_file is not None:
        replace_file(json_file, (json.dumps(found, indent=2) + "\n").encode())
        note(f"wrote {json_file}")


def _print(found: ModelCheck, command: list[str]) -> None:
    """Print a result; `command` trains the model, without the recommended settings."""
    out.print(Text(f"{found.model} in {found.environment}", style="bold"))
    _print_template(found)
    _print_answers(found)
    fastest = max(share.tokens_per_s for share in found.shares)
    out.print(f"speed: {fastest:,.0f} sampled tokens/s; peak memory: {shown_bytes(found.peak_bytes)} ({found.dtype})")
    if (agreement := found.agreement) is not None:
        out.print(
            f"engine and trainer: mean |pi - mu| {agreement.mean:.1e}, largest {agreement.largest:.1e}, "
            f"over {agreement.tokens:,} sampled tokens"
        )
    if found.recommended is None:
        out.print("no settings gave a usable answer: try another model, or a supervised start (docs/warm-start.md)")
        return
    for loop, share in found.best.items():
        out.print(f"best with {loop} ({share.usable:.0%}): {share.settings}", soft_wrap=True)
    out.print(Text("recommended", style="bold"), f"({found.recommended.usable:.0%} usable)")
    out.print(f"  {shlex.join(command)} {found.recommended.settings}", soft_wrap=True)
    out.print("train and eval use these settings for this model and environment unless you set agent.loop")


def _print_template(found: ModelCheck) -> None:
    facts = found.template
    calls = f"tool calls in {facts.tool_parser} format" if facts.tool_parser else "no tool calls"
    out.print(f"chat template: family {facts.family}, {calls}; a turn ends at {' or '.join(facts.end_of_turn)}")
    for fault in facts.faults:
        out.print(Text(f"  fault: {fault}", style="yellow"))
    if not facts.faults:
        found_tools = "it renders tools and calls, and" if facts.tool_parser else "it"
        out.print(f"  no fault found: {found_tools} only appends to earlier turns")


def _print_answers(found: ModelCheck) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("settings", overflow="fold")
    for column in ("usable", "repaired", "accepted", "answers", "prompt tokens"):
        table.add_column(column, justify="right")
    for share in found.shares:
        shares = (f"{value:.0%}" for value in (share.usable, share.repaired, share.accepted))
        table.add_row(str(share.settings), *shares, str(share.answers), f"{share.prompt_tokens:,.0f}")
    out.print(table)
    unusable = [entry for share in found.shares for entry in share.unusable]
    if unusable:
        out.print("most frequent unusable answers:")
    for count, text in sorted(unusable, reverse=True)[:3]:
        out.print(Text(f"  {count} x {json.dumps(text, ensure_ascii=False)}"))
