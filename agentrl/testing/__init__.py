"""Conformance kits and small models, for the tests of users and of agentrl."""

from agentrl.testing.engine_check import check_engine
from agentrl.testing.env_check import check_env
from agentrl.testing.env_subject import Thoroughness
from agentrl.testing.sandbox_check import check_sandbox
from agentrl.testing.server_engine import ServerEngine

__all__ = ["ServerEngine", "Thoroughness", "check_engine", "check_env", "check_sandbox"]
