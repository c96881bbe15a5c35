"""Back end ``docker``: containers of Docker or Podman, through the Docker API.

The first process of a container is the same supervisor as in local sandboxes, run by the image's Python. The host
communicates with it through the container's standard input and output. It ends, and
all processes of the container with it, when that connection closes or the lifetime is over.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import AgentRLError, SandboxError, UsageError
from agentrl.sandbox.channel import SUPERVISOR_START_S, ReadExactly
from agentrl.sandbox.docker.container_plan import (
    DEFAULT_IMAGE,
    OWNER,
    WARM_S,
    DockerOptions,
    Image,
    Plan,
    labels,
    plan,
    read_options,
    this_owner,
)
from agentrl.sandbox.docker.daemon import DAEMON_TIMEOUT_S, EXTRA, Daemon, find_daemon
from agentrl.sandbox.spec import SandboxSpec
from agentrl.sandbox.supervised import TOO_OLD, SupervisedSandbox, opening
from agentrl.sandbox.supervisor import NOT_FOUND

_log = logging.getLogger(__name__)
STARTS, ENDS = 8, 4
"""Numbers of threads that start and remove containers; they limit the load on the daemon."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ATTACHED = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
_HEAD = struct.Struct(">BxxxI")
_OUTPUT = 1
_MAX_ERRORS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """Started container whose supervisor has received its opening message."""

    id: str
    end: socket.socket
    """Socket attached to its standard input and output."""
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


def start_container(daemon: Daemon, wanted: Plan) -> Container:
    """Start a container and send its supervisor the opening message.

    Raises:
        UsageError: the image has no Python.
    """
    daemon.wait_for_start(wanted.options.starts_per_s)
    config = {**wanted.config, "Labels": labels(WARM_S + wanted.options.life_s, time.time())}
    with daemon.client("starting a container") as api:
        try:
            identity = str(api.create_container_from_config(config)["Id"])
        except EXTRA.load().errors.NotFound:
            daemon.forget_images()
            raise
        try:
            end = _run(api, identity, opening(wanted.settings()))
        except BaseException as error:
            daemon.remove(identity)
            raise _start_error(error, wanted) from error
    return Container(id=identity, end=end, daemon=daemon, image=wanted.image)


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


def _start_error(error: BaseException, wanted: Plan) -> BaseException:
    """Return the error of a failed start: `UsageError` if the image has no Python."""
    text = str(error)
    if "executable file not found" in text or ("no such file or directory" in text.lower() and "exec:" in text):
        return UsageError(
            "an image has no Python, which docker sandboxes need",
            got=f"{wanted.options.python} in {wanted.config['Image']}",
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
            asyncio.IncompleteReadError: the output ended first.
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


class ContainerPool:
    """Containers of this process, started in threads or kept warm; all its sandboxes share `SUPPLY`."""

    def __init__(self) -> None:
        self._daemons: dict[str | None, Daemon] = {}
        self._finding = threading.Lock()
        self._warm: dict[str, deque[Container]] = defaultdict(deque)
        self._coming: dict[str, int] = defaultdict(int)
        self._filling: set[Future[None]] = set()
        self._counting = threading.Lock()
        self._starts = ThreadPoolExecutor(STARTS, "agentrl-docker-start")
        self._ends = ThreadPoolExecutor(ENDS, "agentrl-docker-end")

    async def obtain(self, spec: SandboxSpec, options: DockerOptions) -> Container:
        """Start a container for a sandbox, or take a warm one; a cancelled call leaves no container behind.

        Raises:
            UsageError: no daemon answers, or the image cannot be used.
            SandboxError: the daemon fails.
        """
        daemon = self._daemons.get(spec.url)
        image = daemon.known_image(spec.image or DEFAULT_IMAGE, options) if daemon is not None else None
        if daemon is not None and image is not None:
            wanted = plan(spec, options, image, daemon.traits)
            if (container := self._take(daemon, wanted)) is not None:
                return container
        starting = self._starts.submit(self._start, spec, options)
        try:
            return await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_abandon)
            raise

    async def remove(self, container: Container) -> None:
        """Remove a container; this continues if the call is cancelled.

        Raises:
            SandboxError: the daemon fails.
        """
        await asyncio.shield(asyncio.wrap_future(self._ends.submit(container.remove)))

    async def settle(self) -> None:
        """Wait until all pending warm containers have started or failed."""
        while self._filling:
            await asyncio.wait([asyncio.wrap_future(one) for one in list(self._filling)])

    def drain(self) -> None:
        """Remove the warm containers."""
        for kept in list(self._warm.values()):
            while kept:
                _discard(kept.popleft())

    def close(self) -> None:
        """Remove all containers of this process, at its end."""
        for executor in (self._starts, self._ends):
            executor.shutdown(cancel_futures=True)
        self.drain()
        for daemon in self._daemons.values():
            try:
                daemon.remove_labelled(f"{OWNER}={this_owner()}")
            except SandboxError as failure:
                _log.warning("containers may be left until their lifetime is over: %s", failure)
        self._daemons.clear()

    def _start(self, spec: SandboxSpec, options: DockerOptions) -> Container:
        daemon = self._daemon(spec.url)
        image = daemon.image(spec.image or DEFAULT_IMAGE, options)
        wanted = plan(spec, options, image, daemon.traits)
        container = start_container(daemon, wanted)
        self._refill(daemon, wanted)
        return container

    def _daemon(self, url: str | None) -> Daemon:
        with self._finding:
            if url not in self._daemons:
                daemon = find_daemon(url)
                daemon.sweep()
                if not self._daemons:
                    _at_exit(self.close)
                self._daemons[url] = daemon
            return self._daemons[url]

    def _take(self, daemon: Daemon, wanted: Plan) -> Container | None:
        """Take a warm container and start a replacement; return ``None`` if no warm container exists."""
        kept = self._warm[f"{daemon.url} {wanted.key}"]
        while True:
            try:
                container = kept.popleft()
            except IndexError:
                return None
            if container.can_be_used:
                self._refill(daemon, wanted)
                return container
            self._ends.submit(_discard, container)

    def _refill(self, daemon: Daemon, wanted: Plan) -> None:
        key = f"{daemon.url} {wanted.key}"
        with self._counting:
            lacking = wanted.options.warm - len(self._warm[key]) - self._coming[key]
            self._coming[key] += max(lacking, 0)
        for _ in range(lacking):
            filling = self._starts.submit(self._warm_up, daemon, wanted, key)
            self._filling.add(filling)
            filling.add_done_callback(self._filling.discard)

    def _warm_up(self, daemon: Daemon, wanted: Plan, key: str) -> None:
        try:
            if threading.main_thread().is_alive():
                self._warm[key].append(start_container(daemon, wanted))
        except AgentRLError as failure:
            _log.warning("a warm container could not be started: %s", failure)
        finally:
            with self._counting:
                self._coming[key] -= 1


def _abandon(starting: Future[Container]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        _discard(starting.result())


def _discard(container: Container) -> None:
    try:
        container.remove()
    except SandboxError as failure:
        _log.warning("a container may be left until its lifetime is over: %s", failure)


def _at_exit(do: Callable[[], None]) -> None:
    """Call `do` when this process ends, but not at the end of processes forked from it."""
    pid = os.getpid()
    atexit.register(lambda: do() if os.getpid() == pid else None)


SUPPLY = ContainerPool()


class DockerSandbox(SupervisedSandbox):
    """Sandbox in a container.

    Args:
        spec: Specification; `image` is the container image, `url` the daemon's address, `options` are `DockerOptions`.

    Raises:
        UsageError: the spec is not supported.
    """

    counts_memory = True

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._options = read_options(spec)
        self._container: Container | None = None
        self._image_env: Mapping[str, str] = {}
        self._frames: Frames | None = None
        self._lives_until = float("inf")
        self._closing = asyncio.Lock()

    async def _start(self) -> None:
        self._container = await SUPPLY.obtain(self.spec, self._options)
        image = self._container.image
        self.folder, self._image_env = image.folder, image.env
        self.counts_processes = self._options.user is None
        try:
            await self._channel.open(self._container.end, b"", deadline_s=SUPERVISOR_START_S, unwrap=self._unwrap)
        except SandboxError as error:
            if TOO_OLD in str(error):
                raise UsageError(
                    "the Python of an image is too old for docker sandboxes",
                    got=error,
                    expected="Python 3.10 or newer",
                    hint="choose another Python of the image: options.python",
                ) from error
            raise
        self._channel.notify("live", seconds=self._options.life_s)
        self._lives_until = time.monotonic() + self._options.life_s
        await self._open_network()
        if image.content:
            await self._unpack(image.content)

    async def _unpack(self, content: bytes) -> None:
        """Copy the image's working folder into the tmpfs that is mounted over it."""
        unpacked = await self.exec(["/bin/tar", "-xpf", "-", "--strip-components=1"], stdin=content)
        if unpacked.exit_code == NOT_FOUND:
            raise UsageError("an image has no /bin/tar", got=self.spec.image, hint="add it: apt-get install tar")
        if not unpacked.is_success:
            raise UsageError(
                f"the image's content of {self.folder} does not fit into a sandbox",
                got=unpacked.stderr.decode(errors="replace")[-300:],
                hint="raise limits.disk_bytes and limits.memory_bytes, or choose another folder: options.folder=/work",
            )

    def _unwrap(self, stream: asyncio.StreamReader) -> ReadExactly:
        self._frames = Frames(stream)
        return self._frames.readexactly

    def _why_lost(self) -> str:
        if time.monotonic() >= self._lives_until:
            return f"its lifetime of {self._options.life_s:g} s is over (options.life_s)"
        errors = self._frames.errors if self._frames is not None else ""
        return errors or f"the container of {self.spec.image or DEFAULT_IMAGE} ended"

    def _own_variables(self) -> dict[str, str]:
        return {"PATH": _PATH, **self._image_env}

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._channel.hang_up()
        async with self._closing:
            await self._channel.close()
            await self._close_network()
            if self._container is not None:
                try:
                    await SUPPLY.remove(self._container)
                except SandboxError as failure:
                    _log.warning("a container may be left until it detects that its connection closed: %s", failure)
                self._container = None
