"""Python programs in forks of a process that has imported the libraries: importing them again takes seconds.

A fork of a process that has computed with torch must not compute with torch: the fork lacks its threads, for which it
waits for ever. So a server, forked from the tests' process before the first test, forks itself for each program.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import runpy
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TextIO

AGENTRL = ("-c", "import sys; from agentrl.cli import main; main(sys.argv[1:])")
"""Words that start the command line; those of a command follow."""
RESUME = "import sys; from agentrl.runs import rl, start; rl.train(start.resume_run(sys.argv[1]))"
"""A program that resumes a run, whose folder is its argument."""
OWNER_CHECK_S = 2.0
"""Seconds between two looks whether the process that started the server still exists."""
PATIENCE_S = 240.0
"""Seconds that tests wait for others; on a busy machine everything takes twenty times as long."""
LAST_WORDS_S = 5.0
"""Seconds to read what a program wrote that was killed because it did not end."""
NUMBER = struct.Struct("<i")
"""Format of the process id of a program and of its exit code."""


def forked(work: Callable[[], object]) -> int:
    """Do some work in a fork of this process, and return its process id.

    Its exit code is that of a `SystemExit`, 1 for any other exception, which it prints, and 0 otherwise.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child does without
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        gc.disable()
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # nothing of the tests may go on here
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


def exit_code(child: int) -> int:
    """Wait for a process."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class EndedProgram(NamedTuple):
    """Exit code and outputs of a program."""

    code: int
    out: str
    err: str


class _Order(NamedTuple):
    """Program to start: the words after ``python``, its environment, and its current folder."""

    words: Sequence[str]
    variables: Mapping[str, str]
    folder: str


class ForkServer:
    """A fork of this process that runs Python programs in forks of its own."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="forks-"))
        self.address = str(folder / "server")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)
            self._process = forked(lambda: _serve(listener, folder))

    def start(
        self, *words: str, folder: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> ForkedProgram:
        """Start a program.

        Args:
            words: Words that follow ``python`` on a command line: a file, ``-c`` with a program or ``-m`` with a
                module, and arguments.
            folder: Its current folder; by default that of this process.
            variables: Changes of this process's environment.
        """
        order = _Order(words, {**os.environ, **(variables or {})}, str(folder or Path.cwd()))
        return ForkedProgram(self.address, order)

    def command(self, *words: str) -> list[str]:
        """Return a command that runs a program in a fork, with its own standard streams and variables."""
        return [sys.executable, "-I", "-S", __file__, self.address, *words]

    def close(self) -> None:
        """End the server."""
        os.kill(self._process, signal.SIGTERM)
        exit_code(self._process)


class ForkedProgram:
    """A running program of a `ForkServer`, with pipes for its outputs, as `subprocess.Popen` has them."""

    def __init__(self, address: str, order: _Order) -> None:
        pipes = [os.pipe(), os.pipe()]
        with open(os.devnull) as nothing:
            self.pid, self._ending = _start(address, order, [nothing.fileno(), *(writing for _, writing in pipes)])
        for _, writing in pipes:
            os.close(writing)
        self.stdout, self.stderr = (os.fdopen(reading, encoding="utf-8") for reading, _ in pipes)
        self._code: int | None = None

    def send_signal(self, number: int) -> None:
        """Send a signal to the program, unless it has ended."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop the program, and return once all of its threads stand still."""
        self.send_signal(signal.SIGSTOP)
        until = time.monotonic() + PATIENCE_S
        while self.poll() is None and not _stands_still(self.pid):
            assert time.monotonic() < until, f"waited {PATIENCE_S:g} s in vain for program {self.pid} to stand still"
            time.sleep(0.001)

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._exit_code(0.0)

    def wait(self, *, within_s: float = PATIENCE_S) -> EndedProgram:
        """Read what it still writes, and wait for its end; end it and fail if that takes too long."""
        told = {"out": "", "err": ""}

        def read(name: str, stream: TextIO) -> None:
            told[name] = stream.read()

        streams = (("out", self.stdout), ("err", self.stderr))
        readers = [
            threading.Thread(target=read, args=each, name=f"reader of {each[0]}", daemon=True) for each in streams
        ]
        until = time.monotonic() + within_s
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(0.0, until - time.monotonic()))
        code = self._exit_code(max(0.0, until - time.monotonic()))
        if code is None or any(reader.is_alive() for reader in readers):
            self.send_signal(signal.SIGKILL)
            for reader in readers:
                reader.join(LAST_WORDS_S)
            raise AssertionError(f"waited {within_s:g} s in vain for the end of program {self.pid}; it wrote: {told}")
        return EndedProgram(code, told["out"], told["err"])

    def kill(self) -> int:
        """End the program if it still runs, and return its exit code."""
        self.send_signal(signal.SIGKILL)
        code = self._exit_code(PATIENCE_S)
        assert code is not None, f"waited {PATIENCE_S:g} s in vain for the end of program {self.pid}, which was killed"
        return code

    def close(self) -> None:
        """End the program if it still runs, and close the pipes."""
        self.kill()
        self.stdout.close()
        self.stderr.close()
        self._ending.close()

    def _exit_code(self, within_s: float) -> int | None:
        if self._code is None:
            self._ending.settimeout(within_s)
            with contextlib.suppress(BlockingIOError, TimeoutError):
                self._code = _number(self._ending)
        return self._code


def _stands_still(process: int) -> bool:
    try:
        tasks = [file.read_text() for file in Path(f"/proc/{process}/task").glob("*/stat")]
    except OSError:  # a thread has just ended
        return False
    return all(task.rpartition(") ")[2].startswith("T") for task in tasks)


def _start(address: str, order: _Order, streams: Sequence[int]) -> tuple[int, socket.socket]:
    """Start a program; return its process id and a socket that receives its exit code."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [b"."], list(streams))
    with connection.makefile("wb") as channel:
        pickle.dump(tuple(order), channel)
    return _number(connection), connection


def _number(connection: socket.socket) -> int:
    return int(NUMBER.unpack(connection.recv(NUMBER.size))[0])


def _serve(listener: socket.socket, folder: Path) -> None:
    """Fork for each connection, until a signal or the end of the process that started the server; remove its folder."""
    owner = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    listener.settimeout(OWNER_CHECK_S)
    try:
        while os.getppid() == owner:
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                with connection:
                    forked(lambda connection=connection: _keep(listener, connection))
            _reap()
    finally:
        _reap()
        shutil.rmtree(folder, ignore_errors=True)


def _reap() -> None:
    """Let the processor time of programs that have ended count as that of the tests."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _keep(listener: socket.socket, connection: socket.socket) -> None:
    """Fork the program of a connection, wait for it, and send its exit code."""
    listener.close()
    connection.setblocking(True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as channel:
        order = _Order(*pickle.load(channel))
    program = forked(lambda: _run(order, streams))
    for stream in streams:
        os.close(stream)
    connection.send(NUMBER.pack(program))
    threading.Thread(target=_end_with, args=(connection, program), daemon=True).start()
    code = exit_code(program)
    with contextlib.suppress(OSError):
        connection.send(NUMBER.pack(code))


def _end_with(connection: socket.socket, program: int) -> None:
    """Kill a program once the process that ordered it has ended or does not want it any more."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(program, signal.SIGKILL)


def _run(order: _Order, streams: Sequence[int]) -> None:
    """Run a program in this process, as ``python`` would."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, encoding="utf-8", closefd=False) for n in (1, 2))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.resetwarnings()  # those of the tests are errors
    for category in (DeprecationWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    os.environ.clear()
    os.environ.update(order.variables)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of tokenizers are not in the fork either
    os.chdir(order.folder)
    kind, *words = order.words
    paths = [path for path in order.variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [order.folder if kind in ("-c", "-m") else str(Path(kind).resolve().parent), *paths]
    importlib.invalidate_caches()
    gc.enable()
    if kind == "-c":
        sys.argv = ["-c", *words[1:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif kind == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *words]
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    """Run a program in a fork, with the streams and variables of this process; end as it ends."""
    address, *words = sys.argv[1:]
    order = _Order(words, dict(os.environ), str(Path.cwd()))
    _, ending = _start(address, order, [0, 1, 2])
    for number in (0, 1, 2):
        os.close(number)
    code = _number(ending)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
