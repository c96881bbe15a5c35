"""A tool of an environment that lives elsewhere: in a worker process, or behind a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

from agentrl.tool import Tool

CallTool: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[str]]


class RemoteTool(Tool):
    """Has a tool's name and schema here, and its function elsewhere.

    Args:
        name: Name that the policy uses.
        schema: The description that was made where the function is.
        stop: A call ends the episode.
        remote: Calls it; ``None`` leaves that to who receives the tool.
    """

    def __init__(self, name: str, schema: dict[str, Any], stop: bool, remote: CallTool | None = None) -> None:
        self.name = name
        self.stop = stop
        self.inline = True
        self.schema = schema
        self.remote = remote

    @classmethod
    def describe(cls, tool: Tool) -> RemoteTool:
        """The remote form of a tool, made where the tool is."""
        return cls(tool.name, tool.schema, tool.stop)

    @property
    def is_stateful(self) -> bool:
        """Its state is the environment's."""
        return False

    async def open(self, stack: AsyncExitStack) -> Callable[..., Any]:
        """Nothing to open: the environment owns it."""
        assert self.remote is not None
        return self.remote

    async def call(self, bound: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
        """Call the function where it is, which checks the arguments."""
        result: str = await bound(self.name, arguments)
        return result
