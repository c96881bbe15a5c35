"""Commands that do not want to end."""

from __future__ import annotations

import asyncio
import time

from agentrl.errors import SandboxError
from agentrl.sandbox import Limits, Sandbox
from agentrl.testing.env_subject import Broken, Finding
from agentrl.testing.sandbox_subject import (
    GRACE_S,
    Host,
    SandboxSubject,
    require,
    require_nothing_left,
    run_python,
    text,
    told,
)

_BEATS = """
    import os, signal, sys, time
    for number in range(1, 65):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
    def beat():
        while True:
            with open("beats", "ab") as file: file.write(b".")
            time.sleep(0.01)
"""
"""Ignores every signal that can be ignored; `beat` shows that it lives."""
_DAEMON = """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 100)
            beat()
        os._exit(0)
    while not os.path.exists("beats"): time.sleep(0.01)
"""
_CONTINUERS = """
    for _ in range(6):
        if os.fork() == 0:
            os.setsid()
            while True:
                for pid in range(2, 200):
                    try: os.kill(pid, signal.SIGCONT)
                    except OSError: pass
                with open("beats", "ab") as file: file.write(b".")
"""
_HEADLESS = """
    import ctypes, threading
    threading.Thread(target=beat).start()
    while not os.path.exists("beats"): time.sleep(0.01)
    ctypes.CDLL(None).pthread_exit(None)
"""


_LOWER_LIMITS = """
    import os, resource
    for pid in (1, os.getppid()):
        for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC):
            try: resource.prlimit(pid, kind, (0, 0))
            except OSError: pass
"""


async def kills_at_the_deadline(subject: SandboxSubject) -> Finding:
    """A command that ignores every signal is killed when its time is over; what it wrote is kept."""
    async with subject.attacked() as sandbox:
        start = time.perf_counter()
        result = await run_python(sandbox, f"{_BEATS}    print('on', flush=True); beat()", limits=Limits(seconds=1.0))
        took = time.perf_counter() - start
        require(result.timed_out and not result.succeeded, f"an endless command ends as {told(result)}")
        require(took < 1.0 + GRACE_S, f"1 s became {took:.1f} s")
        require(text(result) == "on", "output until the deadline is lost")
        await _require_silence(sandbox)
    return Finding(detail=f"after {result.seconds:.2f} s", figures={"over_s": round(result.seconds - 1.0, 3)})


async def counts_processor_time(subject: SandboxSubject) -> Finding:
    """A busy loop is killed when its processor time is used up, before its deadline."""
    async with subject.attacked() as sandbox:
        result = await run_python(sandbox, "while True: pass", limits=Limits(cpu_seconds=1.0, seconds=60.0))
        require(not result.succeeded, f"a busy loop ends as {told(result)}")
        if result.timed_out:
            raise Broken("processor time is not limited; only the deadline ended a busy loop")
    return Finding(detail=f"after {result.seconds:.2f} s")


async def kills_what_commands_leave(subject: SandboxSubject) -> Finding:
    """A daemon, a child in the background and a process without a main thread die with the command that made them."""
    async with subject.attacked() as sandbox:
        program = await sandbox.spawn("echo ready; cat")
        await program.read_line()
        for attack in (_DAEMON, _HEADLESS, _CONTINUERS):
            result = await run_python(sandbox, f"{_BEATS}{attack}", limits=Limits(seconds=1.5))
            require(b"Traceback" not in result.stderr, told(result))
            await _require_silence(sandbox)
        start = time.perf_counter()
        result = await sandbox.exec("sleep 60 & echo done")
        require(text(result) == "done", told(result))
        require(time.perf_counter() - start < GRACE_S, "a child in the background holds its command up")
        await program.write(b"still\n")
        require(await program.read_line() == b"still\n", "a program that was running died, too")
    return Finding(detail="daemon, headless process, processes that wake each other, child with the output")


async def survives_signals_from_inside(subject: SandboxSubject) -> Finding:
    """Commands that signal everything they see, or lower its limits, harm only themselves."""
    async with subject.attacked() as sandbox:
        lowered = await run_python(sandbox, _LOWER_LIMITS)
        require(b"Traceback" not in lowered.stderr, told(lowered))
        result = await sandbox.exec("echo here")
        require(text(result) == "here", f"after limits were lowered the sandbox says {told(result)}")
        for number in ("STOP", "TERM", "INT", "HUP", "CHLD", "SEGV", "KILL"):
            await sandbox.exec(f"kill -{number} $PPID; kill -{number} 1; kill -{number} -1", limits=Limits(seconds=1.0))
            result = await sandbox.exec("echo here")
            require(text(result) == "here", f"after kill -{number} -1 the sandbox says {told(result)}")
    return Finding(detail="7 signals, 4 limits")


async def stops_with_its_caller(subject: SandboxSubject) -> Finding:
    """A command whose caller is cancelled is killed; a call during `close` ends with `SandboxError`."""
    before = Host.now()
    async with subject.open() as sandbox:
        call = asyncio.create_task(run_python(sandbox, f"{_BEATS}    beat()"))
        await _wait_for_beats(sandbox)
        call.cancel()
        await asyncio.wait([call])
        await _require_silence(sandbox)
        waiting = asyncio.create_task(sandbox.exec("sleep 3"))
        program = await sandbox.spawn("sleep 100")
        reading = asyncio.create_task(program.read())
        await asyncio.sleep(0.05)
    for task in (waiting, reading):
        try:
            await asyncio.wait_for(task, GRACE_S)
        except SandboxError:
            continue
        raise Broken("a call that close interrupts does not raise SandboxError")
    await sandbox.close()
    await require_nothing_left(before)
    return Finding(detail="cancelled call, calls during close, closing twice")


async def _wait_for_beats(sandbox: Sandbox) -> None:
    result = await sandbox.exec("while ! test -s beats; do sleep 0.01; done")
    require(result.exit_code == 0, f"a program does not start: {told(result)}")


async def _require_silence(sandbox: Sandbox) -> None:
    """The heartbeat stops; it is given a moment, because a call may return before what it cancelled has ended."""
    for _ in range(10):
        seen = await sandbox.exec("wc -c < beats; sleep 0.2; wc -c < beats")
        first, second = text(seen).split()
        if first == second:
            await sandbox.exec("rm -f beats")
            return
    raise Broken("a process goes on after its command has ended")
