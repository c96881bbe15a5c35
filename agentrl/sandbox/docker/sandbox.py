"""A sandbox in a container."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox.bubblewrap import USER_NAME
from agentrl.sandbox.channel import Reader
from agentrl.sandbox.contract import NO_VARIABLES
from agentrl.sandbox.docker.daemon import Container
from agentrl.sandbox.docker.frames import Frames
from agentrl.sandbox.docker.options import DEFAULT_IMAGE, read_options
from agentrl.sandbox.docker.supply import SUPPLY
from agentrl.sandbox.opening import TOO_OLD
from agentrl.sandbox.spec import SandboxSpec
from agentrl.sandbox.supervised import SupervisedSandbox
from agentrl.sandbox.supervisor import NOT_FOUND

_log = logging.getLogger(__name__)
START_DEADLINE_S = 60.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class DockerSandbox(SupervisedSandbox):
    """A sandbox in a container of its own.

    Args:
        spec: Its `image` is Docker's, its `url` the daemon's address, its `options` are `DockerOptions`.

    Raises:
        UsageError: the spec asks for what this back end does not have.
    """

    counts_memory = True

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec, self._why_lost)
        self._options = read_options(spec)
        self._container: Container | None = None
        self._image_env: Mapping[str, str] = {}
        self._frames: Frames | None = None
        self._lives_until = float("inf")
        self._closing = asyncio.Lock()

    async def _start(self) -> None:
        self._container, plan = await SUPPLY.obtain(self.spec, self._options)
        self.folder, self._image_env = plan.image.folder, plan.image.env
        self.counts_processes = self._options.user is None
        try:
            await self._channel.open(self._container.end, b"", deadline_s=START_DEADLINE_S, unwrap=self._unwrap)
        except SandboxError as error:
            if TOO_OLD in str(error):
                raise UsageError(
                    "the Python of an image is too old for docker sandboxes",
                    got=error,
                    expected="Python 3.10 or newer",
                    hint="name another one of the image: options.python",
                ) from error
            raise
        self._channel.tell("live", seconds=self._options.life_s)
        self._lives_until = time.monotonic() + self._options.life_s
        if plan.image.content:
            await self._unpack(plan.image.content)

    async def _unpack(self, content: bytes) -> None:
        """Fill the working folder, which hides the image's own, with what that holds."""
        unpacked = await self.exec(["/bin/tar", "-xpf", "-", "--strip-components=1"], stdin=content)
        if unpacked.exit_code == NOT_FOUND:
            raise UsageError("an image has no /bin/tar", got=self.spec.image, hint="add it: apt-get install tar")
        if not unpacked.succeeded:
            raise UsageError(
                f"what an image holds in {self.folder} does not fit into a sandbox",
                got=unpacked.stderr.decode(errors="replace")[-300:],
                hint="raise limits.disk_bytes and limits.memory_bytes, or name another folder: options.folder=/work",
            )

    def _unwrap(self, stream: asyncio.StreamReader) -> Reader:
        self._frames = Frames(stream)
        return self._frames

    def _why_lost(self) -> str:
        if time.monotonic() >= self._lives_until:
            return f"its {self._options.life_s:g} s are over (options.life_s)"
        said = self._frames.words if self._frames is not None else ""
        return said or f"the container of {self.spec.image or DEFAULT_IMAGE} ended"

    def _variables(self, more: Mapping[str, str] = NO_VARIABLES) -> dict[str, str]:
        return {
            "PATH": _PATH,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self._image_env,
            "HOME": self.folder,
            "USER": USER_NAME,
            **self.spec.env,
            **more,
        }

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._channel.hang_up()
        async with self._closing:
            await self._channel.close()
            if self._container is not None:
                try:
                    await SUPPLY.remove(self._container)
                except SandboxError as failure:
                    _log.warning("a container may be left, until it notices that it is alone: %s", failure)
                self._container = None
