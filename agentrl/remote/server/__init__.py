"""Servers of an environment (`agentrl env serve`) and of sandboxes (`agentrl sandbox serve`) over HTTP."""

from agentrl.remote.server.sandboxes import SandboxServer
from agentrl.remote.server.server import EnvironmentServer, ServerSettings

__all__ = ["EnvironmentServer", "SandboxServer", "ServerSettings"]
