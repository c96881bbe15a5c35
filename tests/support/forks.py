"""Programs in forks of this process, which need not import libraries again.

A fork must not compute with torch: the threads of its libraries do not exist in the fork, which then waits for ever.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple


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
        code = int(end.code or 0)
    except BaseException:  # nothing of the tests may go on here
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
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


class ForkedProgram:
    """A program in a fork of this process, with pipes for its outputs, as `subprocess.Popen` has them.

    Args:
        work: Called in the fork.
        folder: Its current folder, from which it imports, too.
        variables: Changes of its environment.
    """

    def __init__(
        self, work: Callable[[], object], *, folder: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        pipes = [os.pipe(), os.pipe()]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

        def program() -> None:
            for number, (reading, writing) in enumerate(pipes, start=1):
                os.close(reading)
                os.dup2(writing, number)
                os.close(writing)
            sys.stdout, sys.stderr = (
                os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False) for number in (1, 2)
            )
            signal.signal(signal.SIGINT, signal.default_int_handler)
            warnings.resetwarnings()  # those of the tests are errors
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", ResourceWarning)
            os.environ.update(variables or {})
            if folder is not None:
                os.chdir(folder)
                sys.path.insert(0, str(folder))
                importlib.invalidate_caches()
            work()

        self.pid = forked(program)
        for _, writing in pipes:
            os.close(writing)
        self.stdout, self.stderr = (os.fdopen(reading, encoding="utf-8") for reading, _ in pipes)

    def send_signal(self, number: int) -> None:
        """Send a signal to the program, which is still to be waited for."""
        os.kill(self.pid, number)

    def wait(self) -> EndedProgram:
        """Read what it still writes, and wait for its end."""
        with self.stdout, self.stderr:
            out, err = self.stdout.read(), self.stderr.read()
        return EndedProgram(exit_code(self.pid), out, err)
