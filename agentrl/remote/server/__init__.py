"""Serves one environment to many clients over HTTP: `agentrl env serve`. Its words are those of `agentrl.remote`."""

from agentrl.remote.server.server import EnvironmentServer as EnvironmentServer
from agentrl.remote.server.server import ServerSettings as ServerSettings
