"""`agentrl tool`: list, show, call and check tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from agentrl.builders.tools import find_tool
from agentrl.cli.arguments import json_pairs, option_pairs
from agentrl.cli.exits import print_to_standard_error
from agentrl.cli.help_pages import examples
from agentrl.errors import AgentRLError, UnknownNameError, UsageError
from agentrl.message import ToolCall
from agentrl.observe.console import note, out
from agentrl.registry import Kind, lookup, names
from agentrl.rollout.tools import ToolCallResult, tool_session
from agentrl.runs.stop import run_until_stopped
from agentrl.testing.report import CheckReport
from agentrl.testing.tool_check import check_tool_here
from agentrl.tool import Tool

app = typer.Typer(no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(help="Registry name, or module:attr of your own tool; mcp/TOOL for one of several tools.")
]
Options = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="Option of the tool as key=value, as in agent.tools.")
]
Pairs = Annotated[list[str] | None, typer.Argument(help="Arguments as key=value; values are JSON, otherwise text.")]
SandboxWords = Annotated[str | None, typer.Option("--sandbox", help="Sandbox type, if the tool needs one: local.")]


@app.command("list", epilog=examples("agentrl tool list"))
def list_tools() -> None:
    """List the installed tools."""
    table = Table("name", "description", box=None, pad_edge=False)
    for name in names(Kind.TOOL):
        table.add_row(name, summary(name))
    out.print(table)


def summary(name: str) -> str:
    """Return the first line of a tool's description."""
    found = lookup(Kind.TOOL, name)
    text = found.schema["function"]["description"] if isinstance(found, Tool) else found.__doc__ or ""
    return str(text).strip().partition("\n")[0]


@app.command(epilog=examples("agentrl tool show calculator"))
def show(name: Name, option: Options = None) -> None:
    """Print a tool's JSON schema, which the policy reads."""
    known = None if option else lookup(Kind.TOOL, _split(name)[0])
    tools = [known] if isinstance(known, Tool) else run_until_stopped(_find_all(name, option))  # may require options
    schemas = [tool.schema for tool in tools]
    out.print_json(json.dumps(schemas[0] if len(schemas) == 1 else schemas))


@app.command(
    epilog=examples(
        'agentrl tool call calculator expression="3 * (4 + 5)"',
        'agentrl tool call python --sandbox local code="sum(range(10))"',
    )
)
def call(name: Name, arguments: Pairs = None, option: Options = None, sandbox: SandboxWords = None) -> None:
    """Call a tool as in an episode, with checked arguments."""
    with print_to_standard_error():
        called = run_until_stopped(_call(name, json_pairs(arguments), option, sandbox))
    if called.failed:
        text = called.result.text.removeprefix("Error: ")
        fault = None if called.fault is None or called.fault.partition(": ")[2] in text else called.fault
        raise UsageError(f"the policy would read: {text}", got=fault)
    out.print(called.result.text)
    numbers = {"reward": called.result.reward, **called.result.metrics}
    if any(numbers.values()):
        note(", ".join(f"{key} {value:g}" for key, value in numbers.items()))


@app.command(epilog=examples('agentrl tool check calculator expression="2 + 2"'))
def check(name: Name, arguments: Pairs = None, option: Options = None, sandbox: SandboxWords = None) -> None:
    """Check a tool against the rules of its contract; the arguments are those of a call that must succeed."""
    pairs = json_pairs(arguments)
    with print_to_standard_error():
        reports = run_until_stopped(_check(name, [pairs] if pairs else [], option, sandbox))
    for report in reports:
        out.print(str(report))
    if broken := [report.name for report in reports if not report.passed]:
        raise AgentRLError("tools break rules", got=", ".join(broken))


def _split(name: str) -> tuple[str, str]:
    """Split a name into those of the toolset and of one of its tools; a file's path may contain slashes, too."""
    module, colon, attribute = name.rpartition(":")
    whole, _, single = attribute.partition("/")
    return f"{module}{colon}{whole}", single


async def _find_all(name: str, option: Sequence[str] | None) -> list[Tool]:
    """Return the tools with a name: one tool, or all of a toolset."""
    whole, single = _split(name)
    found = find_tool({"name": whole, **option_pairs(option)})
    if isinstance(found, Tool):
        return [found]
    try:
        tools = list(await found.tools())
    finally:
        await found.close()
    chosen = [tool for tool in tools if single in ("", tool.name)]
    if not chosen:
        raise UnknownNameError("unknown tool", got=name, expected=", ".join(tool.name for tool in tools) or "none")
    return chosen


async def _find_one(name: str, option: Sequence[str] | None) -> Tool:
    tools = await _find_all(name, option)
    if len(tools) > 1:
        raise UsageError(f"{name} has several tools", expected=f"one of them: {name}/{tools[0].name}")
    return tools[0]


async def _call(name: str, pairs: dict[str, Any], option: Sequence[str] | None, sandbox: str | None) -> ToolCallResult:
    tool = await _find_one(name, option)
    async with tool_session(sandbox=sandbox) as session:
        return await session.carry_out(ToolCall(name=tool.name, arguments=pairs), {tool.name: tool})


async def _check(
    name: str, examples: Sequence[dict[str, Any]], option: Sequence[str] | None, sandbox: str | None
) -> list[CheckReport]:
    tools = await _find_all(name, option)
    return [await check_tool_here(tool, examples=examples, sandbox=sandbox) for tool in tools]
