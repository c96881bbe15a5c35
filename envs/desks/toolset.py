"""The public methods of a desk as tools."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from agentrl.tool import Tool


def declare_tools(desk: object) -> dict[str, Tool]:
    """Return the public methods of a desk as tools by name."""
    return {name: Tool(getattr(desk, name), inline=True) for name in vars(type(desk)) if not name.startswith("_")}


def describe_tools(tools: Mapping[str, Tool]) -> str:
    """Return a line per tool, with its arguments and summary, for agents that write their calls as text."""
    lines = []
    for name, tool in tools.items():
        signature = str(inspect.signature(tool.target)).partition(" ->")[0].replace("'", "").replace("Any", "any")
        summary = " ".join((inspect.getdoc(tool.target) or "").partition("\n\n")[0].split())
        lines.append(f"- {name}{signature}: {summary}")
    return "\n".join(lines)
