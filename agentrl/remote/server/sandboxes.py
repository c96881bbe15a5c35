"""Server of sandboxes (`agentrl sandbox serve`), which shares the core of the environment server.

Each client has its own sandbox. Calls may be retried: each has an id and is executed once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from aiohttp import web

from agentrl.errors import UsageError
from agentrl.remote.listening import Listener, guard, read_body
from agentrl.remote.server.server import ServerSettings, error_answers, respond, to_response
from agentrl.remote.server.session import Clock, Leases, ServerReply, error_answer
from agentrl.remote.wire import HEALTH, Body, Refusal, RefusalKind, field, to_json, whole_number
from agentrl.sandbox import Command, Limits, Sandbox, SandboxProcess, SandboxSpec, open_sandbox
from agentrl.sandbox.http import (
    MAX_CALL_BYTES,
    MAX_REQUEST_BYTES,
    PROTOCOL,
    SANDBOXES,
    VERSION,
    largest_request,
    read_bytes,
    write_bytes,
    write_result,
)
from agentrl.sandbox.spec import NO_NETWORK

KEPT = 64
"""Number of finished answers that are kept for retries."""
KEPT_NAMES = 1000
"""Number of names of closed sandboxes that cannot be opened again."""


@dataclass(frozen=True, slots=True)
class _SandboxCall:
    checksum: bytes
    work: asyncio.Task[ServerReply]


class ServedSandbox:
    """Sandbox and its calls, several of which may run at the same time."""

    def __init__(self, sandbox: Sandbox, clock: Clock) -> None:
        self.sandbox = sandbox
        self.processes: list[SandboxProcess] = []
        self._clock = clock
        self._calls: dict[str, _SandboxCall] = {}
        self._used_at = clock()

    @property
    def idle_s(self) -> float:
        """Seconds since the last call was answered; 0 while one is running."""
        return 0.0 if any(not call.work.done() for call in self._calls.values()) else self._clock() - self._used_at

    async def answer(self, call_id: str, request: bytes, do: Callable[[], Awaitable[dict[str, Any]]]) -> ServerReply:
        """Execute a call, or return the answer of the call that it retries.

        Raises:
            Refusal: the id was used for a different call.
        """
        checksum = hashlib.sha256(request).digest()
        call = self._calls.get(call_id)
        if call is None:
            call = self._calls[call_id] = _SandboxCall(checksum, asyncio.create_task(self._carry_out(do)))
            self._forget()
        elif call.checksum != checksum:
            raise Refusal(RefusalKind.NUMBER, f"the id {call_id} was used for a different call")
        return await asyncio.shield(call.work)

    def cancel(self, call_id: str) -> None:
        """Cancel a call whose client no longer waits for it."""
        call = self._calls.get(call_id)
        if call is not None:
            call.work.cancel()

    async def close(self) -> None:
        """Close the sandbox and cancel its running calls."""
        await self.sandbox.close()
        for call in self._calls.values():
            call.work.cancel()

    def _forget(self) -> None:
        done = [call_id for call_id, call in self._calls.items() if call.work.done()]
        for call_id in done[:-KEPT]:
            del self._calls[call_id]

    async def _carry_out(self, do: Callable[[], Awaitable[dict[str, Any]]]) -> ServerReply:
        try:
            return ServerReply(200, to_json(await do()))
        except Exception as error:  # the client receives every error
            return error_answer(error)
        except asyncio.CancelledError:
            return error_answer(Refusal(RefusalKind.REQUEST, "the call was cancelled"))
        finally:
            self._used_at = self._clock()


SandboxMethod: TypeAlias = Callable[[ServedSandbox, Body], Awaitable[dict[str, Any]]]


def _command(body: Body) -> Command:
    words = body.get("command")
    parts = [words] if isinstance(words, str) else words
    if isinstance(parts, list) and parts and all(isinstance(word, str) for word in parts):
        return cast("Command", words)
    raise Refusal(RefusalKind.REQUEST, f"'command' of the request is {words!r:.80}, expected text or a list of texts")


def variables(body: Body) -> dict[str, str]:
    """Read the environment variables of a request.

    Raises:
        Refusal: a name or value is invalid.
    """
    found: dict[str, Any] = field(body, "env", dict)
    for name, value in found.items():
        if not isinstance(value, str) or "\0" in name + value or not name or "=" in name:
            raise Refusal(
                RefusalKind.REQUEST,
                f"'env' of the request: {name!r:.80} is not a variable name, or its value is not text",
            )
    return found


def _folder(body: Body) -> str | None:
    found = None if body.get("cwd") is None else field(body, "cwd", str)
    if found is not None and "\0" in found:
        raise Refusal(RefusalKind.REQUEST, "'cwd' of the request has a NUL character")
    return found


def _limits(body: Body) -> Limits | None:
    limits = body.get("limits")
    try:
        return None if limits is None else Limits(**limits)
    except TypeError as error:
        raise Refusal(RefusalKind.REQUEST, f"'limits' of the request: {error}") from error


def _arguments(body: Body) -> dict[str, Any]:
    return {"cwd": _folder(body), "env": variables(body), "limits": _limits(body)}


def _data(body: Body, name: str = "data") -> bytes:
    try:
        return read_bytes(field(body, name, str))
    except ValueError as error:
        raise Refusal(RefusalKind.REQUEST, f"{name!r} of the request is not valid base64: {error}") from error


def _process(served: ServedSandbox, body: Body) -> SandboxProcess:
    number = field(body, "process", int)
    if not 0 <= number < len(served.processes):
        raise Refusal(RefusalKind.REQUEST, f"unknown process {number}: {len(served.processes)} were started")
    return served.processes[number]


async def _exec(served: ServedSandbox, body: Body) -> dict[str, Any]:
    return write_result(await served.sandbox.exec(_command(body), stdin=_data(body, "stdin"), **_arguments(body)))


async def _spawn(served: ServedSandbox, body: Body) -> dict[str, Any]:
    served.processes.append(await served.sandbox.spawn(_command(body), **_arguments(body)))
    return {"process": len(served.processes) - 1}


async def _read(served: ServedSandbox, body: Body) -> dict[str, Any]:
    most = whole_number(body, "most", least=1, most=MAX_REQUEST_BYTES)
    return {"data": write_bytes(await served.sandbox.read(field(body, "path", str), most=most))}


async def _write(served: ServedSandbox, body: Body) -> dict[str, Any]:
    executable = field(body, "executable", bool)
    await served.sandbox.write(field(body, "path", str), _data(body), executable=executable)
    return {}


async def _list(served: ServedSandbox, body: Body) -> dict[str, Any]:
    entries = await served.sandbox.list(field(body, "path", str))
    return {"entries": [dataclasses.asdict(entry) for entry in entries]}


async def _snapshot(served: ServedSandbox, _body: Body) -> dict[str, Any]:
    return {"data": write_bytes(await served.sandbox.snapshot())}


async def _restore(served: ServedSandbox, body: Body) -> dict[str, Any]:
    await served.sandbox.restore(_data(body))
    return {}


async def _process_read(served: ServedSandbox, body: Body) -> dict[str, Any]:
    return {"data": write_bytes(await _process(served, body).read())}


async def _process_write(served: ServedSandbox, body: Body) -> dict[str, Any]:
    try:
        await _process(served, body).write(_data(body))
    except BrokenPipeError:
        return {"is_broken": True}
    return {"is_broken": False}


async def _process_wait(served: ServedSandbox, body: Body) -> dict[str, Any]:
    return write_result(await _process(served, body).wait())


async def _process_interrupt(served: ServedSandbox, body: Body) -> dict[str, Any]:
    await _process(served, body).interrupt()
    return {}


async def _process_kill(served: ServedSandbox, body: Body) -> dict[str, Any]:
    await _process(served, body).kill()
    return {}


async def _cancel(served: ServedSandbox, body: Body) -> dict[str, Any]:
    served.cancel(field(body, "target", str))
    return {}


SANDBOX_METHODS: Mapping[str, SandboxMethod] = {
    "exec": _exec,
    "spawn": _spawn,
    "read": _read,
    "write": _write,
    "list": _list,
    "snapshot": _snapshot,
    "restore": _restore,
    "process_read": _process_read,
    "process_write": _process_write,
    "process_wait": _process_wait,
    "process_interrupt": _process_interrupt,
    "process_kill": _process_kill,
    "cancel": _cancel,
}


class SandboxServer:
    """Server of sandboxes; it belongs to one event loop.

    Clients may lower the limits of `spec` but not raise them.
    """

    def __init__(self, spec: SandboxSpec, settings: ServerSettings, *, clock: Clock = time.monotonic) -> None:
        self.spec, self.settings, self.url = spec, settings, ""
        self._clock = clock
        self.sandboxes: Leases[ServedSandbox] = Leases(
            ("sandbox", "sandboxes"), most=settings.max_sessions, lease_s=settings.lease_s, kept_names=KEPT_NAMES
        )
        self._listener: Listener | None = None

    async def start(self) -> None:
        """Open a sandbox as a test, then listen.

        Raises:
            UsageError: this machine does not support the spec, or the port is taken.
            SandboxError: the sandbox does not start.
        """
        async with open_sandbox(self.spec):
            pass
        application = web.Application(middlewares=[error_answers, guard(self.settings.token, self.settings.host)])
        application.add_routes(
            [
                web.get(HEALTH, self._health),
                web.put(SANDBOXES + "/{name}", self._open),
                web.post(SANDBOXES + "/{name}/{method}", self._call),
                web.delete(SANDBOXES + "/{name}", self._end),
            ]
        )
        self._listener = Listener(application, most_connections=self.settings.most_connections)
        self.url = await self._listener.start(self.settings.host, self.settings.port)
        self.sandboxes.start_expiring()

    async def close(self) -> None:
        """Stop listening and close all sandboxes; idempotent."""
        await self.sandboxes.close()  # answers the running calls
        if self._listener is not None:
            await self._listener.close()
        await self.sandboxes.close()  # closes sandboxes opened in the meantime

    async def _health(self, _request: web.Request) -> web.Response:
        return respond({"protocol": PROTOCOL, "versions": [VERSION], "status": "ok"})

    async def _open(self, request: web.Request) -> web.Response:
        """Open a sandbox with the name that the client chose, or return the open one."""
        name = request.match_info["name"]
        self.sandboxes.check_name(name)
        spec = self._narrow_spec((await read_body(request, MAX_CALL_BYTES))[1])
        served = await self.sandboxes.open(name, lambda: self._begin(spec))
        return respond({"folder": served.sandbox.folder})

    async def _begin(self, spec: SandboxSpec) -> ServedSandbox:
        sandbox = open_sandbox(spec)
        await sandbox.start()
        return ServedSandbox(sandbox, self._clock)

    def _narrow_spec(self, wanted: Mapping[str, Any]) -> SandboxSpec:
        """Return the server's spec with the client's lower limits, network, image and variables.

        Raises:
            UsageError: the client demands more than the server's spec allows.
        """
        requested = _limits(wanted) or Limits()
        self._refuse_higher(requested, field({"demanded": [], **wanted}, "demanded", list))
        limits = self.spec.limits.narrow(requested)
        network, image = wanted.get("network", NO_NETWORK), wanted.get("image")
        network = tuple(map(str, network)) if isinstance(network, list) else network
        if network not in (NO_NETWORK, self.spec.network):
            raise UsageError("the server does not allow this network", got=network, expected=self.spec.network)
        if image not in (None, self.spec.image):
            raise UsageError("the server does not allow this image", got=image, expected=self.spec.image or "none")
        env = {**self.spec.env, **variables(wanted)}
        return dataclasses.replace(self.spec, limits=limits, network=network, env=env)

    def _refuse_higher(self, requested: Limits, demanded: Sequence[str]) -> None:
        """Reject explicit limits that are higher than the server's; default limits are lowered instead.

        Raises:
            UsageError: a demanded limit is higher.
        """
        served = self.spec.limits.non_null
        higher = [name for name, value in requested.non_null.items() if name in demanded and value > served[name]]
        if higher:
            raise UsageError(
                "sandboxes are served with lower limits",
                got=", ".join(f"limits.{name}={requested.non_null[name]:g}" for name in higher),
                expected=", ".join(f"at most {served[name]:g}" for name in higher),
                hint="lower the limits, or start the server with --set limits.NAME=VALUE",
            )

    async def _call(self, request: web.Request) -> web.Response:
        """Execute a call."""
        served, method = self.sandboxes.find(request.match_info["name"]), request.match_info["method"]
        if method not in SANDBOX_METHODS:
            names = ", ".join(SANDBOX_METHODS)
            raise Refusal(RefusalKind.REQUEST, f"unknown method {method!r}: expected one of {names}")
        raw, body = await read_body(request, largest_request(method, self.spec.limits))
        do = SANDBOX_METHODS[method]
        return to_response(await served.answer(field(body, "id", str), method.encode() + raw, lambda: do(served, body)))

    async def _end(self, request: web.Request) -> web.Response:
        """Close a sandbox; a name that is not open is ignored."""
        self.sandboxes.end(request.match_info["name"])
        return respond({})
