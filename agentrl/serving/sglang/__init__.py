"""SGLang servers: launch command and client."""

from agentrl.serving.sglang.server import SGLangServer, launch_command

__all__ = ["SGLangServer", "launch_command"]
