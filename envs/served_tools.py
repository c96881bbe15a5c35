"""Tools that a server of another protocol describes and carries out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

from agentrl.errors import UsageError
from agentrl.tool import ForwardedTool, ToolDependencies, ToolResult, ToolRules

CallOnServer: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[ToolResult]]


class ServedTool(ForwardedTool):
    """A tool of a server, which checks the arguments.

    Args:
        name: Name of the tool on the server.
        description: What it does.
        parameters: JSON schema of the arguments; ``None`` if there are none.
        call: Calls a tool on the server.

    Raises:
        UsageError: the name is missing, or the schema is not one; chat templates would fail on it, or leave it out.
    """

    def __init__(
        self, name: str, description: str | None, parameters: Mapping[str, Any] | None, call: CallOnServer
    ) -> None:
        _check(name, parameters)
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


def _check(name: Any, parameters: Any) -> None:
    is_named = isinstance(name, str) and bool(name.strip())
    properties = (parameters.get("properties") or {}) if isinstance(parameters, Mapping) else {}
    is_schema = parameters is None or (isinstance(parameters, Mapping) and isinstance(properties, Mapping))
    wrong = [key for key, one in properties.items() if not isinstance(one, Mapping | bool)] if is_schema else []
    if is_named and is_schema and not wrong:
        return
    got = f"its property {wrong[0]}: {properties[wrong[0]]!r:.80}" if wrong else f"{parameters!r:.80}"
    raise UsageError(
        f"the server describes the tool {name!r:.80} by something that is not a JSON schema"
        if is_named
        else "the server has a tool without a name",
        got=got,
        expected='{"type": "object", "properties": {"name": {"type": …}}}',
        hint="correct the tool's description on the server",
    )
