"""A person plays an environment in the terminal."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from agentrl.cli.arguments import json_pairs
from agentrl.env import AnyEnv, EnvironmentSpec, optional_part, settled
from agentrl.errors import UsageError
from agentrl.message import Content, ImagePart, TextPart, ToolCall
from agentrl.observe.console import out
from agentrl.rollout.tool_session import tool_session
from agentrl.task import Task
from agentrl.tool import Tool, ToolResult

KEYS = "? lists the actions, ! lets the expert act if you begin with it, q leaves"
TOOL_KEYS = "? lists the tools, /TOOL KEY=VALUE … calls one"


def play_in_terminal(spec: EnvironmentSpec, env: AnyEnv, task: Task) -> None:
    """Read actions from standard input until the episode ends, or the person leaves."""
    with asyncio.Runner() as runner:
        try:
            runner.run(_play(spec, env, task))
        finally:
            runner.run(settled(env.close()))


async def _play(spec: EnvironmentSpec, env: AnyEnv, task: Task) -> None:
    show = functools.partial(shown, numbers=itertools.count())
    observation, _ = await settled(env.reset(seed=task.seed, options=dict(task.options)))
    expert = await _expert_of(env)
    tools: dict[str, Tool] = {tool.name: tool for tool in optional_part(env, "tools") or ()}
    total, turns, done = 0.0, 0, False
    out.print(Text(f"{spec.name}, task {task.id} ({f'{TOOL_KEYS}; {KEYS}' if tools else KEYS})\n", style="dim"))
    out.print(Text(show(observation)))
    while not done:
        action = _ask()
        if action is None:
            return
        if action == "?":
            out.print(Text("\n".join([*await actions_of(env), *map(tool_line, tools.values())])))
            continue
        if action.startswith("/") and tools:
            result = await _called(action, tools)
            out.print(Text(result.text))
            total, turns, done = total + result.reward, turns + 1, result.stop
            continue
        if action == "!" and expert is None:
            out.print(Text("There is no expert here, or it was not asked from the first turn on."))
            continue
        if action == "!" and expert is not None:
            action = str(await settled(expert.act(observation)))
            out.print(Text(f"> {action}", style="cyan"))
        else:
            expert = None  # it has not seen what the person did, and would go on from somewhere else
        observation, reward, terminated, truncated, info = await settled(env.step(action))
        total, turns, done = total + float(reward), turns + 1, terminated or truncated
        out.print(Text(show(observation)))
    out.print(Text(ending(info, total, turns), style="bold"))


def ending(info: dict[str, Any], total: float, turns: int) -> str:
    """How an episode ended, in words."""
    verdict = "The end." if "success" not in info else "Solved." if info["success"] else "Not solved."
    return f"{verdict} Return {total:g} after {turns} turns."


def _ask() -> str | None:
    try:
        line = input("> ").strip()
    except EOFError:
        return None
    return None if line == "q" else line


async def actions_of(env: AnyEnv) -> list[str]:
    """The actions that the environment accepts now, or its hint."""
    method = optional_part(env, "admissible_actions")
    if method is None:
        return [str(optional_part(env, "action_hint") or "This environment does not list its actions.")]
    return list(await settled(method()))


def tool_line(tool: Tool) -> str:
    """Describe a tool's call and purpose on one line: ``/search query=… [limit=…]   Search the library.``."""
    function = tool.schema["function"]
    required = function["parameters"].get("required", [])
    words = [f"{name}=…" if name in required else f"[{name}=…]" for name in function["parameters"]["properties"]]
    sentence = " ".join(function["description"].split()).partition(". ")[0].rstrip(".")
    return f"{' '.join([f'/{tool.name}', *words])}   {sentence}."


async def _called(line: str, tools: Mapping[str, Tool]) -> ToolResult:
    """The result of a call that a person wrote, as the policy would read it; the result explains a mistake."""
    try:
        name, *words = shlex.split(line.removeprefix("/"))
        arguments = json_pairs(words)
    except (ValueError, UsageError) as error:
        return ToolResult(f"Error: {error}. Write /TOOL KEY=VALUE, with quotes around values that hold spaces.")
    async with tool_session() as session:
        called = await session.carry_out(ToolCall(name=name, arguments=arguments), tools)
    rules_stop = called.tool is not None and called.tool.rules.stop and not called.failed
    return dataclasses.replace(called.result, stop=called.result.stop or rules_stop)


async def _expert_of(env: AnyEnv) -> Any:
    method = optional_part(env, "expert")
    return None if method is None else await settled(method())


def shown(content: Content, numbers: Iterator[int]) -> str:
    """An observation in the terminal: an image is kept in a file, and told in words where it has any."""
    if isinstance(content, str):
        return content
    return "\n".join(p.text.rstrip() if isinstance(p, TextPart) else _kept(p, next(numbers)) for p in content)


def _kept(image: ImagePart, number: int) -> str:
    path = _folder() / f"{number}.{image.media_type.rpartition('/')[2]}"
    path.write_bytes(image.data)
    return f"[image: {path}]\n{image.alternative}".rstrip()


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="agentrl-play-"))
