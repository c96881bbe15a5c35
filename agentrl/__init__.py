"""agentrl: train language-model agents with reinforcement learning in environments."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from typing import TYPE_CHECKING, Any

from agentrl.tool import tool as tool  # imported now: the attribute must be the decorator, not the module

if TYPE_CHECKING:
    from agentrl.agent_loop import AgentLoop as AgentLoop
    from agentrl.env import AsyncEnv as AsyncEnv
    from agentrl.errors import ToolError as ToolError
    from agentrl.message import parse_int as parse_int
    from agentrl.runs.api import evaluate as evaluate
    from agentrl.runs.api import resume as resume
    from agentrl.runs.api import sft as sft
    from agentrl.runs.api import train as train
    from agentrl.tool import ToolContext as ToolContext
    from agentrl.tool import ToolResult as ToolResult

# Let torch's threads spin for some microseconds before they sleep: if other processes are busy, threads that keep
# spinning make small operations ten times slower, and threads that sleep immediately halve their speed. torch reads
# these variables when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_EXPORTS = {
    "AgentLoop": "agentrl.agent_loop",
    "AsyncEnv": "agentrl.env",
    "ToolContext": "agentrl.tool",
    "ToolError": "agentrl.errors",
    "ToolResult": "agentrl.tool",
    "evaluate": "agentrl.runs.api",
    "parse_int": "agentrl.message",
    "resume": "agentrl.runs.api",
    "sft": "agentrl.runs.api",
    "train": "agentrl.runs.api",
}

__all__ = [
    "AgentLoop",
    "AsyncEnv",
    "ToolContext",
    "ToolError",
    "ToolResult",
    "evaluate",
    "parse_int",
    "resume",
    "sft",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "__version__":
        return importlib.metadata.version("agentrl")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    """Return the public names, for completion in a Python session."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "annotations", "importlib", "os"})
