"""Many sandboxes, and what they leave behind."""

from __future__ import annotations

import asyncio
import time

from agentrl.testing.env_subject import Finding
from agentrl.testing.sandbox_subject import Host, SandboxSubject, require, require_nothing_left, text

MANY = 16


async def runs_many_at_once(subject: SandboxSubject) -> Finding:
    """Sandboxes start, work and close beside each other, each with files of its own."""
    before = Host.now()
    start = time.perf_counter()

    async def one(number: int) -> str:
        async with subject.open() as sandbox:
            await sandbox.write("number", str(number).encode())
            return text(await sandbox.exec("cat number"))

    seen = await asyncio.gather(*(one(number) for number in range(MANY)))
    require(seen == [str(number) for number in range(MANY)], "files of sandboxes are mixed up")
    await require_nothing_left(before)
    return Finding(detail=f"{MANY} at once in {time.perf_counter() - start:.1f} s")


async def leaves_nothing_behind(subject: SandboxSubject) -> Finding:
    """Neither processes nor files nor folders stay, even when a sandbox is closed while it works."""
    async with subject.open() as warm:
        await warm.exec("true")
    before = Host.now()
    for _ in range(3):
        sandbox = subject.open()
        await sandbox.start()
        calls = [asyncio.create_task(sandbox.exec("sleep 60 & sleep 60")) for _ in range(3)]
        program = await sandbox.spawn("yes")
        await program.read()
        await sandbox.write("left", b"x" * 1_000_000)
        await sandbox.close()
        await asyncio.wait(calls)
        for call in calls:
            call.exception()
    abandoned = [asyncio.create_task(subject.open().start()) for _ in range(3)]
    await asyncio.sleep(0.005)
    for starting in abandoned:
        starting.cancel()
    await asyncio.wait(abandoned)
    await require_nothing_left(before)
    return Finding(detail="3 closed while working, 3 cancelled while starting")
