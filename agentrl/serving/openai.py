"""Any OpenAI-compatible chat service as a policy, for evaluation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from agentrl.config.engines import OpenAIEngineConfig
from agentrl.errors import EngineError, UsageError, async_boundary
from agentrl.message import Message
from agentrl.policy import ChatAnswer, ChatPolicy, SamplingParams
from agentrl.serving.chat_wire import decode_answer, encode_request, error_message

LONGEST_WAIT_S = 30.0


class _Busy(Exception):
    """The service may answer later; carries why, and the seconds that it asked to wait."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class OpenAIEngine(ChatPolicy):
    """Talks to a service in text.

    Args:
        config: Address, model, key, deadline of an answer with all its retries, concurrency.
        max_context: Most tokens of prompt and answer together, for budgets; the service decides in the end.
        first_wait_s: Seconds before the first retry; each further one waits twice as long.
    """

    def __init__(self, config: OpenAIEngineConfig, *, max_context: int = 131_072, first_wait_s: float = 0.5) -> None:
        self.config = config
        self.max_context = max_context
        self._first_wait_s = first_wait_s
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def start(self) -> None:
        """Open the connections; idempotent.

        Raises:
            EngineError: closed.
        """
        if self._closed:
            raise EngineError("the connection to the service is closed")
        if self._session is None:
            key = os.environ.get(self.config.api_key_variable)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        request_id: str,
    ) -> ChatAnswer:
        """Ask the service; overload, server errors and lost connections are tried again.

        Raises:
            UsageError: wrong key, address or model; a setting that the service does not have.
            EngineError: no usable answer within the deadline and the retries.
        """
        body = encode_request(self.config.model, messages, tools, params)
        await self.start()
        what = f"request {request_id} to {self.config.url}"
        async with async_boundary(EngineError, what, deadline_s=self.config.timeout_s), self._places:
            return await self._ask_with_retries(body, what)

    async def _ask_with_retries(self, body: dict[str, Any], what: str) -> ChatAnswer:
        wait_s = self._first_wait_s
        for attempt in range(self.config.retries + 1):
            try:
                return decode_answer(await self._post(body))
            except (_Busy, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                if attempt == self.config.retries:
                    got = f"{type(error).__name__.strip('_')}: {error}"
                    raise EngineError(f"{what} failed after {attempt + 1} attempts", got=got) from error
                asked = error.wait_s if isinstance(error, _Busy) else None
            await asyncio.sleep(wait_s if asked is None else min(asked, LONGEST_WAIT_S))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, body: dict[str, Any]) -> str:
        if self._session is None:
            raise EngineError("the connection to the service is closed")
        url = f"{self.config.url.rstrip('/')}/chat/completions"
        async with self._session.post(url, json=body) as response:
            text = await response.text(errors="replace")
            if response.status != 200:
                self._refused(response.status, response.headers, text)
            return text

    def _refused(self, status: int, headers: Mapping[str, str], text: str) -> None:
        said = f"{status}, {error_message(text)!r}"
        if status == 429 or (status >= 500 and status != 501):
            raise _Busy(said, _seconds(headers.get("Retry-After")))
        if status in (401, 403):
            variable = self.config.api_key_variable
            hint = (
                f"put a valid key into the environment variable {variable}, or name another in engine.api_key_variable"
            )
            raise UsageError(f"{self.config.url} refuses the key", got=said, hint=hint)
        if status == 404:
            hint = "check engine.model, and that engine.url is the base address, up to and with /v1"
            raise UsageError(f"{self.config.url} does not know model {self.config.model!r}", got=said, hint=hint)
        raise EngineError(f"{self.config.url} refused a request", got=said)

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else max(0.0, float(header))
    except ValueError:
        return None  # the header may also be a date: wait as long as without it
