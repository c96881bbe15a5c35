"""The back end ``local``: Linux namespaces through bubblewrap, limits through control groups and resource limits.

One process of ours, the supervisor, is the first inside; it starts commands as quickly as a fork, and everything dies
with it. Files are read and written from the inside too, so that no path of the sandbox is ever one of the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox.bubblewrap import PREFIX, USER_NAME, Walls, find_bubblewrap, new_user
from agentrl.sandbox.contract import NO_VARIABLES
from agentrl.sandbox.control_groups import ControlGroup, find_hierarchy
from agentrl.sandbox.launch import Program, walled
from agentrl.sandbox.opening import opening
from agentrl.sandbox.seccomp import filter_program
from agentrl.sandbox.spec import ANY_NETWORK, NO_NETWORK, SandboxSpec
from agentrl.sandbox.supervised import SupervisedSandbox

UNCONFINED = "i-accept-that-commands-can-do-anything-that-i-can"
START_DEADLINE_S = 60.0
CONTROL = 0
"""The supervisor's file descriptor of the socket: its standard input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """The options of this back end."""

    readable: tuple[str, ...] = ()
    """Folders of the host that can be read inside, under the same names."""
    unconfined: str = ""
    """Run without any walls; only `UNCONFINED` does."""


class LocalSandbox(SupervisedSandbox):
    """A sandbox on this machine. It dies with the thread that started it, as the kernel has it.

    Args:
        spec: Its `options` are `LocalOptions`.

    Raises:
        UsageError: the spec asks for what this back end does not have.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec, self._why_lost)
        self._options = _read_options(spec)
        self._program: Program | None = None
        self._group: ControlGroup | None = None
        self._is_open = False  # without walls, where processes of this process's own user would be counted
        self._closing = asyncio.Lock()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as stack:
            try:
                settings = self._launch(theirs, stack)
            except OSError as error:
                ours.close()
                raise SandboxError("a sandbox does not start", got=error) from error
            except UsageError:
                ours.close()
                raise
        await self._channel.open(ours, opening(settings), deadline_s=START_DEADLINE_S)
        assert self._program is not None
        self._program.started()

    def _launch(self, control: socket.socket, stack: contextlib.ExitStack) -> dict[str, Any]:
        """Start the program; the settings that it is to be sent."""
        if self._options.unconfined:
            self._is_open, self.counts_processes = True, False
            self.folder = tempfile.mkdtemp(prefix="agentrl-unconfined-")
            self._program = Program(control.fileno(), [], passed=[], variables=self._variables())
            return {"user": 0, "groups": [], "folder": self.folder, "answers": CONTROL}
        bubblewrap, hierarchy = find_bubblewrap(), find_hierarchy()
        groups: list[int] = []
        if hierarchy is not None:
            self._group = ControlGroup(hierarchy, self.spec.limits)
            self.counts_memory = True
            groups = self._group.open()
            for fd in groups:
                stack.callback(os.close, fd)
        walls = Walls(
            user=new_user(),
            network=str(self.spec.network),
            limits=self.spec.limits,
            readable=self._options.readable,
        )
        filters = filter_program(is_memory_counted=self._group is not None)
        command, passed = walled(bubblewrap, walls, filters=filters, variables=self._variables(), stack=stack)
        self._program = Program(control.fileno(), command, passed=[*passed, *groups], variables={})
        return {"user": walls.user, "groups": groups, "folder": self.folder, "answers": CONTROL}

    def _why_lost(self) -> str:
        return "it is closed" if self._program is None else self._program.last_words()

    def _variables(self, more: Mapping[str, str] = NO_VARIABLES) -> dict[str, str]:
        return {
            "PATH": f"{PREFIX}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": self.folder,
            "USER": USER_NAME,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.spec.env,
            **more,
        }

    def _memory_kills(self) -> int:
        return 0 if self._group is None else self._group.memory_kills()

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._channel.hang_up()
        if self._program is not None:
            self._program.kill()  # before anything is awaited: closing may be cancelled
        async with self._closing:
            await self._channel.close()
            if self._program is not None:
                await self._program.end()
                self._program = None
            if self._group is not None:
                await _until(self._group.remove)
                self._group = None
        if self._is_open:
            shutil.rmtree(self.folder, ignore_errors=True)


def _read_options(spec: SandboxSpec) -> LocalOptions:
    for name in ("image", "url"):
        if getattr(spec, name) is not None:
            raise UsageError(f"a local sandbox has no {name}", got=getattr(spec, name), hint="remove it")
    if spec.network not in (NO_NETWORK, ANY_NETWORK):
        raise UsageError(
            "a local sandbox has all of the network or none, and cannot tell hosts apart",
            got=spec.network,
            expected=f"network {NO_NETWORK} or {ANY_NETWORK}",
            hint="let its programs ask a proxy of yours, or the tools outside",
        )
    readable = spec.options.get("readable", ())
    if isinstance(readable, str) or not all(isinstance(path, str) for path in readable):
        raise UsageError("readable folders of a sandbox are not understood", got=repr(readable), expected="a list")
    try:
        options = LocalOptions(**{**spec.options, "readable": tuple(readable)})
    except TypeError as error:
        raise UsageError(
            "an option of local sandboxes is not understood", got=error, expected="readable, unconfined"
        ) from error
    if options.unconfined not in ("", UNCONFINED):
        raise UsageError(
            "a sandbox without walls must be asked for in these words", got=options.unconfined, expected=UNCONFINED
        )
    for path in options.readable:
        if not (path.startswith("/") and os.path.exists(path)):
            raise UsageError("a readable folder of a sandbox is not there", got=path, expected="an absolute path")
    return options


async def _until(is_done: Callable[[], bool]) -> None:
    """Try for a second; what is left then is removed when the next one starts."""
    for _ in range(100):
        if is_done():
            return
        await asyncio.sleep(0.01)
