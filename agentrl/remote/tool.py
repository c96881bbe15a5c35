"""A tool of an environment that lives elsewhere: in a worker process, or behind a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import Any, TypeAlias

from agentrl.tool import Provisions, Tool, ToolResult, ToolRules

CallTool: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[ToolResult]]


class RemoteTool(Tool):
    """Has a tool's name and schema here, and its function elsewhere.

    Args:
        name: Name that the policy uses.
        schema: The description that was made where the function is.
        stop: A call ends the episode.
        rules: How calls are carried out, where it is not the default.
        remote: Calls it; ``None`` leaves that to who receives the tool.
    """

    def __init__(
        self,
        name: str,
        schema: dict[str, Any],
        stop: bool = False,
        rules: Mapping[str, Any] = MappingProxyType({}),
        remote: CallTool | None = None,
    ) -> None:
        self.name = name
        known = {rule.name for rule in dataclasses.fields(ToolRules)}  # a newer server may know more
        self.rules = ToolRules(**{name: value for name, value in rules.items() if name in known} | {"stop": stop})
        self.options = {}
        self.schema = schema
        self.remote = remote

    def to_plain(self) -> dict[str, Any]:
        """The description as JSON types: keyword arguments of this class."""
        rules = self.rules.changed()
        stop = bool(rules.pop("stop", False))
        return {"name": self.name, "schema": self.schema, "stop": stop, **({"rules": rules} if rules else {})}

    @classmethod
    def describe(cls, tool: Tool) -> RemoteTool:
        """The remote form of a tool, made where the tool is."""
        rules = {name: value for name, value in tool.rules.changed().items() if name not in ("stop", "inline")}
        return cls(tool.name, tool.schema, tool.stop, rules)

    @property
    def is_stateful(self) -> bool:
        """Its state is the environment's."""
        return False

    @property
    def needs_sandbox(self) -> bool:
        """What it needs it has where it is."""
        return False

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as they are: they are checked where the function is."""
        return dict(arguments)

    async def open(self, stack: AsyncExitStack, provisions: Provisions | None = None) -> Callable[..., Any]:
        """Nothing to open: the environment owns it."""
        assert self.remote is not None
        return self.remote

    async def run(self, bound: Callable[..., Any], checked: Mapping[str, Any]) -> ToolResult:
        """Call the function where it is."""
        result: ToolResult = await bound(self.name, checked)
        return result
