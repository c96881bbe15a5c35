"""Conformance kits and small models, for the tests of users and of agentrl."""

from agentrl.testing.engine_check import check_engine
from agentrl.testing.env_check import check_env

__all__ = ["check_engine", "check_env"]
