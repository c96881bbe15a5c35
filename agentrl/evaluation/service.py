"""An OpenAI-compatible service under evaluation: checked before the first episode, with hints in its refusals."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from agentrl.chat_service.wire import error_message
from agentrl.config.engines import OpenAIEngineConfig
from agentrl.errors import EngineError, UsageError
from agentrl.message import Message
from agentrl.policy import ChatAnswer, ChatPolicy, SamplingParams

CHECK_S = 10.0
"""Most seconds until a service has taken the connection of the check, and until it has answered."""
NO_CHAT = (404, 405, 501)
"""What servers answer that have no chat at the address."""
BASE_ADDRESS = "give the service's base address, up to and with /v1: --url http://127.0.0.1:8000/v1"


async def check_service(config: OpenAIEngineConfig) -> None:
    """Ask a service for nothing (a chat without messages), to know before the first episode whether it is there.

    Refusals of that request are fine, for they come from a chat service.

    Args:
        config: Its address and its name of the model.

    Raises:
        UsageError: something listens there that has no such chat or no such model.
        EngineError: nothing listens there.
    """
    timeout = aiohttp.ClientTimeout(total=None, connect=CHECK_S, sock_read=CHECK_S)
    key = os.environ.get(config.api_key_variable)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{config.url.rstrip('/')}/chat/completions"
    body = {"model": config.model, "messages": [], "max_tokens": 1}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(url, json=body) as response,
        ):
            if response.status in NO_CHAT:
                _raise_no_chat(config, url, response.status, error_message(await response.text(errors="replace")))
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise EngineError(
            f"the service at {config.url} cannot be reached", got=error, hint=f"start it, or {BASE_ADDRESS}"
        ) from error
    except aiohttp.ClientError:
        return  # it is there, and may do better with a real request; if not, the episodes say so


class HintingService(ChatPolicy):
    """A service whose refusals say what to set.

    Args:
        service: Answers.
        url: Its address, for messages.
    """

    def __init__(self, service: ChatPolicy, url: str) -> None:
        self.max_context = service.max_context
        self._service = service
        self._url = url

    async def start(self) -> None:
        """Start the service's client."""
        await self._service.start()

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        request_id: str,
    ) -> ChatAnswer:
        """Answer a conversation.

        Raises:
            UsageError: as the service does; and where it takes no tools, which no other request would mend.
            EngineError: as the service does.
        """
        try:
            return await self._service.chat(messages, tools, params, request_id)
        except EngineError as error:
            said = str(error.got)
            if "tool-call-parser" in said or "enable-auto-tool-choice" in said:
                raise UsageError(
                    f"{self._url} takes no tool calls",
                    got=said,
                    hint="set agent.loop=react_text, which needs none; or start vLLM with --enable-auto-tool-choice "
                    "--tool-call-parser NAME",
                ) from error
            if "context length" in said:
                raise EngineError(
                    f"{self._url} has a smaller context than the episode needs",
                    got=said,
                    hint="set agent.max_tokens to its context, or agent.max_answer_tokens lower",
                ) from error
            raise

    async def close(self) -> None:
        """Close the service's client."""
        await self._service.close()


def _raise_no_chat(config: OpenAIEngineConfig, url: str, status: int, said: str) -> None:
    is_named = re.search(rf"(?<!\w){re.escape(config.model)}(?!\w)", said) is not None
    if status == 404 and is_named and not said.lstrip().startswith("<"):
        raise UsageError(
            f"{config.url} does not know model {config.model!r}",
            got=f"{status}, {said!r}",
            hint="--model is the service's own name of the model; a server that agentrl serve --engine vllm started "
            "calls it policy",
        )
    raise UsageError(
        f"there is no chat service at {config.url}",
        got=f"{status} from {url}, {said!r}",
        expected="an OpenAI-compatible service",
        hint=BASE_ADDRESS,
    )
