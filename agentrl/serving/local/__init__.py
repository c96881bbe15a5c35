"""Engine that runs a Hugging Face model in this process."""

from agentrl.serving.local.engine import LocalEngine

__all__ = ["LocalEngine"]
