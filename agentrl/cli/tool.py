"""`agentrl tool`: list, show and call tools."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Annotated, Any

import typer
from rich.table import Table

from agentrl.cli.arguments import json_pairs
from agentrl.cli.console import out
from agentrl.cli.help import examples
from agentrl.errors import ToolError, UsageError
from agentrl.registry import Kind, lookup, names
from agentrl.tool import Tool

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Registry name, or module:attr of your own.")]


@app.command("list", epilog=examples("agentrl tool list"))
def list_tools() -> None:
    """List the tools that are installed."""
    table = Table("name", "what it does", box=None, pad_edge=False)
    for name in names(Kind.TOOL):
        table.add_row(name, find_tool(name).schema["function"]["description"].splitlines()[0])
    out.print(table)


@app.command(epilog=examples("agentrl tool show calculator"))
def show(name: Name) -> None:
    """Print a tool's JSON schema: what the policy reads."""
    out.print_json(json.dumps(find_tool(name).schema))


@app.command(epilog=examples('agentrl tool call calculator expression="3 * (4 + 5)"'))
def call(
    name: Name,
    arguments: Annotated[list[str] | None, typer.Argument(help="key=value pairs; values are JSON, else text.")] = None,
) -> None:
    """Call a tool as an episode would, with its arguments checked."""
    pairs = json_pairs(arguments)
    try:
        out.print(asyncio.run(_call(find_tool(name), pairs)), markup=False)
    except ToolError as error:
        raise UsageError(f"the policy would read: {error}") from error


def find_tool(name: str) -> Tool:
    """The tool of that name.

    Raises:
        UsageError: no such name, or it is not a tool.
    """
    found = lookup(Kind.TOOL, name)
    if not isinstance(found, Tool):
        raise UsageError(
            f"{name} is not a tool", got=type(found).__name__, hint="decorate the function with @agentrl.tool"
        )
    return found


async def _call(tool: Tool, arguments: dict[str, Any]) -> str:
    async with AsyncExitStack() as stack:
        return await tool.call(await tool.open(stack), arguments)
