"""Tools that a server of another protocol describes and carries out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

from agentrl.tool import ForwardedTool, ToolDependencies, ToolResult, ToolRules

CallOnServer: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[ToolResult]]


class ServedTool(ForwardedTool):
    """A tool of a server, which checks the arguments.

    Args:
        name: Name of the tool on the server.
        description: What it does.
        parameters: JSON schema of the arguments; ``None`` if there are none.
        call: Calls a tool on the server.
    """

    def __init__(
        self, name: str, description: str | None, parameters: Mapping[str, Any] | None, call: CallOnServer
    ) -> None:
        empty = {"type": "object", "properties": {}}  # chat templates may read both
        given = {key: value for key, value in (parameters or {}).items() if value is not None}
        function = {"name": name, "description": description or name, "parameters": {**empty, **given}}
        super().__init__(name, {"type": "function", "function": function}, ToolRules())
        self._call = call

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments unchanged."""
        return dict(arguments)

    async def open(self, stack: AsyncExitStack, provisions: ToolDependencies | None = None) -> CallOnServer:
        """Open nothing: the environment has the connection."""
        return self._call

    async def run(self, bound: Callable[..., Any], checked: Mapping[str, Any]) -> ToolResult:
        """Call the tool on the server.

        Raises:
            EnvironmentFailure: the reward or a metric is not a finite number.
        """
        result: ToolResult = await bound(self.name, checked)
        return result.normalize(self.name)
