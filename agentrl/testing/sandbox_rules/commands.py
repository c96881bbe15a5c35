"""How commands run and end."""

from __future__ import annotations

import asyncio

from agentrl.sandbox import Limits
from agentrl.testing.env_subject import Finding
from agentrl.testing.sandbox_subject import SandboxSubject, require, text, told


async def runs_commands(subject: SandboxSubject) -> Finding:
    """Commands get their words, input, folder and variables, and give back their output and exit code."""
    async with subject.open() as sandbox:
        shell = await sandbox.exec("echo out; echo err >&2; exit 7")
        require((shell.exit_code, shell.stdout, shell.stderr) == (7, b"out\n", b"err\n"), told(shell))
        words = await sandbox.exec(["printf", "%s|", "a b", "$HOME", "", "é"])
        require(words.stdout == "a b|$HOME||é|".encode(), f"words arrive as {words.stdout!r}")
        data = bytes(range(256)) * 2000
        counted = await sandbox.exec("wc -c", stdin=data)
        require(text(counted) == str(len(data)), f"{len(data)} bytes of input arrive as {text(counted)}")
        echoed = await sandbox.exec("cat", stdin=data[:5000])
        require(echoed.stdout == data[:5000], "bytes do not come back as they were")
        placed = await sandbox.exec("pwd; echo $GREETING", cwd="/tmp", env={"GREETING": "hello there"})
        require(text(placed) == "/tmp\nhello there", f"folder and variable are {text(placed)!r}")
        home = await sandbox.exec("pwd")
        require(text(home) == sandbox.folder, f"commands start in {text(home)}, not in {sandbox.folder}")
    return Finding(detail="words, input, folder, variables, output, exit codes")


async def tells_how_commands_end(subject: SandboxSubject) -> Finding:
    """Exit codes are those of a shell, and a command that cannot run is no failure of the sandbox."""
    async with subject.open() as sandbox:
        for command, expected in (
            (["no-such-program"], 127),
            (["/tmp"], 126),
            ("kill -9 $$", 137),
            ("kill -15 $$", 143),
        ):
            result = await sandbox.exec(command)
            require(result.exit_code == expected, f"{command!r} ends with {told(result)}, expected {expected}")
        lost = await sandbox.exec("true", cwd="/no/such/folder")
        require(lost.exit_code != 0, "a command runs in a folder that is not there")
    return Finding(detail="127, 126, 128 + signal")


async def runs_commands_at_the_same_time(subject: SandboxSubject) -> Finding:
    """Several commands of one sandbox run beside each other, each with its own output."""
    async with subject.open() as sandbox:
        results = await asyncio.gather(*(sandbox.exec(f"sleep 0.2; echo {number}") for number in range(8)))
        require([text(result) for result in results] == [str(n) for n in range(8)], "outputs are mixed up")
    return Finding(detail="8 at once")


async def keeps_programs_running(subject: SandboxSubject) -> Finding:
    """A spawned program is spoken to line by line, can be interrupted, and ends with its exit code."""
    async with subject.open() as sandbox:
        program = await sandbox.spawn("while read line; do echo got $line; done; echo bye >&2; exit 3")
        for number in range(20):
            await program.write(f"{number}\n".encode())
            line = await program.read_line()
            require(line == f"got {number}\n".encode(), f"an answer is {line!r}")
        other = await sandbox.exec("echo beside")
        require(text(other) == "beside", "a command beside a program fails")
        waiting = asyncio.create_task(program.read_line())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await program.write(b"kept\n")
        line = await program.read_line()
        require(line == b"got kept\n", f"after a cancelled read comes {line!r}")
        await program.kill()
        require((await program.wait()).exit_code == 137, "a killed program does not say so")
        sleeper = await sandbox.spawn("trap 'echo ouch; exit 5' INT; echo ready; while :; do sleep 0.05; done")
        require(await sleeper.read_line() == b"ready\n", "a program does not get ready")
        await sleeper.interrupt()
        require(await sleeper.read_line() == b"ouch\n", "an interrupted program does not notice")
        require((await sleeper.wait()).exit_code == 5, "an interrupted program's exit code is lost")
        require(await sleeper.read() == b"", "an ended program's output does not end")
    return Finding(detail="21 round trips, interrupt, kill")


async def keeps_output_within_limits(subject: SandboxSubject) -> Finding:
    """Output beyond the limit is dropped and marked, whoever writes it, and nothing else changes."""
    limits = Limits(output_bytes=1000)
    async with subject.attacked() as sandbox:
        result = await sandbox.exec("head -c 5000 /dev/zero; echo err >&2; exit 4", limits=limits)
        require(len(result.stdout) == 1000 and result.truncated, f"{len(result.stdout)} bytes are kept")
        require((result.exit_code, result.stderr) == (4, b"err\n"), told(result))
        flood = await sandbox.exec("yes & yes >&2", limits=Limits(seconds=1.0))
        require(flood.timed_out and flood.truncated, f"a flood ends as {told(flood)}")
        require(
            max(len(flood.stdout), len(flood.stderr)) <= (sandbox.spec.limits.output_bytes or 0), "too much is kept"
        )
    return Finding(detail=f"a flood of output is cut to {len(flood.stdout)} bytes")
