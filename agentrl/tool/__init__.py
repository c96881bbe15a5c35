"""Tools: typed functions with a docstring that the policy may call."""

from agentrl.tool.contract import (
    TOOL_NAME,
    Tool,
    ToolContext,
    ToolDependencies,
    ToolResult,
    ToolRules,
    Toolset,
    tool,
)
from agentrl.tool.results import ToolFault, contain_exceptions

__all__ = [
    "TOOL_NAME",
    "Tool",
    "ToolContext",
    "ToolDependencies",
    "ToolFault",
    "ToolResult",
    "ToolRules",
    "Toolset",
    "contain_exceptions",
    "tool",
]
