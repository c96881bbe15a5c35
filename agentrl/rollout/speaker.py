"""The contract of a speaker: who answers in an episode's conversations. One object per run.

An engine (`agentrl.rollout.engine_speaker`), a text service (`agentrl.rollout.chat_speaker`), or the environment's own
expert or a random policy (`agentrl.rollout.demonstrator`) speak through the same agent loops.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from agentrl.agent_loop import AgentLoop, Conversation
from agentrl.message import Content, Message
from agentrl.rollout.environments import HostedEnvironment
from agentrl.rollout.turns import TurnLog
from agentrl.tool import Tool


class Situation(Protocol):
    """What a speaker may know of an episode besides its messages."""

    turns: TurnLog
    loop: AgentLoop
    environment: HostedEnvironment
    observation: Content
    """The latest observation, uncut."""


class Speaker(ABC):
    """Opens the conversations of episodes."""

    @abstractmethod
    def open(self, situation: Situation, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Start a conversation of one episode; `tools` are offered to the policy."""

    @abstractmethod
    def cut(self, text: str, max_tokens: int) -> str:
        """`text`, cut to a token budget with a visible mark."""

    async def end(self, situation: Situation) -> None:
        """An episode is over: release what was kept for it."""
        return
