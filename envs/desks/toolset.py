"""The public methods of a desk as tools, and their description for agents."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from agentrl.tool import Tool


def declare_tools(desk: object) -> dict[str, Tool]:
    """Return the public methods of a desk as tools by name."""
    return {name: Tool(getattr(desk, name), inline=True) for name in vars(type(desk)) if not name.startswith("_")}


def write_instructions(policy: str, tools: Mapping[str, Tool], example: str) -> tuple[str, str]:
    """Return a desk's instructions for agents that write calls as text, and for agents that call tools natively.

    Args:
        policy: The desk's policy.
        tools: Its tools by name.
        example: A call as text.
    """
    as_text = f"""\
{policy}
# How to act
Each turn, either talk to the customer in plain words, or call one of these tools:

{describe_tools(tools)}

To call a tool, write one JSON object and nothing else, for example:
{example}"""
    native = f"""\
{policy}
# How to act
Each turn, either call one tool, or talk to the customer in plain words. The customer reads every answer that calls no
tool."""
    return as_text, native


def describe_tools(tools: Mapping[str, Tool]) -> str:
    """Return a line per tool, with its arguments and summary, for agents that write their calls as text."""
    lines = []
    for name, tool in tools.items():
        signature = str(inspect.signature(tool.target)).partition(" ->")[0].replace("'", "").replace("Any", "any")
        summary = " ".join((inspect.getdoc(tool.target) or "").partition("\n\n")[0].split())
        lines.append(f"- {name}{signature}: {summary}")
    return "\n".join(lines)
