"""Folders in which programs of the `external` loop run, on this machine or in a sandbox."""

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
MAX_QUOTE_CHARS, QUOTED_LINES = 1000, 8
"""Maximum characters and lines that an error quotes from the end of a failed program's output."""
MAX_LOG_CHARS = 64 * 1024
MAX_OUTPUT_BYTES = 1 << 20
"""Maximum bytes that are read from the end of a program's output."""
GUARDED = sys.platform == "linux"
"""True if a guard kills all children of an ended program; elsewhere those outside its process group keep running."""
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
"""Name prefixes of the variables that a program on this machine inherits from this process; no keys or tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Output of an ended program, and its failure."""

    output: str
    problem: str | None
    """Description of the failure; ``None`` if it succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Program that plays episodes.

    Args:
        words: The program and its arguments.
        files: Files to copy into a sandbox's folder, by name: the content, and true if the file is executable.
    """

    words: tuple[str, ...]
    files: Mapping[str, tuple[bytes, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramInput:
    """Input of a program in one episode."""

    prompt: str
    """Its standard input."""
    task: Mapping[str, Any]
    """Content of the JSON file at ``AGENTRL_TASK``."""
    variables: Mapping[str, str]
    """Environment variables in addition to the inherited ones."""
    keep_log: Callable[[str], None]
    """Function that stores the program's output, even if it fails."""


class ProgramFolder(ABC):
    """Folder in which one program runs.

    Args:
        url: The base URL of its session, as reached from the folder.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    async def run(self, program: Program, given: ProgramInput) -> ProgramResult:
        """Run a program to its end; cancelling the call kills it and all its children."""

    @abstractmethod
    async def read(self, path: str) -> bytes:
        """Read a file that the program wrote.

        Raises:
            OSError: the file does not exist.
            ToolError: the file does not exist (in a sandbox).
        """


class HostFolder(ProgramFolder):
    """Folder of this machine; its program runs with the rights of this process.

    Args:
        folder: An empty folder that nothing else uses.
        url: See `ProgramFolder`.
    """

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(url)
        self._folder = folder

    async def run(self, program: Program, given: ProgramInput) -> ProgramResult:
        """See `ProgramFolder.run`. Output goes to files, so that no child that is left behind keeps a pipe open."""
        task_file = self._folder / TASK_FILE
        task_file.write_text(json.dumps(given.task), encoding="utf-8")
        inherited = {name: os.environ[name] for name in os.environ if name.startswith(INHERITED)}
        environment = {**inherited, "AGENTRL_TASK": str(task_file), **given.variables}
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            stdin.write(given.prompt.encode())
            stdin.seek(0)
            process = await self._start(program.words, environment, stdin, stdout, stderr)
            code = None
            try:
                code = await process.wait()
            finally:
                await _end(process)
                output, errors = _end_of(stdout), _end_of(stderr)
                given.keep_log((output + errors)[-MAX_LOG_CHARS:])
        if GUARDED and code < 0:
            return ProgramResult(
                output=output, problem="the program's children could not be ended: its guard was killed"
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
        sandbox: A started sandbox in which no other program has run.
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
                del output[:-MAX_OUTPUT_BYTES]
            result = await process.wait()
            note = " (out of memory)" if result.out_of_memory else ""
        finally:
            with suppress(SandboxError):  # the sandbox's failure has been raised already
                await process.kill()
                errors = (await process.wait()).stderr.decode(errors="replace")
            text = output.decode(errors="replace")
            given.keep_log((text + errors)[-MAX_LOG_CHARS:])
        return ProgramResult(output=text, problem=_problem(result.exit_code, errors, text, note))

    async def read(self, path: str) -> bytes:
        """See `ProgramFolder.read`."""
        return await self._sandbox.read(path)


def read_program(command: str | Sequence[str], *, is_sandboxed: bool) -> Program:
    """Read a command of the config.

    ``{python}`` is this Python, and in a sandbox ``python3``. Relative paths of existing files stay valid: they become
    absolute, or the files are copied into the sandbox's folder.

    Raises:
        UsageError: the command is empty or not valid, or two of its files have the same name.
    """
    try:
        words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    except ValueError as error:
        raise UsageError("agent.options.command cannot be read", got=f"{command!r}: {error}") from error
    if not words:
        raise UsageError("agent.options.command is empty", expected="a program and its arguments")
    words = [word.replace("{python}", "python3" if is_sandboxed else sys.executable) for word in words]
    if not is_sandboxed:  # symbolic links are kept: a resolved link to Python would lose its virtual environment
        return Program(
            words=tuple(str(Path(word).absolute()) if Path(word).is_file() else word for word in words), files={}
        )
    brought = {word: Path(word) for word in words if not word.startswith("/") and Path(word).is_file()}
    files = {path.name: (path.read_bytes(), os.access(path, os.X_OK)) for path in brought.values()}
    if len(files) < len(brought) or {TASK_FILE, PROMPT_FILE} & set(files):
        raise UsageError(
            "files of agent.options.command have the same name in the sandbox", got=", ".join(sorted(brought))
        )
    return Program(words=tuple(f"./{brought[word].name}" if word in brought else word for word in words), files=files)


def read_program_sandbox(given: Mapping[str, Any]) -> SandboxSpec:
    """Read ``agent.options.sandbox``, whose default network is the gateway.

    Raises:
        UsageError: programs in it could not reach the gateway.
    """
    if not isinstance(given, Mapping):
        raise UsageError("agent.options.sandbox is not valid", got=repr(given), expected="{type: local}")
    spec = read_spec({"network": GATEWAY, **given})
    if not spec.uses_gateway and spec.network != ANY_NETWORK:
        raise UsageError(
            "the program of the external loop cannot reach the policy from its sandbox",
            got=f"network {spec.network}",
            expected=f"network {GATEWAY}, or a list that contains {GATEWAY}",
        )
    return spec


def _problem(exit_code: int, errors: str, output: str, note: str = "") -> str | None:
    """Describe a program's failure, with the end of its output; ``None`` if it succeeded."""
    if not exit_code:
        return None
    quote = next((f": {text}" for text in (_last_lines(errors), _last_lines(output)) if text), ", and wrote nothing")
    return f"the program ended with {exit_code}{note}{quote}"


def _last_lines(text: str) -> str:
    """Return the last lines of a text, without a partial first one unless it is very long."""
    lines = text[-MAX_QUOTE_CHARS:].strip().splitlines()[-QUOTED_LINES:]
    is_cut = len(lines) > 1 and len(text.strip()) > MAX_QUOTE_CHARS
    return "\n".join(lines[1:] if is_cut and len(lines) < QUOTED_LINES else lines)


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_OUTPUT_BYTES))
    return file.read().decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a program and its children."""
    with suppress(ProcessLookupError):
        if GUARDED and process.returncode is None:
            process.terminate()  # the guard kills the program and its children, then ends
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), program_guard.PROGRAM_KILL_S + KILL_AFTER_S)
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), KILL_AFTER_S)
