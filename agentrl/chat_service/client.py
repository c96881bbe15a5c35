"""Asks one OpenAI-compatible chat service: retries, deadlines, keys, and failures by kind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from agentrl.chat_service.wire import decode_answer, encode_request, error_message
from agentrl.errors import EngineError, UsageError, async_boundary
from agentrl.message import Message
from agentrl.policy import ChatAnswer, ChatPolicy, SamplingParams

LONGEST_WAIT_S = 30.0


class _Busy(Exception):
    """The service may answer later; carries why, and the seconds that it asked to wait."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Where a service is, and how patiently it is asked."""

    url: str
    """Base address, up to and with ``/v1``."""
    model: str
    """Name of the model at the service."""
    api_key_variable: str
    """Environment variable that holds the key; no key is sent where it is empty."""
    timeout_s: float
    """Deadline of one answer, with all its retries."""
    retries: int = 4
    """New attempts after a refused or failed request."""
    max_concurrent: int = 32
    """Most requests at once."""
    section: str
    """Where the user sets all this, for hints: ``engine``."""


class ChatService(ChatPolicy):
    """Talks to a service in text.

    Args:
        settings: Address, model, key, deadline, concurrency.
        max_context: Most tokens of prompt and answer together, for budgets; the service decides in the end.
        first_wait_s: Seconds before the first retry; each further one waits twice as long.
    """

    def __init__(self, settings: ServiceSettings, *, max_context: int = 131_072, first_wait_s: float = 0.5) -> None:
        self.settings = settings
        self.max_context = max_context
        self._first_wait_s = first_wait_s
        self._places = asyncio.Semaphore(settings.max_concurrent)
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
            key = os.environ.get(self.settings.api_key_variable)
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
        body = encode_request(self.settings.model, messages, tools, params)
        await self.start()
        what = f"request {request_id} to {self.settings.url}"
        async with async_boundary(EngineError, what, deadline_s=self.settings.timeout_s), self._places:
            return await self._ask_with_retries(body, what)

    async def _ask_with_retries(self, body: dict[str, Any], what: str) -> ChatAnswer:
        wait_s = self._first_wait_s
        for attempt in range(self.settings.retries + 1):
            try:
                return decode_answer(await self._post(body))
            except (_Busy, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                if attempt == self.settings.retries:
                    got = f"{type(error).__name__.strip('_')}: {error}"
                    raise EngineError(f"{what} failed after {attempt + 1} attempts", got=got) from error
                asked = error.wait_s if isinstance(error, _Busy) else None
            await asyncio.sleep(wait_s if asked is None else min(asked, LONGEST_WAIT_S))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, body: dict[str, Any]) -> str:
        if self._session is None:
            raise EngineError("the connection to the service is closed")
        url = f"{self.settings.url.rstrip('/')}/chat/completions"
        async with self._session.post(url, json=body) as response:
            text = await response.text(errors="replace")
            if response.status != 200:
                self._refused(response.status, response.headers, text)
            return text

    def _refused(self, status: int, headers: Mapping[str, str], text: str) -> None:
        said, section = f"{status}, {error_message(text)!r}", self.settings.section
        if status == 429 or (status >= 500 and status != 501):
            raise _Busy(said, _seconds(headers.get("Retry-After")))
        if status in (401, 403):
            variable = f"the environment variable {self.settings.api_key_variable}"
            hint = f"put a valid key into {variable}, or name another in {section}.api_key_variable"
            raise UsageError(f"{self.settings.url} refuses the key", got=said, hint=hint)
        if status == 404:
            hint = f"check {section}.model, and that {section}.url is the base address, up to and with /v1"
            raise UsageError(f"{self.settings.url} does not know model {self.settings.model!r}", got=said, hint=hint)
        raise EngineError(f"{self.settings.url} refused a request", got=said)

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
