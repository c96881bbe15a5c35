"""Policies of roles: one adapter per role, and a chat service that plays a role."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.engine import AdapterVersions, ChatAnswer, ChatPolicy, PolicyEngine, SamplingParams
from agentrl.message import Message, broken_up, broken_up_message
from agentrl.render.renderer import Renderer
from agentrl.rollout.policies import ChatEpisodePolicy, EngineEpisodePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAdapters:
    """Adapters of an engine that play roles."""

    by_role: Mapping[str, str]
    """Name of each role's adapter; the model without adapters plays the other roles."""
    versions: AdapterVersions


class AdapterPolicy(EngineEpisodePolicy):
    """Policy of an engine with several adapters, each of which plays some of the roles.

    Args:
        engine: Samples the answers.
        renderer: Renderer of the engine's model.
        sampling: Sampling parameters of every turn, or a function that returns those of a turn that starts now.
        adapters: Adapters of roles.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        renderer: Renderer,
        sampling: SamplingParams | Callable[[], SamplingParams],
        *,
        adapters: RoleAdapters,
    ) -> None:
        super().__init__(engine, renderer, sampling)
        self.adapters = adapters

    def for_role(self, name: str, *, of_environment: bool = False) -> EngineEpisodePolicy:
        """Return the policy that answers with the role's adapter."""
        adapter = self.adapters.by_role.get(name)
        if adapter is None:
            return self
        own = copy.copy(self)
        own.adapter, own.adapter_versions = adapter, self.adapters.versions
        return own


class RolePolicy(ChatEpisodePolicy):
    """Policy of a role that is played by a chat service, which starts with its first answer."""

    def __init__(
        self, service: ChatPolicy, sampling: SamplingParams, *, break_up: Callable[[str], str] = broken_up
    ) -> None:
        super().__init__(_LazyChatService(service, break_up), sampling)

    async def close(self) -> None:
        """Close the service."""
        await self.service.close()


class _LazyChatService(ChatPolicy):
    """Chat service that starts with its first request."""

    def __init__(self, service: ChatPolicy, break_up: Callable[[str], str]) -> None:
        self.max_context, self.section = service.max_context, service.section
        self._break_up = break_up
        self._service = service
        self._starting = asyncio.Lock()
        self._is_started = False

    async def start(self) -> None:
        """Start the service, once."""
        async with self._starting:
            if not self._is_started:
                await self._service.start()
                self._is_started = True

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        request_id: str,
    ) -> ChatAnswer:
        """Answer a conversation.

        Special tokens in messages are broken up. Some services would interpret them, and the trained policy could use
        them to influence the role's answer.
        """
        await self.start()
        shown = [broken_up_message(message, self._break_up) for message in messages]
        return await self._service.chat(shown, tools, params, request_id)

    async def close(self) -> None:
        """Close the service, if it has started."""
        if self._is_started:
            await self._service.close()
