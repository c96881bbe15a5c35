"""What a served sandbox can be asked for, each with its arguments and its result in JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, cast

from agentrl.env_server.methods import Body, field, whole
from agentrl.env_server.refusal import Refusal
from agentrl.env_server.served_sandbox import ServedSandbox
from agentrl.remote.wire import Problem
from agentrl.sandbox import Command, SandboxProcess
from agentrl.sandbox.http_wire import LARGEST_REQUEST, read_bytes, read_limits, write_bytes, write_result

SandboxMethod: TypeAlias = Callable[[ServedSandbox, Body], Awaitable[dict[str, Any]]]


def _command(body: Body) -> Command:
    words = body.get("command")
    parts = [words] if isinstance(words, str) else words
    if isinstance(parts, list) and parts and all(isinstance(word, str) and "\0" not in word for word in parts):
        return cast("Command", words)
    raise Refusal(Problem.REQUEST, f"'command' of the request is {words!r:.80}, expected text or a list of texts")


def variables(body: Body) -> dict[str, str]:
    """The environment variables of a request.

    Raises:
        Refusal: they are not texts, or hold what no variable can.
    """
    found: dict[str, Any] = field(body, "env", dict)
    for name, value in found.items():
        if not isinstance(value, str) or "\0" in name + value or not name or "=" in name:
            raise Refusal(Problem.REQUEST, f"'env' of the request: {name!r:.80} is no variable, or its value no text")
    return found


def _folder(body: Body) -> str | None:
    found = None if body.get("cwd") is None else field(body, "cwd", str)
    if found is not None and "\0" in found:
        raise Refusal(Problem.REQUEST, "'cwd' of the request has a NUL character")
    return found


def _arguments(body: Body) -> dict[str, Any]:
    try:
        limits = read_limits(body.get("limits"))
    except TypeError as error:
        raise Refusal(Problem.REQUEST, f"'limits' of the request: {error}") from error
    return {"cwd": _folder(body), "env": variables(body), "limits": limits}


def _data(body: Body, name: str = "data") -> bytes:
    try:
        return read_bytes(field(body, name, str))
    except ValueError as error:
        raise Refusal(Problem.REQUEST, f"{name!r} of the request is no base64: {error}") from error


def _process(served: ServedSandbox, body: Body) -> SandboxProcess:
    number = field(body, "process", int)
    if not 0 <= number < len(served.processes):
        raise Refusal(Problem.REQUEST, f"there is no process {number}")
    return served.processes[number]


async def _exec(served: ServedSandbox, body: Body) -> dict[str, Any]:
    return write_result(await served.sandbox.exec(_command(body), stdin=_data(body, "stdin"), **_arguments(body)))


async def _spawn(served: ServedSandbox, body: Body) -> dict[str, Any]:
    served.processes.append(await served.sandbox.spawn(_command(body), **_arguments(body)))
    return {"process": len(served.processes) - 1}


async def _read(served: ServedSandbox, body: Body) -> dict[str, Any]:
    most = whole(body, "most", least=1, most=LARGEST_REQUEST)
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
