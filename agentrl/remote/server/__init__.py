"""Servers of an environment (`agentrl env serve`) and of sandboxes (`agentrl sandbox serve`) over HTTP."""

from agentrl.remote.server.server import EnvironmentServer as EnvironmentServer
from agentrl.remote.server.server import ServerSettings as ServerSettings
