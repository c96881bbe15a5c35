"""Docker daemon, through Docker's Python library. All calls block, so they run in threads."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentrl.errors import SandboxError, UsageError, boundary, described_error
from agentrl.registry import Extra
from agentrl.sandbox.docker.container_plan import OWNER, DockerOptions, Image, Traits, is_left_behind, labels

_log = logging.getLogger(__name__)
EXTRA = Extra(name="docker", module="docker")
DAEMON_TIMEOUT_S = 60.0
"""Timeout in seconds of each request to the daemon."""
_PLAIN = ("unix://", "tcp://", "http://")
_PROGRESS_EVERY_S = 5.0
_REMOVALS = 600
_MAX_CONTENT = 2**30


class Daemon:
    """Connection to a daemon that has answered. Methods raise `SandboxError` if the daemon fails.

    Raises:
        UsageError: the daemon does not answer, or the extra ``docker`` is not installed.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(_PLAIN):
            raise UsageError(
                "docker sandboxes need a daemon on a plain socket",
                got=url,
                expected="unix://… or tcp://…",
                hint="forward it to a local socket: ssh -N -L /tmp/docker.sock:/var/run/docker.sock HOST",
            )
        self.url, self._version, self._images = url, "", dict[tuple[str, str | None], Image]()
        self._pulling = threading.Lock()
        self._pace, self._next_start = threading.Lock(), 0.0
        try:
            with self.client("reading a daemon's version") as api:
                _try_socket(url)
                about = api.version(api_version=False)
                self.name = f"{about.get('Version', '?')} at {url}"
                self._version = str(about["ApiVersion"])
                self.traits = Traits.read(about, api.info())
        except SandboxError as error:
            raise UsageError("no Docker or Podman daemon answers", got=error) from error

    @contextlib.contextmanager
    def client(self, doing: str) -> Iterator[Any]:
        """Connect to the daemon; its errors are raised as a `SandboxError` that names the operation `doing`."""
        sdk = EXTRA.load()
        with boundary(SandboxError, doing):
            api = sdk.APIClient(base_url=self.url, version=self._version or "1.40", timeout=DAEMON_TIMEOUT_S)
            with contextlib.closing(api):
                yield api

    def known_image(self, name: str, options: DockerOptions) -> Image | None:
        """Return an image that was already inspected; otherwise ``None``."""
        return self._images.get((name, options.folder))

    def image(self, name: str, options: DockerOptions) -> Image:
        """Inspect an image; pull it first if it is missing and the options allow it.

        Raises:
            UsageError: the image does not exist, or its folder is too large.
        """
        with self._pulling:
            known = self.known_image(name, options)
            if known is not None:
                return known
            found = self._inspect(name)
            if found is None and options.pull == "never":
                raise UsageError("an image does not exist", got=name, hint=f"pull it: docker pull {name}")
            image = Image.read(found or self._pull(name), options.folder)
            image = dataclasses.replace(image, content=self._content(image))
            self._images[name, options.folder] = image
            return image

    def _inspect(self, name: str) -> Mapping[str, Any] | None:
        with self.client("inspecting an image") as api:
            try:
                found: Mapping[str, Any] = api.inspect_image(name)
            except EXTRA.load().errors.NotFound:
                return None
            return found

    def _content(self, image: Image) -> bytes:
        """Read the content of an image's folder, from a container that is never started."""
        with self.client("reading an image's files") as api:
            config = {"Image": image.id, "Cmd": ["true"], "NetworkDisabled": True, "Labels": labels(0, time.time())}
            identity = str(api.create_container_from_config(config)["Id"])
            content = bytearray()
            try:
                for piece in api.get_archive(identity, image.folder)[0]:
                    content += piece
                    if len(content) > _MAX_CONTENT:
                        raise UsageError(
                            f"the folder {image.folder} of an image is too large",
                            expected=f"at most {_MAX_CONTENT // 2**20} MiB",
                            hint="choose another folder, which may be empty: options.folder=/work",
                        )
            except EXTRA.load().errors.NotFound:
                return b""
            finally:
                self.remove(identity)
        return bytes(content)

    def _pull(self, name: str) -> Mapping[str, Any]:
        sdk = EXTRA.load()
        _log.info("image %s is missing: pulling it", name)
        layers: dict[str, tuple[int, int]] = {}
        logged = time.monotonic()
        with self.client(f"pulling image {name}") as api:
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
                    "the image does not exist",
                    got=described_error(missing),
                    expected="an image that can be pulled",
                    hint=name,
                ) from missing
            _log.info("image %s is pulled", name)
            found: Mapping[str, Any] = api.inspect_image(name)
            return found

    def forget_images(self) -> None:
        """Clear the cache of inspected images, because one was removed."""
        self._images.clear()

    def wait_for_start(self, per_s: float) -> None:
        """Wait until another container may be started, at most `per_s` per second."""
        with self._pace:
            now = time.monotonic()
            turn = max(now, self._next_start)
            self._next_start = turn + 1 / per_s
        time.sleep(turn - now)

    def remove(self, identity: str) -> None:
        """Kill a container and wait until it is removed. Idempotent."""
        errors = EXTRA.load().errors
        with self.client("removing a container") as api:
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
        """Remove containers left behind by processes that have ended; return their number."""
        removed = self.remove_labelled(OWNER, lambda labels: is_left_behind(labels, time.time()))
        if removed:
            _log.info("removed %d containers that were left behind", removed)
        return removed

    def remove_labelled(self, label: str, is_meant: Callable[[Mapping[str, str]], bool] = lambda _: True) -> int:
        """Remove the containers with a label (``NAME`` or ``NAME=VALUE``) that match `is_meant`; return the count."""
        with self.client("listing containers") as api:
            found = api.containers(all=True, filters={"label": label})
        meant = [one["Id"] for one in found if is_meant(one.get("Labels") or {})]
        for identity in meant:
            self.remove(identity)
        return len(meant)


def addresses() -> list[str]:
    """Return possible addresses of a daemon, the most likely first."""
    if given := os.environ.get("DOCKER_HOST"):
        return [given]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    sockets = ["/var/run/docker.sock", "/run/podman/podman.sock", f"{runtime}/docker.sock"]
    sockets.append(f"{runtime}/podman/podman.sock")
    return [f"unix://{path}" for path in sockets if os.path.exists(path)]


def find_daemon(url: str | None) -> Daemon:
    """Find a daemon that answers.

    Raises:
        UsageError: no daemon answers, or the extra ``docker`` is not installed.
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
        "no Docker or Podman daemon answers",
        got="; ".join(complaints) or "no socket in the usual places",
        hint="start one, or set its address with url=unix:///run/docker.sock or the variable DOCKER_HOST",
    )


def describe_daemon() -> str:
    """Describe the daemon that sandboxes would use, or why none is available."""
    try:
        return find_daemon(None).name
    except UsageError as lacking:
        return f"{lacking.what}; {lacking.hint}"


def _try_socket(url: str) -> None:
    """Connect once without the library, which leaks its socket if the connection is refused."""
    if url.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(DAEMON_TIMEOUT_S)
            end.connect(url.removeprefix("unix://"))


def _progress(layers: Mapping[str, tuple[int, int]], status: str) -> str:
    have, total = (sum(sizes) / 1e6 for sizes in zip(*layers.values(), strict=True)) if layers else (0.0, 0.0)
    return f"{have:.0f} of {total:.0f} MB" if total else status
