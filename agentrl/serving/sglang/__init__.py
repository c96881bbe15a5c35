"""SGLang servers: launch command and client."""

from agentrl.serving.sglang.launch import launch_command
from agentrl.serving.sglang.server import SGLangServer

__all__ = ["SGLangServer", "launch_command"]
