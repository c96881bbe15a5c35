"""Conformance checks of environments, tools, sandboxes and engines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.testing.engine_check import check_engine as check_engine
    from agentrl.testing.engine_subject import ServerEngine as ServerEngine
    from agentrl.testing.env_check import check_env as check_env
    from agentrl.testing.env_check import reward_integrity as reward_integrity
    from agentrl.testing.env_subject import CheckDepth as CheckDepth
    from agentrl.testing.sandbox_check import check_sandbox as check_sandbox
    from agentrl.testing.tool_check import check_tool as check_tool

_EXPORTS = {
    "ServerEngine": "agentrl.testing.engine_subject",
    "CheckDepth": "agentrl.testing.env_subject",
    "check_engine": "agentrl.testing.engine_check",
    "check_env": "agentrl.testing.env_check",
    "check_sandbox": "agentrl.testing.sandbox_check",
    "check_tool": "agentrl.testing.tool_check",
    "reward_integrity": "agentrl.testing.env_check",
}

__all__ = ["CheckDepth", "ServerEngine", "check_engine", "check_env", "check_sandbox", "check_tool", "reward_integrity"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because processes of the environment check need only a few of them."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'agentrl.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
