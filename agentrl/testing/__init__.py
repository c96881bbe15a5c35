"""Conformance kits and small models, for the tests of users and of agentrl."""

from agentrl.testing.engine_check import check_engine
from agentrl.testing.env_check import check_env
from agentrl.testing.env_subject import Thoroughness
from agentrl.testing.reward_integrity import reward_integrity
from agentrl.testing.sandbox_check import check_sandbox
from agentrl.testing.server_engine import ServerEngine
from agentrl.testing.tool_check import check_tool

__all__ = [
    "ServerEngine",
    "Thoroughness",
    "check_engine",
    "check_env",
    "check_sandbox",
    "check_tool",
    "reward_integrity",
]
