"""Tools: typed functions with a docstring that the policy may call."""

from agentrl.tool.contract import (
    TOOL_NAME,
    ForwardedTool,
    Tool,
    ToolContext,
    ToolDependencies,
    ToolResult,
    ToolRules,
    Toolset,
    tool,
)

__all__ = [
    "TOOL_NAME",
    "ForwardedTool",
    "Tool",
    "ToolContext",
    "ToolDependencies",
    "ToolResult",
    "ToolRules",
    "Toolset",
    "tool",
]
