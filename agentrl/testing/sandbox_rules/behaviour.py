"""Rules about behaviour: commands and their ends, files, concurrent sandboxes, and clean-up."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

from agentrl.errors import ToolError
from agentrl.sandbox import Command, Entry, Limits, Sandbox
from agentrl.testing.report import RuleFailed, require
from agentrl.testing.sandbox_subject import (
    MachineState,
    SandboxSubject,
    describe_end,
    host_file,
    in_sandbox,
    require_nothing_left,
    text,
)


@in_sandbox
async def runs_commands(sandbox: Sandbox) -> str:
    """Commands get their arguments, input, folder and variables, and return their output and exit code."""
    shell = await sandbox.exec("echo out; echo err >&2; exit 7")
    require((shell.exit_code, shell.stdout, shell.stderr) == (7, b"out\n", b"err\n"), describe_end(shell))
    words = await sandbox.exec(["printf", "%s|", "a b", "$HOME", "", "é"])
    require(words.stdout == "a b|$HOME||é|".encode(), f"words arrive as {words.stdout!r}")
    data = bytes(range(256)) * 2000
    counted = await sandbox.exec("wc -c", stdin=data)
    require(text(counted) == str(len(data)), f"{len(data)} bytes of input arrive as {text(counted)}")
    echoed = await sandbox.exec("cat", stdin=data[:5000])
    require(echoed.stdout == data[:5000], "bytes are returned changed")
    placed = await sandbox.exec("pwd; echo $GREETING", cwd="/tmp", env={"GREETING": "hello there"})
    require(text(placed) == "/tmp\nhello there", f"folder and variable are {text(placed)!r}")
    home = await sandbox.exec("pwd")
    require(text(home) == sandbox.folder, f"commands start in {text(home)}, not in {sandbox.folder}")
    return "words, input, folder, variables, output, exit codes"


@in_sandbox
async def tells_how_commands_end(sandbox: Sandbox) -> str:
    """Exit codes are those of a shell, and a command that cannot run is not a failure of the sandbox."""
    cannot_run: tuple[tuple[Command, int], ...] = ((["no-such-program"], 127), (["/tmp"], 126), ("echo a\0b", 126))
    for command, expected in (*cannot_run, ("kill -9 $$", 137), ("kill -15 $$", 143)):
        result = await sandbox.exec(command)
        require(result.exit_code == expected, f"{command!r} ends with {describe_end(result)}, expected {expected}")
    lost = await sandbox.exec("true", cwd="/no/such/folder")
    require(lost.exit_code != 0, "a command runs in a folder that does not exist")
    return "127, 126, 128 + signal"


@in_sandbox
async def runs_commands_at_the_same_time(sandbox: Sandbox) -> str:
    """Several commands of one sandbox run concurrently, each with its own output."""
    results = await asyncio.gather(*(sandbox.exec(f"sleep 0.2; echo {number}") for number in range(8)))
    require([text(result) for result in results] == [str(n) for n in range(8)], "outputs are mixed up")
    return "8 concurrent commands"


@in_sandbox
async def keeps_programs_running(sandbox: Sandbox) -> str:
    """A spawned program reads and writes line by line, can be interrupted, and ends with its exit code."""
    program = await sandbox.spawn("while read line; do echo got $line; done; echo bye >&2; exit 3")
    for number in range(20):
        await program.write(f"{number}\n".encode())
        line = await program.read_line()
        require(line == f"got {number}\n".encode(), f"an answer is {line!r}")
    other = await sandbox.exec("echo meanwhile")
    require(text(other) == "meanwhile", "a command fails while a program runs")
    waiting = asyncio.create_task(program.read_line())
    await asyncio.sleep(0.01)
    waiting.cancel()
    await program.write(b"kept\n")
    line = await program.read_line()
    require(line == b"got kept\n", f"after a cancelled read the next line is {line!r}")
    await program.kill()
    require((await program.wait()).exit_code == 137, "a killed program has another exit code than 137")
    sleeper = await sandbox.spawn("trap 'echo ouch; exit 5' INT; echo ready; while :; do sleep 0.05; done")
    require(await sleeper.read_line() == b"ready\n", "a program does not start")
    await sleeper.interrupt()
    require(await sleeper.read_line() == b"ouch\n", "an interrupted program does not notice")
    require((await sleeper.wait()).exit_code == 5, "an interrupted program's exit code is lost")
    require(await sleeper.read() == b"", "an ended program's output does not end")
    return "21 round trips, interrupt, kill"


@in_sandbox
async def keeps_output_within_limits(sandbox: Sandbox) -> str:
    """The middle of output beyond the limit is dropped, the result is marked as truncated, and nothing else changes."""
    script = "echo begin; head -c 5000 /dev/zero; echo end; echo err >&2; exit 4"
    result = await sandbox.exec(script, limits=Limits(output_bytes=1000))
    require(len(result.stdout) == 1000 and result.truncated, f"{len(result.stdout)} bytes are kept")
    both = result.stdout.startswith(b"begin\n") and result.stdout.endswith(b"end\n")
    require(both, "the beginning or the end of truncated output is lost")
    require((result.exit_code, result.stderr) == (4, b"err\n"), describe_end(result))
    flood = await sandbox.exec("yes & yes >&2", limits=Limits(seconds=1.0))
    require(flood.timed_out and flood.truncated, f"a flood ends as {describe_end(flood)}")
    kept = max(len(flood.stdout), len(flood.stderr))
    require(kept <= (sandbox.spec.limits.output_bytes or 0), "too much is kept")
    return f"a flood of output is cut to {len(flood.stdout)} bytes"


@in_sandbox
async def reads_what_was_written(sandbox: Sandbox) -> str:
    """Files with any bytes and any name are read back unchanged; missing folders are made."""
    data = secrets.token_bytes(300_000)
    for path in ("plain.txt", "deep/er/file", f"{sandbox.folder}/absolute", "/tmp/elsewhere", "na me'\"é\n;$x"):
        await sandbox.write(path, data)
        require(await sandbox.read(path) == data, f"{path!r} is returned changed")
    await sandbox.write("plain.txt", b"")
    require(await sandbox.read("plain.txt") == b"", "a replaced file keeps its content")
    await sandbox.write("run.sh", b"#!/bin/sh\necho ran\n", executable=True)
    require(text(await sandbox.exec(["./run.sh"])) == "ran", "an executable file cannot be run")
    listed = await sandbox.list()
    require(Entry(name="deep", is_folder=True) in listed, f"a folder is listed as {listed}")
    require(Entry(name="run.sh", is_folder=False) in listed, f"a file is listed as {listed}")
    require([entry.name for entry in await sandbox.list("deep")] == ["er"], "a folder's content is not listed")
    return "5 names, 300,000 bytes each"


@in_sandbox
async def says_why_a_file_cannot_be_read(sandbox: Sandbox) -> str:
    """Paths that are not files, too large or inaccessible are refused with a message, in time."""
    await sandbox.exec("mkfifo pipe; mkdir folder; ln -s loop loop; head -c 100000 /dev/zero > large")
    refused = ("", "nothing", "pipe", "folder", "loop", "/dev/zero", "/proc/1/mem", "a\0b", "plain/../../../nothing")
    for path in refused:
        await _require_refused(sandbox.read(path), f"reading {path!r}")
    await _require_refused(sandbox.read("large", most=1000), "reading a file that is too large")
    for path in ("pipe", "folder", "/usr/new", "/etc/passwd", "/new", "large/below", "/dev/null", "/proc/sys/x"):
        await _require_refused(sandbox.write(path, b"data"), f"writing {path!r}")
    await _require_refused(sandbox.write("much", b"x" * 20 * 2**20), "writing more than fits")
    await _require_refused(sandbox.list("large"), "listing a file")
    return f"{len(refused) + 11} refusals"


async def lets_no_path_lead_out(subject: SandboxSubject) -> str:
    """Dots, links and mounts do not expose or change a file of the host, from outside or from inside."""
    mark = secrets.token_hex(16)
    with host_file(mark) as file:
        async with subject.open_for_attack() as sandbox:
            await sandbox.exec(["ln", "-s", str(file), "link"])
            await sandbox.exec(["ln", "-s", str(file.parent), "folder"])
            ways = [str(file), f"../../../../../../../..{file}", "link", "folder/secret.txt"]
            ways += [f"/proc/{pid}/{place}{file}" for pid in ("1", "self") for place in ("root", "cwd")]
            for path in ways:
                await _require_hidden(sandbox, path, mark)
                seen = await sandbox.exec(["cat", path])
                require(mark.encode() not in seen.stdout, f"cat {path} shows a file of the host")
                await sandbox.exec(["sh", "-c", 'echo changed > "$0"', path])
        require(file.read_text() == mark, "a file of the host was changed")
        require(os.listdir(file.parent) == [file.name], "a file of the host was made")
    return f"{len(ways)} ways tried"


async def keeps_snapshots(subject: SandboxSubject) -> str:
    """A snapshot restores the folder with links and modes, in the same sandbox and in another one."""
    async with subject.open() as sandbox, subject.open() as other:
        await sandbox.exec("find . -mindepth 1 -delete")  # content of the image
        await sandbox.exec("mkdir -p a/b; echo one > a/b/c; ln -s b a/link; chmod 755 a/b/c; echo .x > .hidden")
        snapshot = await sandbox.snapshot()
        await sandbox.exec("rm -rf a; echo later > later; mkdir .more")
        for place in (sandbox, other):
            await place.restore(snapshot)
            seen = await place.exec("cat a/link/c .hidden; test -x a/b/c; echo $?; ls -A")
            require(text(seen) == "one\n.x\n0\n.hidden\na", f"after a restore: {describe_end(seen)}")
    return f"{len(snapshot):,} bytes"


async def _require_hidden(sandbox: Sandbox, path: str, mark: str) -> None:
    """Check that the sandbox neither reads nor overwrites the host's file; it may create its own file at the path."""
    with suppress(ToolError):
        require(mark.encode() not in await sandbox.read(path), f"read({path!r}) shows a file of the host")
    with suppress(ToolError):
        await sandbox.write(path, b"changed")


async def _require_refused(attempt: Awaitable[Any], what: str) -> None:
    try:
        await attempt
    except ToolError as refusal:
        require(len(str(refusal)) < 500, f"{what} is refused with {len(str(refusal))} characters")
        return
    raise RuleFailed(f"{what} is not refused")


async def runs_many_at_once(subject: SandboxSubject) -> str:
    """Sandboxes start, work and close concurrently, each with its own files."""
    before = MachineState.now()
    start = time.perf_counter()

    async def one(number: int) -> str:
        async with subject.open() as sandbox:
            await sandbox.write("number", str(number).encode())
            return text(await sandbox.exec("cat number"))

    seen = await asyncio.gather(*(one(number) for number in range(16)))
    require(seen == [str(number) for number in range(16)], "files of sandboxes are mixed up")
    await require_nothing_left(before)
    return f"16 concurrent sandboxes in {time.perf_counter() - start:.1f} s"


async def leaves_nothing_behind(subject: SandboxSubject) -> str:
    """No processes, files or folders remain, even if a sandbox is closed while it works."""
    async with subject.open() as warm:
        await warm.exec("true")
    before = MachineState.now()
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
    return "3 closed while working, 3 cancelled while starting"
