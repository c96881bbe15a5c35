"""Files: what is written is read, and no path leads out."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable
from typing import Any

from agentrl.errors import ToolError
from agentrl.sandbox import Entry, Sandbox
from agentrl.testing.env_subject import Broken, Finding
from agentrl.testing.sandbox_subject import SandboxSubject, host_file, require, text, told


async def reads_what_was_written(subject: SandboxSubject) -> Finding:
    """Any bytes under any name come back, in folders that are made on the way."""
    async with subject.open() as sandbox:
        data = secrets.token_bytes(300_000)
        for path in ("plain.txt", "deep/er/file", f"{sandbox.folder}/absolute", "/tmp/elsewhere", "na me'\"é\n;$x"):
            await sandbox.write(path, data)
            require(await sandbox.read(path) == data, f"{path!r} comes back changed")
        await sandbox.write("plain.txt", b"")
        require(await sandbox.read("plain.txt") == b"", "a replaced file keeps its content")
        await sandbox.write("run.sh", b"#!/bin/sh\necho ran\n", executable=True)
        require(text(await sandbox.exec(["./run.sh"])) == "ran", "an executable file cannot be run")
        listed = await sandbox.list()
        require(Entry(name="deep", is_folder=True) in listed, f"a folder is listed as {listed}")
        require(Entry(name="run.sh", is_folder=False) in listed, f"a file is listed as {listed}")
        require([entry.name for entry in await sandbox.list("deep")] == ["er"], "a folder's content is not listed")
    return Finding(detail="5 names, 300,000 bytes each")


async def says_why_a_file_cannot_be_read(subject: SandboxSubject) -> Finding:
    """What is no file, or too large, or out of reach is told to the model, in time."""
    async with subject.attacked() as sandbox:
        await sandbox.exec("mkfifo pipe; mkdir folder; ln -s loop loop; head -c 100000 /dev/zero > large")
        refused = (
            "nothing",
            "pipe",
            "folder",
            "loop",
            "/dev/zero",
            "/proc/1/mem",
            "",
            "a\0b",
            "plain/../../../nothing",
        )
        for path in refused:
            await _require_refused(sandbox.read(path), f"reading {path!r}")
        await _require_refused(sandbox.read("large", most=1000), "reading a file that is too large")
        for path in ("pipe", "folder", "/usr/new", "/etc/passwd", "/new", "large/below", "/dev/null", "/proc/sys/x"):
            await _require_refused(sandbox.write(path, b"data"), f"writing {path!r}")
        await _require_refused(sandbox.write("much", b"x" * 20 * 2**20), "writing more than fits")
        await _require_refused(sandbox.list("large"), "listing a file")
    return Finding(detail=f"{len(refused) + 11} refusals")


async def lets_no_path_lead_out(subject: SandboxSubject) -> Finding:
    """Neither dots nor links nor mounts show or change a file of the host, from outside or from inside."""
    mark = secrets.token_hex(16)
    with host_file(mark) as file:
        async with subject.attacked() as sandbox:
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
    return Finding(detail=f"{len(ways)} ways tried")


async def keeps_snapshots(subject: SandboxSubject) -> Finding:
    """A snapshot restores the folder, links and modes included, here and in another sandbox."""
    async with subject.open() as sandbox, subject.open() as other:
        await sandbox.exec("find . -mindepth 1 -delete")  # what an image may bring along
        await sandbox.exec("mkdir -p a/b; echo one > a/b/c; ln -s b a/link; chmod 755 a/b/c; echo .x > .hidden")
        snapshot = await sandbox.snapshot()
        await sandbox.exec("rm -rf a; echo later > later; mkdir .more")
        for place in (sandbox, other):
            await place.restore(snapshot)
            seen = await place.exec("cat a/link/c .hidden; test -x a/b/c; echo $?; ls -A")
            require(text(seen) == "one\n.x\n0\n.hidden\na", f"after a restore there is {told(seen)}")
    return Finding(detail=f"{len(snapshot):,} bytes")


async def _require_hidden(sandbox: Sandbox, path: str, mark: str) -> None:
    """Neither read nor overwritten by the methods of the sandbox; it may be made anew inside."""
    try:
        shown = await sandbox.read(path)
    except ToolError:
        shown = b""
    require(mark.encode() not in shown, f"read({path!r}) shows a file of the host")
    try:
        await sandbox.write(path, b"changed")
    except ToolError:
        return


async def _require_refused(attempt: Awaitable[Any], what: str) -> None:
    try:
        await attempt
    except ToolError as refusal:
        require(len(str(refusal)) < 500, f"{what} is refused with {len(str(refusal))} characters")
        return
    raise Broken(f"{what} is not refused")
