"""Containers that run: their start, their removal, and their output."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import UsageError
from agentrl.sandbox.docker.container_plan import WARM_S, Image, Plan, labels
from agentrl.sandbox.docker.daemon import DAEMON_TIMEOUT_S, EXTRA, Daemon
from agentrl.sandbox.supervised import opening

_ATTACHED = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
_HEAD = struct.Struct(">BxxxI")
_OUTPUT = 1
_MAX_ERRORS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """Started container, whose supervisor has received its opening."""

    id: str
    end: socket.socket
    """Socket to its standard input and from its output."""
    daemon: Daemon
    image: Image
    started: float = field(default_factory=time.monotonic)

    @property
    def can_be_used(self) -> bool:
        """True if the container is running and not close to its idle limit."""
        watch = select.poll()
        watch.register(self.end, select.POLLRDHUP)
        return not watch.poll(0) and time.monotonic() < self.started + WARM_S / 2

    def remove(self) -> None:
        """Kill the container and wait until it is removed. Idempotent."""
        self.end.close()
        self.daemon.remove(self.id)


def start_container(daemon: Daemon, plan: Plan) -> Container:
    """Start a container and send its supervisor the opening.

    Raises:
        UsageError: the image has no Python.
    """
    daemon.wait_for_start(plan.options.starts_per_s)
    config = {**plan.config, "Labels": labels(WARM_S + plan.options.life_s, time.time())}
    with daemon.client("starting a container") as api:
        try:
            identity = str(api.create_container_from_config(config)["Id"])
        except EXTRA.load().errors.NotFound:
            daemon.forget_images()
            raise
        try:
            end = _run(api, identity, opening(plan.settings()))
        except BaseException as error:
            daemon.remove(identity)
            raise _start_error(error, plan) from error
    return Container(id=identity, end=end, daemon=daemon, image=plan.image)


def _run(api: Any, identity: str, data: bytes) -> socket.socket:
    end = _attach(api, identity)
    try:
        api.start(identity)
        end.sendall(data)
    except BaseException:
        end.close()
        raise
    end.setblocking(False)
    return end


def _attach(api: Any, identity: str) -> socket.socket:
    """Attach to a container before its start; the library's socket is duplicated and closed."""
    raw = api.attach_socket(identity, params=_ATTACHED)
    try:
        end = socket.socket(fileno=os.dup(raw.fileno()))
    finally:
        getattr(raw, "_response", raw).close()
        raw.close()
    end.settimeout(DAEMON_TIMEOUT_S)
    return end


def _start_error(error: BaseException, plan: Plan) -> BaseException:
    """Return the error of a failed start: `UsageError` if the image has no Python."""
    text = str(error)
    if "executable file not found" in text or ("no such file or directory" in text.lower() and "exec:" in text):
        return UsageError(
            "an image has no Python, which docker sandboxes need",
            got=f"{plan.options.python} in {plan.config['Image']}",
            expected="Python 3.10 or newer",
            hint="use another image, set the path of its Python (options.python), or mount the Python of the daemon's "
            "machine (options.readable)",
        )
    return error


class Frames:
    """Reader of a container's standard output, which also keeps the beginning of its standard error.

    Args:
        stream: Stream from the daemon. A frame is one byte for the stream (1 is output, 2 is errors), three zeros, four
            bytes of size, and the content.
    """

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._output = bytearray()
        self._errors = bytearray()

    @property
    def errors(self) -> str:
        """Beginning of standard error."""
        return self._errors.decode(errors="replace").strip()

    async def readexactly(self, size: int) -> bytes:
        """Read the next bytes of standard output.

        Raises:
            asyncio.IncompleteReadError: the output ended before.
        """
        while len(self._output) < size:
            kind, length = _HEAD.unpack(await self._stream.readexactly(_HEAD.size))
            content = await self._stream.readexactly(length)
            if kind == _OUTPUT:
                self._output += content
            else:
                self._errors += content[: max(_MAX_ERRORS - len(self._errors), 0)]
        wanted = bytes(self._output[:size])
        del self._output[:size]
        return wanted
