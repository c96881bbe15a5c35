"""The gateway: a server in the run's process that implements the APIs of OpenAI and Anthropic.

client ──HTTP──► session by key or path ──► dialect reads ──► `GatewaySession` answers ──► dialect writes

Every episode has a session with its own key and path (``/s/ID/v1/…``): a program whose key is fixed uses the path, one
whose base URL is fixed uses the key. A session that has ended returns an error that clients do not retry.
"""

from __future__ import annotations

import asyncio
import codecs
import hmac
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

from agentrl.agent_loop import Episode
from agentrl.errors import AgentRLError, shorten
from agentrl.gateway.anthropic_messages import AnthropicMessages
from agentrl.gateway.chat_completions import ChatCompletions
from agentrl.gateway.dialect import BadRequest, Dialect, Event, Reply
from agentrl.gateway.fields import read_feedback, refuse_unknown, take
from agentrl.gateway.history import chain_of
from agentrl.gateway.pending import NO_SIDE_CALLS, PendingRequest, UntrainedRequestRules, digest_of, off_loop
from agentrl.gateway.refusals import TOO_DEEP, SessionOver, Unavailable, dialect_of, refuse_path, refuse_route
from agentrl.gateway.responses import Responses, reply_referred_to
from agentrl.gateway.session import GatewaySession
from agentrl.message import encodable_json, text_of
from agentrl.remote.listening import (
    DEEPEST,
    Handler,
    Listener,
    is_deep,
    is_own_page,
    make_runner,
    own_names,
    read_bytes_of,
)

__all__ = ["BadRequest", "Gateway", "GatewaySession", "Unavailable", "UntrainedRequestRules", "Verify", "read_feedback"]

_log = logging.getLogger(__name__)
DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Responses(), AnthropicMessages())
MAX_BODY_BYTES = 64 << 20
MAX_CONNECTIONS = 4096
COMMENT_S = 5.0
"""Seconds between keep-alive messages of a stream that waits for its answer."""
RETRY_AFTER_S = 2
RETRY_COUNT = "x-stainless-retry-count"
MODEL = "policy"
"""Name of the model in the list of models."""
VERSIONS = ("/v1", "/openai/v1", "/openai", "/openai/deployments/{deployment:.+}")
"""Beginnings of routes: the vendors', and those of OpenAI's clients for Azure."""
KEY_HEADERS = ("x-api-key", "api-key")
"""Headers with a client's key, besides ``Authorization: Bearer KEY``."""
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
LINE_BREAKS = {mark.encode(): rb"\u%04x" % ord(mark) for mark in "\x85\u2028\u2029"}
"""Characters at which some clients split lines, as JSON escapes; events end only at line feeds."""


Verify: TypeAlias = Callable[[], Awaitable[None]]
"""Check of a request, which raises `BadRequest` if it is malformed."""
Opener: TypeAlias = Callable[[str | None, Verify], Awaitable[Sequence[GatewaySession]]]
FeedbackTaker: TypeAlias = Callable[[str, Mapping[str, Any], bool], Awaitable[Mapping[str, Any]]]


class Gateway:
    """Server for the sessions of one process.

        gateway = Gateway()
        await gateway.start()
        async with gateway.session(episode) as session:
            run_a_program(base_url=gateway.url_of(session), api_key=session.key)

    Args:
        host: Address to listen on; by default reachable from this machine only.
        port: Port; 0 takes a free one.
        key: Key that all clients must send, if `opener` makes the sessions.
        opener: Makes or finds the sessions for the session name in the path (``None`` if the path has none); it awaits
            its second argument before it makes one, so that malformed requests open no session. The first session
            takes new conversations; the others only continue the conversations that they have recorded.
        feedback: Takes the feedback on a session of `opener`: its name, the body, and True if the client marks the
            request as a retry. Returns the body of the answer.
        feedback_key: Key of feedback; `key` by default.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
        opener: Opener | None = None,
        feedback: FeedbackTaker | None = None,
        feedback_key: str | None = None,
    ) -> None:
        self._host, self._port = host, port
        self._key = key
        self._opener = opener
        self._feedback, self._feedback_key = feedback, feedback_key or key
        self._names = own_names(host)
        self._sessions: dict[str, GatewaySession] = {}
        self._by_key: dict[str, GatewaySession] = {}
        self._runners: dict[str, web.AppRunner] = {}
        self._warned: set[str] = set()
        self._listener: Listener | None = None
        self._starting = asyncio.Lock()
        self.url = ""
        """Base URL after `start`."""

    async def start(self) -> None:
        """Start listening; idempotent.

        Raises:
            UsageError: the port is taken.
        """
        async with self._starting:
            if self._listener is None:
                listener = Listener(self._application(), most_connections=MAX_CONNECTIONS)
                self.url = await listener.start(self._host, self._port)
                self._listener = listener

    async def close(self) -> None:
        """End all sessions and stop listening; idempotent."""
        for session in list(self._sessions.values()):
            await self._end(session)
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()

    @asynccontextmanager
    async def session(
        self,
        episode: Episode,
        *,
        side_calls: UntrainedRequestRules = NO_SIDE_CALLS,
        steps: bool = True,
        holds_forms: bool = True,
    ) -> AsyncIterator[GatewaySession]:
        """Open a session for an episode until the block ends; the arguments are those of `GatewaySession`."""
        session = GatewaySession(
            episode, side_calls=side_calls, steps=steps, holds_forms=holds_forms, warned=self._warned
        )
        self._sessions[session.id] = self._by_key[session.key] = session
        try:
            yield session
        finally:
            await self._end(session)

    def url_of(self, session: GatewaySession) -> str:
        """Return the base URL of a session, without ``/v1``."""
        return f"{self.url}{self.path_of(session)}"

    def path_of(self, session: GatewaySession) -> str:
        """Return the path prefix of a session's URLs."""
        return f"/s/{session.id}"

    async def protocol_of(self, session: GatewaySession) -> Callable[[], asyncio.BaseProtocol]:
        """Make the protocol for connections that a sandbox forwards; they reach only this session."""
        runner = make_runner(self._application(web.middleware(_admit_only(session))))
        await runner.setup()
        self._runners[session.id] = runner
        assert runner.server is not None
        return runner.server

    async def _end(self, session: GatewaySession) -> None:
        self._sessions.pop(session.id, None)
        self._by_key.pop(session.key, None)
        await session.close()
        if (runner := self._runners.pop(session.id, None)) is not None:
            await runner.cleanup()

    def _application(self, *middlewares: Middleware) -> web.Application:
        application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
        for prefix in ("", "/s/{session}"):
            for dialect in DIALECTS:
                for version in VERSIONS:
                    application.router.add_post(prefix + version + dialect.route, self._answering(dialect))
                    if dialect.count_route is not None:
                        application.router.add_post(prefix + version + dialect.count_route, self._counting(dialect))
            application.router.add_get(prefix + "/v1/models", self._models)
            application.router.add_get(prefix + "/v1/models/{model:.+}", self._models)
            for path in {prefix, prefix + "/", prefix + "/api/hello"} - {""}:  # Claude Code probes its base URL
                application.router.add_get(path, _health)
        if self._feedback is not None:
            for path in ("/s/{session}/feedback", "/s/{session}/v1/feedback"):  # the base addresses of both vendors
                application.router.add_post(path, self._take_feedback)
        application.router.add_post("/s/{session}/reward", self._reward)
        application.router.add_post("/s/{session}/step", self._step)
        application.router.add_get("/health", _health)
        application.router.add_route("*", "/{rest:.*}", _unknown)
        return application

    def _answering(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                sessions, body, raw = await self._sessions_and_body(request, lambda body: dialect.read(body, {}))
                is_retry = _is_retry(request)
                session = await session_of_history(sessions, dialect, body, raw, is_retry=is_retry)
                pending = await session.begin(dialect, body, raw, is_retry=is_retry)
                if pending.request.stream:
                    return await _stream(request, dialect, session, pending)
                return _json(dialect.write(pending.request, await session.finish(pending)))
            except Exception as error:
                return _refusal(dialect, error)

        return answer

    async def _sessions_and_body(
        self, request: web.Request, read: Callable[[Mapping[str, Any]], object]
    ) -> tuple[Sequence[GatewaySession], Mapping[str, Any], bytes]:
        """Return the candidate sessions of a request, its body, and the body's bytes.

        `read` checks the body of a request that opens a session.

        Raises:
            BadRequest: the request is malformed, or no session matches it.
        """
        if self._opener is None:
            sessions = self._running_sessions_of(request)
            return sessions, *await _read(request)
        self._check_client(request, self._key)
        body, raw = await _read(request)

        async def verify() -> None:
            try:
                await off_loop(len(raw), read, body)
            except RecursionError as error:
                raise BadRequest(TOO_DEEP, code="invalid_json") from error

        return await self._opener(request.match_info.get("session"), verify), body, raw

    def _running_sessions_of(self, request: web.Request) -> Sequence[GatewaySession]:
        """Return the session of a request by its path and key, which must agree if both name a session.

        Raises:
            BadRequest: no session matches, or the key belongs to another session.
        """
        by_key = self._by_key.get(_key_of(request))
        name = request.match_info.get("session")
        if name is None:
            if by_key is None:
                raise BadRequest(
                    f"the key does not belong to a running episode{_key_hint(request)}",
                    status=401,
                    code="invalid_api_key",
                )
            return [by_key]
        session = self._sessions.get(name)
        if session is None:
            raise BadRequest("the path does not belong to a running episode", status=404, code="not_found")
        if by_key is not None and by_key is not session:
            raise BadRequest("the key belongs to another episode", status=401, code="invalid_api_key")
        return [session]

    def _check_client(self, request: web.Request, key: str | None) -> None:
        """Check that a request has the key that all clients must send; without one, that it is not a foreign page's.

        Raises:
            BadRequest: it has another key, or comes from a page of another web site.
        """
        if key is None:
            self._refuse_foreign_page(request)
        elif not hmac.compare_digest(_bytes(_key_of(request)), _bytes(key)):
            raise BadRequest(
                f"the key is not this gateway's key{_key_hint(request)}", status=401, code="invalid_api_key"
            )

    def _refuse_foreign_page(self, request: web.Request) -> None:
        """Refuse requests from pages of other web sites; only browsers send ``Origin``.

        Raises:
            BadRequest: the request's Host or Origin is not one of this server's names.
        """
        if not is_own_page(request, self._names):
            raise BadRequest(
                "without a key this gateway accepts only requests from this machine to its own names: "
                f"got Host {shorten(request.host)}, Origin {shorten(request.headers.get('Origin'))}. "
                "Start it with --key-variable (of a run: agent.options.key_variable), and send the key",
                status=403,
                code="forbidden",
            )

    def _counting(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def count_tokens(request: web.Request) -> web.StreamResponse:
            try:
                sessions, body, raw = await self._sessions_and_body(request, lambda body: dialect.read_count(body, {}))
                earlier = reply_referred_to(body)
                session = next((one for one in sessions if earlier is not None and one.has_reply(earlier)), sessions[0])
                return _json(dialect.write_count(await off_loop(len(raw), session.count_tokens, dialect, body)))
            except Exception as error:
                return _refusal(dialect, error)

        return count_tokens

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            if self._opener is None:
                self._running_sessions_of(request)
            else:
                self._check_client(request, self._key)  # a list of models opens no session
        except BadRequest as error:
            return _refusal(dialect_of(request, DIALECTS), error)
        if (name := request.match_info.get("model")) is not None:
            return _json(_model(name))
        return _json(
            {"object": "list", "data": [_model(MODEL)], "has_more": False, "first_id": MODEL, "last_id": MODEL}
        )

    def _trusted_session_of(self, request: web.Request) -> GatewaySession:
        """Return the session of a request that only the program may send, not the tools that the policy calls."""
        session = self._sessions.get(request.match_info["session"])
        if session is None or not hmac.compare_digest(_bytes(_key_of(request)), _bytes(session.secret)):
            raise BadRequest("the secret is not this episode's secret", status=401, code="invalid_api_key")
        return session

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._trusted_session_of(request)
            session.take_reward((await _read(request))[0])
            return _json({"ok": True})
        except Exception as error:
            return _refusal(DIALECTS[0], error)

    async def _take_feedback(self, request: web.Request) -> web.StreamResponse:
        assert self._feedback is not None
        try:
            self._check_client(request, self._feedback_key)
            body, _ = await _read(request)
            return _json(await self._feedback(request.match_info["session"], body, _is_retry(request)))
        except Exception as error:
            return _refusal(DIALECTS[0], error)

    async def _step(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._trusted_session_of(request)
            body, _ = await _read(request)
            refuse_unknown(body, ("action",))
            result = await session.step(take(body, "action", str))
            return _json({"observation": text_of(result.observation), "done": result.done})
        except Exception as error:
            return _refusal(DIALECTS[0], error)


def _model(name: str) -> Mapping[str, Any]:
    """Describe a model with the fields of both vendors; the policy answers under every name."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _bytes(key: str) -> bytes:
    return key.encode(errors="replace")


def _admit_only(session: GatewaySession) -> Middleware:
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.get("session") != session.id:
            return refuse_path(request, DIALECTS)
        return await handler(request)

    return check


def _key_of(request: web.Request) -> str:
    """Return the key that a client sends in a vendor's header."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return bearer.strip()
    return next((request.headers[name] for name in KEY_HEADERS if name in request.headers), "")


def _key_hint(request: web.Request) -> str:
    """Tell a client that sends no key in a header that is read which headers are."""
    return "" if _key_of(request) else ": send it as Authorization: Bearer KEY, x-api-key or api-key"


def _is_retry(request: web.Request) -> bool:
    """Return True if the client marks a request as a retry, as the vendors' packages do."""
    return request.headers.get(RETRY_COUNT, "0") not in ("", "0")


async def _read(request: web.Request) -> tuple[Mapping[str, Any], bytes]:
    raw = await read_bytes_of(request, MAX_BODY_BYTES)
    try:
        body = await off_loop(len(raw), _parse, raw)
    except ValueError as error:
        raise BadRequest(f"the request is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise BadRequest("the request must be a JSON object", code="invalid_json")
    if raw.count(b"[") + raw.count(b"{") > DEEPEST and await off_loop(len(raw), is_deep, body):
        raise BadRequest(f"the request has more than {DEEPEST} levels of lists and objects", code="invalid_json")
    if (deployment := request.match_info.get("deployment")) is not None:
        body.setdefault("model", deployment)
    return body, raw


def _parse(raw: bytes) -> Any:
    """Parse a request; agents in JavaScript may cut texts within a pair of surrogates, and PowerShell writes a mark."""
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return orjson.loads(raw)
    except ValueError:
        if b"\\u" not in raw:
            raise
        return orjson.loads(encodable_json(raw))


async def _stream(
    request: web.Request, dialect: Dialect, session: GatewaySession, pending: PendingRequest
) -> web.StreamResponse:
    """Send an answer as events while it is sampled."""
    finished = asyncio.ensure_future(session.finish(pending))
    started = asyncio.ensure_future(pending.streaming.wait_for_start())
    response = web.StreamResponse(headers=STREAM_HEADERS)
    try:
        await asyncio.wait({finished, started}, timeout=COMMENT_S, return_when=asyncio.FIRST_COMPLETED)
        if finished.done() and finished.exception() is not None:
            return _refusal(dialect, finished.exception())
        await response.prepare(request)
        async with aclosing(_events(dialect, pending, finished)) as events:
            async for event in events:
                await response.write(event)
        await response.write_eof()
    except ConnectionResetError:  # the client left; sampling continues, and a retry receives the answer
        pass
    finally:
        started.cancel()
        finished.cancel()
        await asyncio.wait({started, finished})
    return response


async def _events(
    dialect: Dialect, pending: PendingRequest, finished: asyncio.Future[Reply]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a reply, keep-alive messages while it waits, and an error if the request fails."""
    events = dialect.events(pending.request, pending.streaming)
    following: asyncio.Future[Event | None] = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            waited: set[asyncio.Future[Any]] = {following} if finished.done() else {following, finished}
            failed = finished.done() and finished.exception() is not None
            await asyncio.wait(waited, timeout=0 if failed else COMMENT_S, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                if (event := following.result()) is None:
                    return
                yield _event_bytes(event)
                following = asyncio.ensure_future(anext(events, None))
            elif finished.done() and (error := finished.exception()) is not None:
                status, headline, code, _ = _status_of(error)
                yield _event_bytes(("error", dialect.error(status, headline, code=code)))
                return
            elif not finished.done():
                yield dialect.keep_alive
    finally:
        following.cancel()


def _event_bytes(event: Event) -> bytes:
    name, data = event
    text = data.encode() if isinstance(data, str) else orjson.dumps(data)
    for mark, escape in LINE_BREAKS.items():
        text = text.replace(mark, escape)
    return (b"" if name is None else b"event: " + name.encode() + b"\n") + b"data: " + text + b"\n\n"


def _status_of(error: BaseException | None) -> tuple[int, str, str, str | None]:
    """Return the HTTP status of an error, its text, its error code, and the field that it names."""
    match error:
        case BadRequest():
            return error.status, error.message, error.code, error.field
        case SessionOver():
            return 403, str(error), "episode_ended", None
        case Unavailable():
            return error.status, str(error), "unavailable", None
        case web.HTTPRequestEntityTooLarge():
            return 413, f"the request is larger than {MAX_BODY_BYTES >> 20} MiB", "too_large", None
        case web.HTTPRequestTimeout():
            return 408, "the request did not arrive in time", "timeout", None
        case web.HTTPUnsupportedMediaType():
            return 415, error.reason, "unsupported", None
        case web.HTTPBadRequest():
            return 400, error.reason, "invalid_body", None
        case ConnectionError():
            return 400, "the client closed the connection", "client_left", None
        case AgentRLError():
            return 500, str(error), "failed", None
    _log.error("a request to the gateway failed", exc_info=error)
    return 500, f"the gateway failed: {type(error).__name__}", "internal", None


def _refusal(dialect: Dialect, error: BaseException | None) -> web.Response:
    status, text, code, field = _status_of(error)
    headers = {"retry-after": str(RETRY_AFTER_S)} if isinstance(error, Unavailable) else {"x-should-retry": "false"}
    if isinstance(error, web.HTTPUnsupportedMediaType):
        headers["Accept-Encoding"] = error.headers["Accept-Encoding"]
    return _json(dialect.error(status, text, field=field, code=code), status=status, headers=headers)


def _json(data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=json.dumps(data).encode(), status=status, headers=headers, content_type="application/json")


async def _health(_request: web.Request) -> web.Response:
    return _json({"status": "ok"})


async def _unknown(request: web.Request) -> web.Response:
    return await refuse_route(request, DIALECTS)


async def session_of_history(
    sessions: Sequence[GatewaySession], dialect: Dialect, body: Mapping[str, Any], raw: bytes, *, is_retry: bool
) -> GatewaySession:
    """Return the session whose conversation a request continues; the first session for a new conversation.

    `is_retry` is True if the client marks the request as a retry.
    """
    first = sessions[0]
    if len(sessions) == 1:
        return first
    if is_retry:
        digest = await off_loop(len(raw), digest_of, dialect.path, raw)
        if sent := next((session for session in sessions if session.has_request(digest)), None):
            return sent
    found = await off_loop(len(raw), _find_continued, sessions, dialect, body)
    return first if found is None else found


def _find_continued(
    sessions: Sequence[GatewaySession], dialect: Dialect, body: Mapping[str, Any]
) -> GatewaySession | None:
    if (reply := reply_referred_to(body)) is not None:
        return next((session for session in sessions if session.has_reply(reply)), None)
    try:
        request = dialect.read(body, {})
        chain = chain_of(request.messages, request.tools)
    except (BadRequest, RecursionError):
        return None
    return next((session for session in sessions if session.has_answer_of(chain, request)), None)
