"""A client of OpenAI-compatible chat services: message format, retries, deadlines, keys and errors."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import ipaddress
import json
import logging
import os
import random
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from agentrl.engine import ChatAnswer, ChatPolicy, ErrorStatus, SamplingParams, StopReason
from agentrl.errors import EngineError, ResumableError, UsageError
from agentrl.errors.deadlines import async_boundary
from agentrl.message import Content, ImagePart, Message, TextPart, ToolCall

MAX_TOKENS = 2**31
"""Upper bound on the token counts that a service reports."""
CUT_OFF = frozenset({"length", "max_tokens", "model_length", "max_output_tokens"})
"""Finish reasons of answers that were cut off: OpenAI's, and those of other vendors in lower case."""
MAX_RETRY_WAIT_S = 30.0
TRANSIENT = frozenset({408, 409, 429})
"""Client errors after which the vendors' packages send a request again."""
SETTINGS = ("top_p", "temperature")
"""Sampling settings of which a model may accept only some values."""
REFUSES_VALUE = re.compile(r"unsupported|not support|deprecated|\bonly\b|cannot both", re.IGNORECASE)

_log = logging.getLogger(__name__)


class ServiceBusy(Exception):
    """Temporary error of a service, with the reason, the HTTP status, and the requested waiting time in seconds."""

    def __init__(self, why: str, status: int, wait_s: float | None) -> None:
        super().__init__(why)
        self.status, self.wait_s = status, wait_s


class Deviation(enum.Flag):
    """Differences of a model's requests from OpenAI's first ones, learned from the requests that a service rejects."""

    NONE = 0
    COMPLETION_LIMIT = enum.auto()
    """``max_completion_tokens`` instead of ``max_tokens``, as OpenAI's reasoning models require."""
    NO_TOP_P = enum.auto()
    NO_TEMPERATURE = enum.auto()
    NO_SEED = enum.auto()
    THINKING = enum.auto()
    """Earlier answers with their thinking, as DeepSeek and Kimi require."""
    IMAGES_AFTER_RESULTS = enum.auto()
    """Images of tool results in a user's message after them, as OpenAI requires."""
    PLAIN_NAMES = enum.auto()
    """Names of tools in letters, digits, ``_`` and ``-``, as OpenAI requires."""
    NO_EMPTY_TEXTS = enum.auto()
    """`_EMPTY` in place of empty texts, such as an empty answer, as Anthropic, Kimi and Mistral require."""

    def after(self, refusal: str, body: Mapping[str, Any]) -> Deviation:
        """Return the deviations of a rejected request with one more; the same ones if `refusal` suggests none.

        None of them changes what the request means: a temperature or ``top_p`` of 1 has no effect.
        """
        names = [tool["function"]["name"] for tool in body.get("tools", ())]
        plain = {_plain_name(name) for name in names}
        has_images = any(row["role"] == "tool" and isinstance(row["content"], list) for row in body["messages"])
        has_empty = any(map(_is_empty, body["messages"]))
        suggested = {
            Deviation.COMPLETION_LIMIT: "max_completion_tokens" in refusal,
            Deviation.THINKING: "reasoning_content" in refusal,
            Deviation.IMAGES_AFTER_RESULTS: has_images and "tool" in refusal.lower(),
            Deviation.PLAIN_NAMES: "name" in refusal and len(plain) == len(names) and plain != set(names),
            Deviation.NO_TOP_P: "top_p" in refusal and body.get("top_p") == 1,
            Deviation.NO_TEMPERATURE: "temperature" in refusal and body.get("temperature") == 1,
            Deviation.NO_SEED: "seed" in refusal and "seed" in body,
            Deviation.NO_EMPTY_TEXTS: has_empty and _REFUSES_EMPTY.search(refusal) is not None,
        }
        new = next((one for one, is_suggested in suggested.items() if is_suggested and one not in self), Deviation.NONE)
        return self | new


_OMITTED = {Deviation.NO_TOP_P: "top_p", Deviation.NO_TEMPERATURE: "temperature", Deviation.NO_SEED: "seed"}
_EMPTY = "(empty)"
_REFUSES_EMPTY = re.compile(r"empty|non-whitespace|at least one content|either content or tool_calls", re.IGNORECASE)
_IMAGES_FOLLOW = "The images follow in the next message."


def _is_empty(row: Mapping[str, Any]) -> bool:
    return row.get("content") == "" and not row.get("tool_calls")


def _plain_name(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64]


def encode_request(
    model: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    deviation: Deviation = Deviation.NONE,
) -> dict[str, Any]:
    """Return the body of a request to ``/chat/completions``.

    Raises:
        UsageError: `params` has a setting that such services do not support.
    """
    for name in ("stop_token_ids", "top_k", "min_p", "first_token"):
        if value := getattr(params, name):
            raise UsageError(f"an OpenAI-compatible service does not support {name}", got=value, expected="none")
    if Deviation.IMAGES_AFTER_RESULTS in deviation:
        messages = _with_images_after_results(messages)
    limit = "max_completion_tokens" if Deviation.COMPLETION_LIMIT in deviation else "max_tokens"
    body: dict[str, Any] = {
        "model": model,
        "messages": [_encode_message(message, deviation) for message in messages],
        "temperature": params.temperature,
        "top_p": params.top_p,
        limit: params.max_tokens,
    }
    if params.stop:
        body["stop"] = list(params.stop)
    if tools:
        body["tools"] = [_encode_tool(tool, deviation) for tool in tools]
    if params.seed is not None:
        body["seed"] = params.seed
    omitted = [name for one, name in _OMITTED.items() if one in deviation]
    return {name: value for name, value in body.items() if name not in omitted}


def _encode_message(message: Message, deviation: Deviation) -> dict[str, Any]:
    body = as_openai(message, keep_reasoning=Deviation.THINKING in deviation)
    if message.tool_calls and not message.content:
        body["content"] = None  # services behind Anthropic's and Amazon's APIs reject an empty text
    if Deviation.NO_EMPTY_TEXTS in deviation and _is_empty(body):
        body["content"] = _EMPTY
    if Deviation.THINKING in deviation and message.role == "assistant":
        body.setdefault("reasoning_content", " ")  # Kimi rejects an empty text here
    if Deviation.PLAIN_NAMES in deviation:
        for call in body.get("tool_calls", ()):
            call["function"]["name"] = _plain_name(call["function"]["name"])
    return body


def _encode_tool(tool: Mapping[str, Any], deviation: Deviation) -> dict[str, Any]:
    function = dict(tool["function"])
    if (parameters := function.get("parameters")) and parameters.get("type") == "object":
        function["parameters"] = {"properties": {}, **parameters}  # OpenAI rejects objects without properties
    if Deviation.PLAIN_NAMES in deviation:
        function["name"] = _plain_name(function["name"])
    return {**tool, "function": function}


def _with_images_after_results(messages: Sequence[Message]) -> list[Message]:
    """Move the images of consecutive tool results into a user's message after them."""
    moved: list[Message] = []
    images: list[ImagePart] = []
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        if message.role == "tool" and not isinstance(message.content, str):
            images += [part for part in message.content if isinstance(part, ImagePart)]
            texts = [part.text for part in message.content if isinstance(part, TextPart)]
            message = replace(message, content="\n".join([*texts, _IMAGES_FOLLOW]))
        moved.append(message)
        if images and (following is None or following.role != "tool"):
            moved.append(Message(role="user", content=tuple(images)))
            images = []
    return moved


def as_openai(message: Message, *, keep_reasoning: bool = False) -> dict[str, Any]:
    """Return a message in the format of Chat Completions and of conversation files, with images as ``data:`` URLs.

    `keep_reasoning` includes thinking as ``reasoning_content``, for files; services reject or ignore it.
    """
    body: dict[str, Any] = {"role": message.role, "content": _encode_content(message.content)}
    if keep_reasoning and message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    elif message.name is not None:
        body["name"] = message.name
    return body


def _encode_content(content: Content) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_encode_part(part) for part in content]


def _encode_part(part: TextPart | ImagePart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": part.data_url}}


def decode_answer(text: str, request_id: str = "") -> ChatAnswer:
    """Read the answer from the body of a successful response.

    Missing call ids are made from `request_id`.

    Raises:
        ServiceBusy: the body reports a temporary error of the service or of its upstream provider.
        EngineError: the body is not a chat completion, or reports another error.
    """
    if not text.strip():
        raise ServiceBusy("200, an empty response", 502, None)
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise EngineError(
            "the service's response is not valid JSON",
            got=repr(text[:200]),
            hint="check that the url is the base URL of the API, including /v1",
        ) from error
    try:
        if not body.get("choices") and body.get("error"):
            raise _reported_error(body["error"])
        choice = body["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        if finish == "error":
            raise _reported_error(choice.get("error") or body.get("error") or "finish_reason error")
        usage = body.get("usage") or {}
        content, thinking = _decode_content(message.get("content"))
        calls, problems = _decode_calls(message.get("tool_calls") or [], request_id)
        return ChatAnswer(
            message=Message(
                role="assistant",
                content=content or _text(message.get("refusal") or ""),
                tool_calls=calls,
                reasoning=_text(message.get("reasoning_content") or message.get("reasoning") or "") or thinking,
            ),
            prompt_tokens=_count(usage.get("prompt_tokens")),
            answer_tokens=_count(usage.get("completion_tokens")),
            stop_reason=StopReason.LENGTH if str(finish).lower() in CUT_OFF else StopReason.STOP,
            problems=problems,
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise EngineError("the service's response is not a chat completion", got=repr(text[:200])) from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} instead of text")
    return value


def _count(value: Any) -> int:
    """Return a number of tokens; 0 if the service does not report it."""
    count = int(value or 0)
    if not 0 <= count < MAX_TOKENS:
        raise ValueError(f"{value!r:.80} tokens")
    return count


def _reported_error(error: Any) -> EngineError | ServiceBusy:
    """Return the error that a service reports in the body of a response with status 200.

    A service that has already sent its status reports a later failure of its upstream provider this way; only the codes
    of client errors are permanent.
    """
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 502
    got = f"{status}, {error_message(json.dumps({'error': error}))!r}"
    if 400 <= status < 500 and status not in (408, 429):
        return ErrorStatus("the service reports an error in its answer", status=status, got=got)
    return ServiceBusy(got, status, None)


def _decode_content(content: Any) -> tuple[str, str | None]:
    """Return the text and the thinking of an answer's content: a text, or the parts of Mistral's reasoning models."""
    if content is None or isinstance(content, str):
        return content or "", None
    texts, thoughts = [], []
    for part in content:
        if part["type"] == "thinking":
            inner = part["thinking"]
            thoughts += [inner] if isinstance(inner, str) else [one["text"] for one in inner]
        elif part["type"] in ("text", "output_text"):
            texts.append(part["text"])
        else:
            raise ValueError(f"a part of type {part['type']!r}")
    return "".join(texts), "".join(thoughts) or None


def _decode_calls(rows: Sequence[Mapping[str, Any]], request_id: str) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    calls: list[ToolCall] = []
    problems: list[str] = []
    for index, row in enumerate(rows):
        name, written = _text(row["function"]["name"]), row["function"].get("arguments") or "{}"
        try:
            arguments = written if isinstance(written, dict) else json.loads(written)
        except json.JSONDecodeError as error:
            problems.append(f"the arguments of the call of {name} are not valid JSON: {error}")
            continue
        except RecursionError:
            problems.append(f"the arguments of the call of {name} are nested too deeply")
            continue
        if isinstance(arguments, dict):
            given = _text(row.get("id") or "")
            is_new = given and all(call.id != given for call in calls)
            calls.append(ToolCall(name=name, arguments=arguments, id=given if is_new else _call_id(request_id, index)))
        else:
            problems.append(f"the arguments of the call of {name} are not a JSON object: {written[:100]}")
    return tuple(calls), tuple(problems)


def _with_own_names(answer: ChatAnswer, tools: Sequence[Mapping[str, Any]]) -> ChatAnswer:
    names = {_plain_name(tool["function"]["name"]): tool["function"]["name"] for tool in tools}
    calls = tuple(replace(call, name=names.get(call.name, call.name)) for call in answer.message.tool_calls)
    return replace(answer, message=replace(answer.message, tool_calls=calls))


def _call_id(request_id: str, index: int) -> str:
    """Return an id for a call without one: nine characters, as Mistral's services require, unique in the episode."""
    return hashlib.sha256(f"{request_id}/{index}".encode()).hexdigest()[:9]


def error_message(text: str) -> str:
    """Return the service's error message: the one in its JSON, or the start of the text."""
    try:
        error = json.loads(text)["error"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return text[:200]
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)[:500]


class ServiceStatusError(ErrorStatus):
    """A service returned an error status, and a retry would not help.

    Attributes:
        text: Body of the response.
    """

    def __init__(self, url: str, status: int, got: str, text: str) -> None:
        super().__init__(f"{url} returned an error", status=status, got=got)
        self.text = text


class WrongService(UsageError):
    """The key, URL or model of a service is wrong.

    Attributes:
        status: HTTP status of the answer.
    """

    def __init__(self, what: str, *, status: int, got: str, hint: str) -> None:
        super().__init__(what, got=got, hint=hint)
        self.status = status


class ServiceEnded(ResumableError):
    """A service that has answered before now refuses the key, the model or the account.

    Attributes:
        status: HTTP status of the answer.
    """

    def __init__(self, what: str, *, status: int, got: str, hint: str) -> None:
        super().__init__(what, got=got, hint=hint)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Address of a service and limits of its requests."""

    url: str
    """Base URL, including ``/v1``."""
    model: str
    """Model name at the service."""
    api_key_variable: str
    """Environment variable that holds the key; if it is empty, no key is sent."""
    timeout_s: float
    """Seconds for one answer, including all retries."""
    retries: int = 4
    """Maximum number of retries after a rejected or failed request."""
    max_concurrent: int = 32
    """Maximum number of concurrent requests."""
    section: str
    """Config section of these settings, such as ``engine``, for hints."""


class ChatService(ChatPolicy):
    """Client of one chat service.

    Args:
        settings: URL, model, key, deadline and concurrency.
        first_wait_s: Seconds before the first retry; each further retry waits twice as long.
    """

    max_context = 131_072
    """Maximum number of tokens of prompt and answer, for budgets; the service may have another limit."""

    def __init__(self, settings: ServiceSettings, *, first_wait_s: float = 0.5) -> None:
        self.settings, self.section = settings, settings.section
        self._first_wait_s = first_wait_s
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._session: aiohttp.ClientSession | None = None
        self._deviation = Deviation.NONE
        self._has_answered = False
        self._closed = False

    async def start(self) -> None:
        """Open the connections; idempotent.

        Raises:
            EngineError: the client was closed.
        """
        if self._closed:
            raise EngineError("the connection to the service is closed")
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = service_session(self.settings.url, self.settings.api_key_variable, timeout)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        request_id: str,
        *,
        json_schema: Mapping[str, Any] | None = None,
    ) -> ChatAnswer:
        """Send a request; it is retried after overload, server errors and lost connections.

        A request that the service rejects is sent in another form that means the same, if there is one (`Deviation`).
        `json_schema` is the schema of the answer, sent as ``response_format``; `request_id` is for error messages.

        Raises:
            WrongService: the key, URL, model or a sampling setting is wrong, or the account has no credit.
            ServiceEnded: the same of a key, model or account with which the service has answered before.
            UsageError: `params` has a setting that the service does not support.
            ServiceStatusError: the service rejects the request, and a retry would not help.
            EngineError: no valid answer within the deadline and the retries.
        """
        await self.start()
        what = f"request {request_id} to {self.settings.url}"
        async with self._slots, async_boundary(EngineError, what, deadline_s=self.settings.timeout_s):
            deviation = self._deviation
            while True:
                body = encode_request(self.settings.model, messages, tools, params, deviation)
                if json_schema is not None:
                    described = {"name": "answer", "schema": dict(json_schema), "strict": True}
                    body["response_format"] = {"type": "json_schema", "json_schema": described}
                try:
                    answer = await self._ask_with_retries(body, what, request_id)
                except ServiceStatusError as error:
                    deviation = self._deviation_after(error, deviation, body)
                    continue
                self._has_answered = True
                if Deviation.NO_SEED in deviation & ~self._deviation:
                    _log.warning("%s does not accept a seed: its answers cannot be reproduced", self.settings.url)
                self._deviation |= deviation
                return _with_own_names(answer, tools) if Deviation.PLAIN_NAMES in deviation else answer

    def _deviation_after(self, error: ServiceStatusError, deviation: Deviation, body: Mapping[str, Any]) -> Deviation:
        """Return the deviations with which a rejected request is sent again; raise the error if there are none."""
        if error.status not in (400, 422):
            raise error
        if (following := deviation.after(error.text, body)) != deviation:
            return following
        for name in SETTINGS if REFUSES_VALUE.search(error.text) else ():
            if name in error.text and name in body:
                raise WrongService(
                    f"{self.settings.url} does not accept {name} {body[name]:g} for model {self.settings.model!r}",
                    status=error.status,
                    got=str(error.got),
                    hint=f"set this {name} to a value that the model accepts, which is often only 1",
                ) from error
        raise error

    async def _ask_with_retries(self, body: dict[str, Any], what: str, request_id: str) -> ChatAnswer:
        deadline = time.monotonic() + self.settings.timeout_s
        wait_s = self._first_wait_s
        for attempt in range(self.settings.retries + 1):
            try:
                return decode_answer(await self._post(body), request_id)
            except (ServiceBusy, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                requested_s = error.wait_s if isinstance(error, ServiceBusy) else None
                pause_s = max(requested_s or 0.0, wait_s) * random.uniform(1.0, 1.25)
                is_late = time.monotonic() + pause_s >= deadline
                if attempt == self.settings.retries or is_late:
                    got = f"{type(error).__name__}: {error}"
                    failed = f"{what} failed after {attempt + 1} attempt{'s' if attempt else ''}"
                    if is_late:
                        failed += f", and the next one would be after the deadline ({self.settings.timeout_s:g} s)"
                    if isinstance(error, ServiceBusy):
                        raise ErrorStatus(failed, status=error.status, got=got) from error
                    raise EngineError(failed, got=got) from error
            await asyncio.sleep(pause_s)
            wait_s = min(2 * wait_s, MAX_RETRY_WAIT_S)
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, body: dict[str, Any]) -> str:
        if self._session is None:
            raise EngineError("the connection to the service is closed")
        url = f"{self.settings.url.rstrip('/')}/chat/completions"
        async with self._session.post(url, json=body) as response:
            text = await response.text(errors="replace")
            if response.status != 200:
                self._raise_error(response.status, response.headers, text)
            return text

    def _raise_error(self, status: int, headers: Mapping[str, str], text: str) -> None:
        got, section, url = f"{status}, {error_message(text)!r}", self.settings.section, self.settings.url
        refusal = ServiceEnded if self._has_answered else WrongService
        if status == 402 or (status == 429 and "insufficient_quota" in text):
            hint = "add credit, then run the command again or resume the run"
            raise refusal(f"the account at {url} has no credit left", status=402, got=got, hint=hint)
        if status in TRANSIENT or (status >= 500 and status != 501):
            raise ServiceBusy(got, status, _requested_wait_s(headers))
        if status == 401 or (status == 403 and not self._has_answered):  # later, 403 is about the content of a request
            variable = f"the environment variable {self.settings.api_key_variable}"
            hint = f"put a valid key into {variable}, or name another in {section}.api_key_variable"
            raise refusal(f"{url} refuses the key", status=status, got=got, hint=hint)
        if status == 404:
            hint = f"check {section}.model, and that {section}.url is the base URL, including /v1"
            raise refusal(f"{url} does not know model {self.settings.model!r}", status=status, got=got, hint=hint)
        raise ServiceStatusError(url, status, got, text)

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _requested_wait_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a service asks to wait: in milliseconds, in seconds, or until a date."""
    after = headers.get("Retry-After", "")
    for text, unit in ((headers.get("Retry-After-Ms", ""), 0.001), (after, 1.0)):
        with suppress(ValueError):
            return max(0.0, float(text) * unit)
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
    return None


def service_session(url: str, api_key_variable: str, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    """Return a session for requests to a service, with its key and the proxy of the environment.

    ``HTTP_PROXY``, ``HTTPS_PROXY`` and ``NO_PROXY`` apply, except to services on this machine.
    """
    key = os.environ.get(api_key_variable)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(headers=headers, timeout=timeout, proxy=_proxy_of(url))


def _proxy_of(url: str) -> str | None:
    parts = urlsplit(url)
    host = parts.hostname or ""
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return None
    if host == "localhost" or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme, "")
    if proxy and "://" not in proxy:
        return f"http://{proxy}"
    return proxy if proxy.startswith("http") else None  # aiohttp speaks no SOCKS
