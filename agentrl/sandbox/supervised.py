"""What sandboxes with a supervisor inside have in common, however that got there: commands, files, snapshots."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox.channel import Answer, Channel
from agentrl.sandbox.contract import NO_VARIABLES, Command, Entry, Sandbox, SandboxFileError, SandboxProcess
from agentrl.sandbox.limits import ExecResult, Limits
from agentrl.sandbox.spec import SandboxSpec
from agentrl.sandbox.spoken_process import SpokenProcess

GRACE_S = 30.0
"""How much later than its deadline a command's answer may come before the sandbox counts as broken."""
FILE_SECONDS = 60.0


class SupervisedSandbox(Sandbox):
    """A sandbox in which a supervisor (`agentrl.sandbox.supervisor`) does what is asked for.

    Args:
        spec: What it is like.
        why_lost: Says why the supervisor is gone, when it is.
    """

    counts_memory = False
    """Whether a control group counts the memory of all commands together."""
    counts_processes = True
    """Whether the commands' user is theirs alone, so that its processes can be counted."""

    def __init__(self, spec: SandboxSpec, why_lost: Callable[[], str]) -> None:
        super().__init__(spec)
        self._channel = Channel(why_lost)

    @abstractmethod
    def _variables(self, more: Mapping[str, str] = NO_VARIABLES) -> dict[str, str]:
        """The environment variables of commands."""

    def _memory_kills(self) -> int:
        """How many processes the kernel has killed for want of memory, where the supervisor does not tell."""
        return 0

    async def exec(
        self,
        command: Command,
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] = NO_VARIABLES,
        limits: Limits | None = None,
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        kills = self._memory_kills()
        allowed = self.spec.limits.narrowed(limits)
        answer = await self._start_job(self._executed(command, cwd, env, allowed, limits), stdin, allowed)
        return self._result(answer, kills)

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] = NO_VARIABLES,
        limits: Limits | None = None,
    ) -> SandboxProcess:
        """See `Sandbox.spawn`."""
        kills = self._memory_kills()
        allowed = self.spec.limits.narrowed(limits)
        request = self._executed(command, cwd, env, allowed, limits)
        given = limits or Limits()
        request["seconds"] = given.seconds or float("inf")
        request["spawned"] = True
        if given.cpu_seconds is None:
            request["limits"] = [limit for limit in request["limits"] if limit[0] != resource.RLIMIT_CPU]
        number = self._channel.next_number()
        ended = asyncio.create_task(self._channel.ask("start", number=number, **request))
        await asyncio.sleep(0)  # the request is on its way
        return SpokenProcess(self._channel, number, ended, lambda answer: self._result(answer, kills))

    def _executed(
        self, command: Command, cwd: str | None, env: Mapping[str, str], allowed: Limits, own: Limits | None
    ) -> dict[str, Any]:
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        variables = self._variables(env)
        names_are_good = all(name and "=" not in name for name in variables)
        if not argv or not names_are_good or any("\0" in word for word in (*argv, *variables, *variables.values())):
            raise UsageError(
                "a command is not understood", got=repr(argv)[:200], expected="words without NUL, NAME: value"
            )
        return {
            "action": "exec",
            "argv": argv,
            "env": variables,
            "cwd": cwd or self.folder,
            "seconds": allowed.seconds,
            "output": allowed.output_bytes,
            "spawned": False,
            "limits": self._resource_limits(allowed, own),
        }

    def _resource_limits(self, allowed: Limits, own: Limits | None) -> list[tuple[int, int]]:
        """Limits of each process, for ``setrlimit``; a group counts memory where there is one."""
        cpu, file = allowed.cpu_seconds, allowed.file_bytes
        assert cpu is not None
        assert file is not None
        found = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 1024), (resource.RLIMIT_FSIZE, file)]
        found.append((resource.RLIMIT_CPU, max(1, round(cpu))))
        memory = (own or Limits()).memory_bytes if self.counts_memory else allowed.memory_bytes
        if memory is not None:
            found.append((resource.RLIMIT_AS, memory))
        if allowed.processes is not None and self.counts_processes:
            found.append((resource.RLIMIT_NPROC, allowed.processes))
        return found

    async def _start_job(self, request: dict[str, Any], stdin: bytes, allowed: Limits) -> Answer:
        """Have it done; whoever stops waiting stops it."""
        number = self._channel.next_number()
        try:
            async with asyncio.timeout(request["seconds"] + GRACE_S):
                return await self._channel.ask("start", body=stdin, number=number, **request)
        except TimeoutError as late:
            raise SandboxError(
                "the sandbox does not answer", got=f"nothing in {request['seconds'] + GRACE_S} s"
            ) from late
        except asyncio.CancelledError:
            self._channel.tell("signal", target=number, signal=int(signal.SIGKILL))
            raise

    def _result(self, answer: Answer, kills: int) -> ExecResult:
        return ExecResult(
            exit_code=answer.code,
            stdout=answer.out,
            stderr=answer.err,
            timed_out=answer.timed_out,
            truncated=answer.truncated,
            out_of_memory=answer.out_of_memory or self._memory_kills() > kills,
            seconds=answer.seconds,
        )

    async def read(self, path: str, *, most: int = 16 * 2**20) -> bytes:
        """See `Sandbox.read`."""
        return await self._on_file("read", path, output=most + 1, most=most)

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """See `Sandbox.write`."""
        await self._on_file("write", path, data, executable=executable)

    async def list(self, path: str = ".") -> list[Entry]:
        """See `Sandbox.list`."""
        found = await self._on_file("list", path, output=16 * 2**20)
        entries = [Entry(name=os.fsdecode(line[1:]), is_folder=line[:1] == b"d") for line in found.split(b"\0") if line]
        return sorted(entries, key=lambda entry: entry.name)

    async def _on_file(self, action: str, path: str, data: bytes = b"", *, output: int = 0, **more: Any) -> bytes:
        if not path or "\0" in path or not _can_be_sent(path):
            raise SandboxFileError("a path is not understood", got=ascii(path))
        limits = [(resource.RLIMIT_FSIZE, self.spec.limits.file_bytes)]
        request = {"action": action, "path": path, "cwd": self.folder, "seconds": FILE_SECONDS, "spawned": False}
        request |= {"limits": limits, "output": max(output, 4096), **more}
        answer = await self._start_job(request, data, self.spec.limits)
        if answer.code != 0 or answer.timed_out:
            told = answer.err.decode(errors="replace").strip() or f"{path}: it took too long"
            raise SandboxFileError(f"cannot {action} {told}")
        return answer.out

    async def snapshot(self) -> bytes:
        """See `Sandbox.snapshot`."""
        most = 2 * (self.spec.limits.disk_bytes or 0)
        request = self._executed(["/bin/tar", "-cf", "-", "."], None, NO_VARIABLES, self.spec.limits, None)
        answer = await self._start_job({**request, "output": most}, b"", self.spec.limits)
        if answer.code != 0 or answer.truncated or answer.timed_out:
            raise SandboxFileError("no snapshot can be made", got=answer.err.decode(errors="replace").strip())
        return answer.out

    async def restore(self, snapshot: bytes) -> None:
        """See `Sandbox.restore`."""
        await self._channel.ask("kill_all")
        script = "find . -mindepth 1 -delete && exec /bin/tar -xpf -"
        request = self._executed(script, None, NO_VARIABLES, self.spec.limits, None)
        answer = await self._start_job(request, snapshot, self.spec.limits)
        if answer.code != 0 or answer.timed_out:
            raise SandboxFileError("a snapshot cannot be restored", got=answer.err.decode(errors="replace").strip())


def _can_be_sent(path: str) -> bool:
    """Names of files that are no text come with marks, which are sent back; other halves of characters mean nothing."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True
