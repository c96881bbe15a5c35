"""A sandbox that confines nothing: a folder and processes, for tests of what is built on sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from agentrl.errors import SandboxError
from agentrl.sandbox import (
    Command,
    Entry,
    ExecResult,
    Limits,
    Sandbox,
    SandboxFileError,
    SandboxProcess,
    SandboxSpec,
)
from agentrl.sandbox.contract import NO_VARIABLES

OPEN: set[PlainSandbox] = set()
"""Those that were started and not closed."""


class PlainProcess(SandboxProcess):
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        assert process.stdout is not None
        assert process.stdin is not None
        self._out, self._in = process.stdout, process.stdin

    async def write(self, data: bytes) -> None:
        try:
            self._in.write(data)
            await self._in.drain()
        except ConnectionResetError as error:
            raise BrokenPipeError from error

    async def read(self) -> bytes:
        return await self._out.read(65536)

    async def read_line(self, *, longest: int = 2**20) -> bytes:
        return await self._out.readline()

    async def wait(self) -> ExecResult:
        return ExecResult(exit_code=await self._process.wait(), stdout=b"", stderr=b"")

    async def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._in.close()
        await self._process.wait()
        while await self._out.read(65536):
            pass


class PlainSandbox(Sandbox):
    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._path: Path | None = None
        self._processes: list[PlainProcess] = []

    async def _start(self) -> None:
        self._path = Path(tempfile.mkdtemp())
        OPEN.add(self)

    @property
    def path(self) -> Path:
        if self._path is None:
            raise SandboxError("the sandbox is gone")
        return self._path

    async def exec(
        self,
        command: Command,
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] = NO_VARIABLES,
        limits: Limits | None = None,
    ) -> ExecResult:
        began = time.monotonic()
        process = await self._popen(command, cwd, env, asyncio.subprocess.PIPE)
        most = self.spec.limits.narrow(limits)
        late = False
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin), most.seconds)
        except TimeoutError:
            late, out, err = True, b"", b""
        await PlainProcess(process).kill()
        code = process.returncode or 0
        return ExecResult(
            exit_code=code if code >= 0 else 128 - code,
            stdout=out[: most.output_bytes],
            stderr=err[: most.output_bytes],
            timed_out=late,
            seconds=time.monotonic() - began,
        )

    async def _popen(
        self, command: Command, cwd: str | None, env: Mapping[str, str], stderr: int
    ) -> asyncio.subprocess.Process:
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        words = [sys.executable if word == "python3" else word for word in words]
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            cwd=self.path / (cwd or "."),
            env={"PATH": os.environ["PATH"], "HOME": str(self.path), "TMPDIR": str(self.path), **self.spec.env, **env},
            start_new_session=True,
            limit=2**20,
        )

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] = NO_VARIABLES,
        limits: Limits | None = None,
    ) -> SandboxProcess:
        process = PlainProcess(await self._popen(command, cwd, env, asyncio.subprocess.DEVNULL))
        self._processes.append(process)
        return process

    async def read(self, path: str, *, most: int = 16 * 2**20) -> bytes:
        try:
            return (self.path / path).read_bytes()[:most]
        except OSError as error:
            raise SandboxFileError(f"cannot read {path}") from error

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        file = self.path / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            if executable:
                file.chmod(0o755)
        except OSError as error:
            raise SandboxFileError(f"cannot write {path}") from error

    async def list(self, path: str = ".") -> list[Entry]:
        try:
            return [Entry(name=p.name, is_folder=p.is_dir()) for p in sorted((self.path / path).iterdir())]
        except OSError as error:
            raise SandboxFileError(f"no folder {path}") from error

    async def snapshot(self) -> bytes:
        result = await self.exec(["tar", "-cf", "-", "."], limits=Limits(output_bytes=2**30))
        return result.stdout

    async def restore(self, snapshot: bytes) -> None:
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        await self.exec(["tar", "-xf", "-"], stdin=snapshot)

    async def close(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            await process.kill()
        path, self._path = self._path, None
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
        OPEN.discard(self)
