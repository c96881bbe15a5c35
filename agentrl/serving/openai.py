"""OpenAI-compatible chat service as a policy, for evaluation."""

from __future__ import annotations

from agentrl.config.engines import OpenAIEngineConfig
from agentrl.remote.chat import ChatService, ServiceSettings


class OpenAIEngine(ChatService):
    """Client of the chat service in a config section such as ``engine``; other arguments as for `ChatService`."""

    def __init__(self, config: OpenAIEngineConfig, *, section: str = "engine", first_wait_s: float = 0.5) -> None:
        self.config = config
        settings = ServiceSettings(**config.model_dump(exclude={"type"}), section=section)
        super().__init__(settings, first_wait_s=first_wait_s)
