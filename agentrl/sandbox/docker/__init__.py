"""Back end ``docker``."""

from agentrl.sandbox.docker.daemon import describe_daemon
from agentrl.sandbox.docker.sandbox import DockerSandbox

__all__ = ["DockerSandbox", "describe_daemon"]
