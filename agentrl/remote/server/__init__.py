"""Servers of an environment for several protocols (`agentrl env serve`), and of sandboxes (`agentrl sandbox serve`)."""

from agentrl.remote.server.mcp_server import MCPServer
from agentrl.remote.server.openenv import OpenEnvServer
from agentrl.remote.server.sandboxes import SandboxServer
from agentrl.remote.server.server import EnvironmentServer, ServerSettings

__all__ = ["EnvironmentServer", "MCPServer", "OpenEnvServer", "SandboxServer", "ServerSettings"]
