"""Where a program of the `external` loop runs: in a folder of this machine, or in a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agentrl.errors import EnvironmentFailure, SandboxError, UsageError, described_error
from agentrl.sandbox import Sandbox, SandboxSpec, program_guard, read_spec
from agentrl.sandbox.spec import ANY_NETWORK, GATEWAY

KILL_AFTER_S = 2.0
LONGEST_QUOTE, QUOTED_LINES = 1000, 8
"""Characters and lines of what a failed program wrote that its error quotes, from the end."""
LONGEST_LOG = 64 * 1024
LONGEST_ANSWER = 1 << 20
"""Bytes of a program's output that are read, from its end."""
GUARDED = sys.platform == "linux"
"""A guard ends what a program has started, once that has ended; elsewhere those that left its process group go on."""
TASK_FILE, PROMPT_FILE = "task.json", ".prompt"
INHERITED = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_",
    "TZ",
    "TMPDIR",
    "PYTHON",
    "VIRTUAL_ENV",
    "CONDA_",
    "LD_LIBRARY_PATH",
)
"""Beginnings of the names of variables that a program on this machine gets from this process; no keys or tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """End of a program."""

    output: str
    problem: str | None
    """How it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Program that plays episodes.

    Args:
        words: The program and its arguments.
        files: Files that it brings into a sandbox's folder, by name: content, and whether it can be executed.
    """

    words: tuple[str, ...]
    files: Mapping[str, tuple[bytes, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramInput:
    """What a program gets in one episode."""

    prompt: str
    """Its standard input."""
    task: Mapping[str, Any]
    """Content of the file of JSON that ``AGENTRL_TASK`` names."""
    variables: Mapping[str, str]
    """Its environment variables, besides those that it gets anyway."""
    keep_log: Callable[[str], None]
    """Gets what it printed, however it ends."""


class ProgramFolder(ABC):
    """Folder in which one program runs.

    Args:
        url: The base address of its session, as seen from there.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    async def run(self, program: Program, given: ProgramInput) -> ProgramResult:
        """Run it to its end; cancelling the call kills it, and all that it started."""

    @abstractmethod
    async def read(self, path: str) -> bytes:
        """Read a file that it left.

        Raises:
            OSError: there is none.
            ToolError: there is none (in a sandbox).
        """


class HostFolder(ProgramFolder):
    """Folder of this machine, with the rights of this process.

    Args:
        folder: Empty, and nobody else's.
        url: See `ProgramFolder`.
    """

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(url)
        self._folder = folder

    async def run(self, program: Program, given: ProgramInput) -> ProgramResult:
        """See `ProgramFolder.run`. What it writes goes to files: a child that it leaves behind holds no pipe open."""
        task_file = self._folder / TASK_FILE
        task_file.write_text(json.dumps(given.task), encoding="utf-8")
        inherited = {name: os.environ[name] for name in os.environ if name.startswith(INHERITED)}
        environment = {**inherited, "AGENTRL_TASK": str(task_file), **given.variables}
        with (
            tempfile.TemporaryFile() as said,
            tempfile.TemporaryFile() as asked,
            tempfile.TemporaryFile() as complained,
        ):
            asked.write(given.prompt.encode())
            asked.seek(0)
            process = await self._start(program.words, environment, asked, said, complained)
            code = None
            try:
                code = await process.wait()
            finally:
                await _end(process)
                output, errors = _end_of(said), _end_of(complained)
                given.keep_log((output + errors)[-LONGEST_LOG:])
        if GUARDED and code < 0:
            return ProgramResult(
                output=output, problem="what the program started could not be ended: its guard was killed"
            )
        return ProgramResult(output=output, problem=_problem(code, errors, output))

    async def _start(
        self, words: Sequence[str], variables: Mapping[str, str], *files: IO[bytes]
    ) -> asyncio.subprocess.Process:
        stdin, stdout, stderr = files
        if shutil.which(words[0], path=variables.get("PATH")) is None:
            raise UsageError("the program cannot be started", got=shlex.join(words), expected="a file to execute")
        guard = [sys.executable, "-I", "-S", program_guard.__file__, str(os.getpid())] if GUARDED else []
        try:
            return await asyncio.create_subprocess_exec(
                *guard,
                *words,
                cwd=self._folder,
                env=variables,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentFailure("the program could not be started", got=described_error(error)) from error

    async def read(self, path: str) -> bytes:
        """See `ProgramFolder.read`."""
        return (self._folder / path).read_bytes()


class SandboxFolder(ProgramFolder):
    """Folder of a sandbox.

    Args:
        sandbox: Started; it has had no other program.
        url: See `ProgramFolder`.
    """

    def __init__(self, sandbox: Sandbox, url: str) -> None:
        super().__init__(url)
        self._sandbox = sandbox

    async def run(self, program: Program, given: ProgramInput) -> ProgramResult:
        """See `ProgramFolder.run`."""
        for name, (content, is_executable) in program.files.items():
            await self._sandbox.write(name, content, executable=is_executable)
        await self._sandbox.write(TASK_FILE, json.dumps(given.task).encode())
        await self._sandbox.write(PROMPT_FILE, given.prompt.encode())
        environment = {"AGENTRL_TASK": f"{self._sandbox.folder}/{TASK_FILE}", **given.variables}
        words = ["/bin/sh", "-c", 'exec "$@" <"$0"', PROMPT_FILE, *program.words]
        process = await self._sandbox.spawn(words, env=environment)
        output, errors, note = bytearray(), "", ""
        try:
            while piece := await process.read():
                output += piece
                del output[:-LONGEST_ANSWER]
            result = await process.wait()
            note = " (out of memory)" if result.out_of_memory else ""
        finally:
            with suppress(SandboxError):  # whatever it is was raised already
                await process.kill()
                errors = (await process.wait()).stderr.decode(errors="replace")
            said = output.decode(errors="replace")
            given.keep_log((said + errors)[-LONGEST_LOG:])
        return ProgramResult(output=said, problem=_problem(result.exit_code, errors, said, note))

    async def read(self, path: str) -> bytes:
        """See `ProgramFolder.read`."""
        return await self._sandbox.read(path)


def read_program(command: str | Sequence[str], *, is_sandboxed: bool) -> Program:
    """Read a command of the config.

    ``{python}`` is this Python, and in a sandbox ``python3``. Relative paths of files here stay valid: they become
    absolute ones, or the files are brought into the sandbox's folder.

    Raises:
        UsageError: there is none, or two of its files have one name.
    """
    try:
        words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    except ValueError as error:
        raise UsageError("agent.options.command cannot be read", got=f"{command!r}: {error}") from error
    if not words:
        raise UsageError("agent.options.command is empty", expected="a program and its arguments")
    words = [word.replace("{python}", "python3" if is_sandboxed else sys.executable) for word in words]
    if not is_sandboxed:  # a link to Python stays one: behind it, the packages of its environment are missing
        return Program(
            words=tuple(str(Path(word).absolute()) if Path(word).is_file() else word for word in words), files={}
        )
    brought = {word: Path(word) for word in words if not word.startswith("/") and Path(word).is_file()}
    files = {path.name: (path.read_bytes(), os.access(path, os.X_OK)) for path in brought.values()}
    if len(files) < len(brought) or {TASK_FILE, PROMPT_FILE} & set(files):
        raise UsageError("files of agent.options.command have one name in the sandbox", got=", ".join(sorted(brought)))
    return Program(words=tuple(f"./{brought[word].name}" if word in brought else word for word in words), files=files)


def read_program_sandbox(given: Mapping[str, Any]) -> SandboxSpec:
    """Read ``agent.options.sandbox``, whose network is the gateway unless it says otherwise.

    Raises:
        UsageError: its programs would not reach the gateway.
    """
    if not isinstance(given, Mapping):
        raise UsageError("agent.options.sandbox is not understood", got=repr(given), expected="{type: local}")
    spec = read_spec({"network": GATEWAY, **given})
    if not spec.uses_gateway and spec.network != ANY_NETWORK:
        raise UsageError(
            "the program of the external loop does not reach the policy from its sandbox",
            got=f"network {spec.network}",
            expected=f"network {GATEWAY}, or a list in which {GATEWAY} stands",
        )
    return spec


def _problem(exit_code: int, errors: str, output: str, note: str = "") -> str | None:
    """Return how a program failed, with the end of what it wrote; ``None`` where it did not."""
    if not exit_code:
        return None
    said = next((f": {text}" for text in (_last_lines(errors), _last_lines(output)) if text), ", and wrote nothing")
    return f"the program ended with {exit_code}{note}{said}"


def _last_lines(text: str) -> str:
    """Return the last lines of a text, whole ones where they are not too long."""
    lines = text[-LONGEST_QUOTE:].strip().splitlines()[-QUOTED_LINES:]
    is_cut = len(lines) > 1 and len(text.strip()) > LONGEST_QUOTE
    return "\n".join(lines[1:] if is_cut and len(lines) < QUOTED_LINES else lines)


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LONGEST_ANSWER))
    return file.read().decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a program and what it started."""
    with suppress(ProcessLookupError):
        if GUARDED and process.returncode is None:
            process.terminate()  # its guard ends all of it, and then itself
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), program_guard.KILL_S + KILL_AFTER_S)
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), KILL_AFTER_S)
