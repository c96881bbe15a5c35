"""vLLM servers: launch command and client."""

from agentrl.serving.vllm.command import launch_command
from agentrl.serving.vllm.server import VLLMServer

__all__ = ["VLLMServer", "launch_command"]
