"""The Docker daemon, through Docker's Python library. All calls here block: they are made in threads."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import SandboxError, UsageError, boundary, described_error
from agentrl.registry import Extra
from agentrl.sandbox.docker.container import (
    OWNER,
    WARM_S,
    DockerOptions,
    Image,
    Plan,
    Traits,
    is_left_behind,
    labels,
)
from agentrl.sandbox.supervised import opening

_log = logging.getLogger(__name__)
EXTRA = Extra(name="docker", module="docker")
TIMEOUT_S = 60.0
"""For each answer of the daemon."""
_PLAIN = ("unix://", "tcp://", "http://")
_ATTACHED = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
_PROGRESS_EVERY_S = 5.0
_REMOVALS = 600
_MOST_CONTENT = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A started container, whose supervisor has been sent its opening."""

    id: str
    end: socket.socket
    """To its standard input and from its output."""
    daemon: Daemon
    image: Image
    started: float = field(default_factory=time.monotonic)

    @property
    def can_be_used(self) -> bool:
        """True if it is there and not close to its idle limit."""
        watch = select.poll()
        watch.register(self.end, select.POLLRDHUP)
        return not watch.poll(0) and time.monotonic() < self.started + WARM_S / 2

    def remove(self) -> None:
        """Kill it, and wait until nothing of it is left. Idempotent."""
        self.end.close()
        self.daemon.remove(self.id)


class Daemon:
    """A daemon that has answered. Its methods raise `SandboxError` when it fails.

    Args:
        url: Its address.

    Raises:
        UsageError: it does not answer, or the extra is not installed.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(_PLAIN):
            raise UsageError(
                "docker sandboxes need a daemon on a plain socket",
                got=url,
                expected="unix://… or tcp://…",
                hint="lead it to a socket here: ssh -N -L /tmp/docker.sock:/var/run/docker.sock HOST",
            )
        self.url, self._version, self._images = url, "", dict[tuple[str, str | None], Image]()
        self._pulling = threading.Lock()
        self._pace, self._next_start = threading.Lock(), 0.0
        try:
            with self._client("asking a daemon for its version") as api:
                _try_socket(url)
                about = api.version(api_version=False)
                self.name = f"{about.get('Version', '?')} at {url}"
                self._version = str(about["ApiVersion"])
                self.traits = Traits.read(about, api.info())
        except SandboxError as error:
            raise UsageError("a daemon of Docker or Podman does not answer", got=error) from error

    @contextlib.contextmanager
    def _client(self, doing: str) -> Iterator[Any]:
        """Connect for one task."""
        sdk = EXTRA.load()
        with boundary(SandboxError, doing):
            api = sdk.APIClient(base_url=self.url, version=self._version or "1.40", timeout=TIMEOUT_S)
            with contextlib.closing(api):
                yield api

    def known_image(self, name: str, options: DockerOptions) -> Image | None:
        """An image that was looked at before."""
        return self._images.get((name, options.folder))

    def image(self, name: str, options: DockerOptions) -> Image:
        """Describe an image; a missing one is pulled, unless the options forbid it.

        Raises:
            UsageError: there is no such image, or its folder holds too much.
        """
        with self._pulling:
            known = self.known_image(name, options)
            if known is not None:
                return known
            found = self._inspect(name)
            if found is None and options.pull == "never":
                raise UsageError("an image is not there", got=name, hint=f"get it: docker pull {name}")
            image = Image.read(found or self._pull(name), options.folder)
            image = dataclasses.replace(image, content=self._content(image))
            self._images[name, options.folder] = image
            return image

    def _inspect(self, name: str) -> Mapping[str, Any] | None:
        with self._client("looking at an image") as api:
            try:
                found: Mapping[str, Any] = api.inspect_image(name)
            except EXTRA.load().errors.NotFound:
                return None
            return found

    def _content(self, image: Image) -> bytes:
        """Read what an image holds in a folder, from a container that is never started."""
        with self._client("looking into an image") as api:
            config = {"Image": image.id, "Cmd": ["true"], "NetworkDisabled": True, "Labels": labels(0, time.time())}
            identity = str(api.create_container_from_config(config)["Id"])
            content = bytearray()
            try:
                for piece in api.get_archive(identity, image.folder)[0]:
                    content += piece
                    if len(content) > _MOST_CONTENT:
                        raise UsageError(
                            f"the folder {image.folder} of an image holds too much",
                            expected=f"{_MOST_CONTENT // 2**20} MiB at most",
                            hint="name another one, which may be empty: options.folder=/work",
                        )
            except EXTRA.load().errors.NotFound:
                return b""
            finally:
                self.remove(identity)
        return bytes(content)

    def _pull(self, name: str) -> Mapping[str, Any]:
        sdk = EXTRA.load()
        _log.info("image %s is not there: pulling it", name)
        layers: dict[str, tuple[int, int]] = {}
        logged = time.monotonic()
        with self._client(f"pulling image {name}") as api:
            repository, tag = sdk.utils.parse_repository_tag(name)
            try:
                for line in api.pull(repository, tag=tag or "latest", stream=True, decode=True):
                    if "error" in line:
                        raise SandboxError(f"pulling image {name} failed", got=line["error"])
                    detail = line.get("progressDetail") or {}
                    if line.get("status") == "Downloading" and "total" in detail:
                        layers[line.get("id", "")] = (detail.get("current", 0), detail["total"])
                    if time.monotonic() > logged + _PROGRESS_EVERY_S:
                        logged = time.monotonic()
                        _log.info("pulling image %s: %s", name, _progress(layers, line.get("status", "")))
            except sdk.errors.NotFound as missing:
                raise UsageError(
                    "there is no such image",
                    got=described_error(missing),
                    expected="an image that can be pulled",
                    hint=name,
                ) from missing
            _log.info("image %s is there", name)
            found: Mapping[str, Any] = api.inspect_image(name)
            return found

    def start(self, plan: Plan) -> Container:
        """Start a container and send its supervisor the opening.

        Raises:
            UsageError: the image has no Python.
        """
        self._wait_for_turn(plan.options.starts_per_s)
        config = {**plan.config, "Labels": labels(WARM_S + plan.options.life_s, time.time())}
        with self._client("starting a container") as api:
            try:
                identity = str(api.create_container_from_config(config)["Id"])
            except EXTRA.load().errors.NotFound:
                self._images.clear()  # it was there before
                raise
            try:
                end = self._run(api, identity, opening(plan.settings()))
            except BaseException as error:
                self.remove(identity)
                raise _complaint(error, plan) from error
        return Container(id=identity, end=end, daemon=self, image=plan.image)

    def _run(self, api: Any, identity: str, words: bytes) -> socket.socket:
        end = _attach(api, identity)
        try:
            api.start(identity)
            end.sendall(words)
        except BaseException:
            end.close()
            raise
        end.setblocking(False)
        return end

    def _wait_for_turn(self, per_s: float) -> None:
        with self._pace:
            now = time.monotonic()
            turn = max(now, self._next_start)
            self._next_start = turn + 1 / per_s
        time.sleep(turn - now)

    def remove(self, identity: str) -> None:
        """Kill a container, and wait until it is gone. Idempotent."""
        errors = EXTRA.load().errors
        with self._client("removing a container") as api:
            for _ in range(_REMOVALS):
                try:
                    api.remove_container(identity, v=True, force=True)
                    return
                except errors.NotFound:
                    return
                except errors.APIError as error:
                    if error.status_code != 409:  # the daemon is removing it already
                        raise
                time.sleep(0.02)
        raise SandboxError("a container cannot be removed", got=identity)

    def sweep(self) -> int:
        """Remove the containers that ended processes have left behind; return their number."""
        removed = self.remove_labelled(OWNER, lambda labels: is_left_behind(labels, time.time()))
        if removed:
            _log.info("removed %d containers that were left behind", removed)
        return removed

    def remove_labelled(self, label: str, is_meant: Callable[[Mapping[str, str]], bool] = lambda _: True) -> int:
        """Remove the containers with a label (``NAME`` or ``NAME=VALUE``) that are meant; return their number."""
        with self._client("listing containers") as api:
            found = api.containers(all=True, filters={"label": label})
        meant = [one["Id"] for one in found if is_meant(one.get("Labels") or {})]
        for identity in meant:
            self.remove(identity)
        return len(meant)


def addresses() -> list[str]:
    """List addresses where a daemon may be, the likeliest first."""
    if given := os.environ.get("DOCKER_HOST"):
        return [given]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    places = ["/var/run/docker.sock", "/run/podman/podman.sock", f"{runtime}/docker.sock"]
    places.append(f"{runtime}/podman/podman.sock")
    return [f"unix://{place}" for place in places if os.path.exists(place)]


def find_daemon(url: str | None) -> Daemon:
    """Find a daemon that answers.

    Raises:
        UsageError: none does, or the extra is not installed.
    """
    EXTRA.load()
    if url is not None:
        return Daemon(url)
    complaints = []
    for address in addresses():
        try:
            return Daemon(address)
        except UsageError as complaint:
            complaints.append(f"{address}: {complaint}")
    raise UsageError(
        "no daemon of Docker or Podman answers",
        got="; ".join(complaints) or "no socket where they are looked for",
        hint="start one, or name its address: url=unix:///run/docker.sock, or the variable DOCKER_HOST",
    )


def describe_daemon() -> str:
    """Name the daemon that sandboxes would use, or say why there is none."""
    try:
        return find_daemon(None).name
    except UsageError as lacking:
        return f"{lacking.what}; {lacking.hint}"


def _try_socket(url: str) -> None:
    """Connect once without the library, which leaks the socket when the connection is refused."""
    if url.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(TIMEOUT_S)
            end.connect(url.removeprefix("unix://"))


def _attach(api: Any, identity: str) -> socket.socket:
    """Attach to a container that is not started yet; the socket is duplicated, and the library's closed."""
    raw = api.attach_socket(identity, params=_ATTACHED)
    try:
        end = socket.socket(fileno=os.dup(raw.fileno()))
    finally:
        getattr(raw, "_response", raw).close()
        raw.close()
    end.settimeout(TIMEOUT_S)
    return end


def _complaint(error: BaseException, plan: Plan) -> BaseException:
    """A failed start; an image that lacks what is needed is for the user to change."""
    text = str(error)
    if "executable file not found" in text or ("no such file or directory" in text.lower() and "exec:" in text):
        return UsageError(
            "an image has no Python, which docker sandboxes need",
            got=f"{plan.options.python} in {plan.config['Image']}",
            expected="Python 3.10 or newer",
            hint="take another image, name the program (options.python), or show the image one of the daemon's machine"
            " (options.readable)",
        )
    return error


def _progress(layers: Mapping[str, tuple[int, int]], status: str) -> str:
    have, total = (sum(sizes) / 1e6 for sizes in zip(*layers.values(), strict=True)) if layers else (0.0, 0.0)
    return f"{have:.0f} of {total:.0f} MB" if total else status


_HEAD = struct.Struct(">BxxxI")
_OUTPUT = 1
_MOST_WORDS = 4000


class Frames:
    """Standard output of a container; the beginning of its standard error is kept.

    Args:
        stream: From the daemon: frames of a byte for the stream (1 is output, 2 errors), three zeros, four bytes of
            size, and the content.
    """

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._output = bytearray()
        self._words = bytearray()

    @property
    def words(self) -> str:
        """Return what was written to standard error."""
        return self._words.decode(errors="replace").strip()

    async def readexactly(self, size: int) -> bytes:
        """The next bytes of standard output.

        Raises:
            asyncio.IncompleteReadError: it ended before.
        """
        while len(self._output) < size:
            kind, length = _HEAD.unpack(await self._stream.readexactly(_HEAD.size))
            content = await self._stream.readexactly(length)
            if kind == _OUTPUT:
                self._output += content
            else:
                self._words += content[: max(_MOST_WORDS - len(self._words), 0)]
        wanted = bytes(self._output[:size])
        del self._output[:size]
        return wanted
