"""A Python interpreter in a local sandbox. What it says of code depends on no race: the graces are long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox import Limits, Sandbox, open_sandbox
from agentrl.sandbox.interpreter import ExecutionResult, Interpreter

LONG_S = 60.0


@contextlib.asynccontextmanager
async def opened(**changes: Any) -> AsyncIterator[tuple[Sandbox, Interpreter]]:
    async with open_sandbox("local") as sandbox:
        interpreter = Interpreter(sandbox, **{"seconds": LONG_S, "grace_s": LONG_S, **changes})
        yield sandbox, interpreter
        await interpreter.close()


async def test_variables_stay_until_the_interpreter_is_closed() -> None:
    async with opened() as (sandbox, interpreter):
        assert await interpreter.run("x = 1; print('hi')") == ExecutionResult(output="hi\n")
        assert await interpreter.run("x") == ExecutionResult(output="1\n")
        raised = await interpreter.run("1 / 0")
        assert raised.raised
        assert raised.lost == ""
        await interpreter.run("open('x.txt', 'w').write(str(x))")
        assert await sandbox.read("x.txt") == b"1"
        await interpreter.close()
        assert (await interpreter.run("x")).output.endswith("NameError: name 'x' is not defined\n")


@pytest.mark.parametrize("code", [3, 0, 126, 127, 137])
async def test_ended_interpreter_reports_its_exit_code_and_is_replaced(code: int) -> None:
    async with opened() as (_, interpreter):
        lost = ExecutionResult(raised=True, lost=f"The interpreter ended with exit code {code}.")
        assert await interpreter.run(f"import os; os._exit({code})") == lost
        assert await interpreter.run("1") == ExecutionResult(output="1\n")


async def test_interpreter_that_ended_between_two_calls_is_reported() -> None:
    async with opened() as (sandbox, interpreter):
        await interpreter.run("import os, signal; open('pid', 'w').write(str(os.getpid()))")
        await sandbox.exec("kill -9 $(cat pid); while kill -0 $(cat pid) 2>/dev/null; do :; done")
        assert (await interpreter.run("1")).lost == "The interpreter ended with exit code 137."


async def test_code_that_takes_too_long_is_interrupted_and_variables_are_kept() -> None:
    async with opened(seconds=0.5) as (_, interpreter):
        assert (await interpreter.run("x = 1")).output == ""
        stopped = await interpreter.run("while True: pass")
        assert stopped.output.endswith("KeyboardInterrupt\n[stopped after 0.5 s; variables are kept]")
        assert stopped.raised
        assert await interpreter.run("x") == ExecutionResult(output="1\n")


STUBBORN = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
STRANGE = (
    "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'7\\n')\n    except OSError: pass\nwhile True: pass"
)
CLOSED = "import os\nos.closerange(3, 100)\nwhile True: pass"


@pytest.mark.parametrize(
    ("code", "changes", "told"),
    [
        (STUBBORN, {"seconds": 0.2, "grace_s": 0.2}, "The code ran for more than 0.2 s and did not stop."),
        (STRANGE, {}, "The interpreter sent an invalid reply."),
        (CLOSED, {"grace_s": 0.2}, "The interpreter closed its output."),
    ],
    ids=["stubborn", "strange", "closed"],
)
async def test_hanging_interpreter_is_killed_without_an_exit_code(
    code: str, changes: dict[str, float], told: str
) -> None:
    async with opened(**changes) as (_, interpreter):
        assert await interpreter.run(code) == ExecutionResult(raised=True, lost=told)
        interpreter._seconds = LONG_S
        assert await interpreter.run("1") == ExecutionResult(output="1\n")


async def test_memory_beyond_the_limit_is_an_error_of_the_code() -> None:
    async with opened(limits=Limits(memory_bytes=256 * 2**20)) as (_, interpreter):
        assert "MemoryError" in (await interpreter.run("x = bytearray(2**30)")).output


async def test_a_sandbox_that_fails_is_not_the_codes_fault() -> None:
    async with opened() as (sandbox, interpreter):
        await interpreter.run("x = 1")
        await sandbox.close()
        with pytest.raises(SandboxError):
            await interpreter.run("x")


async def test_code_whose_caller_leaves_is_killed() -> None:
    async with opened() as (sandbox, interpreter):
        await interpreter.run("x = 1")
        running = asyncio.create_task(interpreter.run("open('begun', 'w').close()\nwhile True: pass"))
        await sandbox.exec("while ! [ -e begun ]; do :; done")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await interpreter.run("x")).raised


async def test_a_sandbox_without_python_is_wrong_usage() -> None:
    async with opened() as (sandbox, interpreter):
        started = sandbox.spawn

        async def spawn(command: Any, **more: Any) -> Any:
            return await started(["python4", *command[1:]], **more)

        sandbox.spawn = spawn  # type: ignore[method-assign]
        with pytest.raises(UsageError, match="no python3"):
            await interpreter.run("1")
