"""The desk's methods as tools."""

from __future__ import annotations

import functools

from agentrl.errors import ToolError
from agentrl.message import ToolCall
from agentrl.tool import Tool

from ..desks.calls import DeskTool
from ..desks.toolset import declare_tools
from .database import Database, Store
from .desk import Desk


class Toolbox:
    """A desk with its tools, for one episode after another; each episode sets the desk's database."""

    def __init__(self) -> None:
        self.desk = _empty_desk()
        self.tools = tuple(DeskTool(tool, getattr(self.desk, name)) for name, tool in declared_tools().items())
        self._named = {tool.name: tool for tool in self.tools}

    def call(self, call: ToolCall) -> str:
        """Execute a call and return its result.

        Raises:
            ToolError: the tool is unknown, its arguments are wrong, or the desk refuses.
        """
        tool = self._named.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}", expected=", ".join(self._named))
        text: str = tool(**tool.validate(call.arguments))
        return text


def _empty_desk() -> Desk:
    return Desk(Database(Store(users={}, products={}, orders={})))


@functools.cache
def declared_tools() -> dict[str, Tool]:
    """Return all tools by name, bound to a desk without records."""
    return declare_tools(_empty_desk())
