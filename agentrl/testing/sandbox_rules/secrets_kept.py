"""What code in a sandbox must not see."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.sandbox.bubblewrap import own_folders
from agentrl.testing.env_subject import Finding
from agentrl.testing.sandbox_subject import SandboxSubject, bystander, host_file, require, run_python, text, told

_SEARCH = """
    import os, sys
    mark, places = sys.argv[1].encode(), sys.argv[2:]
    looked = 0
    def look(path):
        global looked
        looked += 1
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try: return mark in os.read(fd, 2**20)
            finally: os.close(fd)
        except OSError: return False
    def search(place):
        if look(place): print("found in", place)
        for folder, folders, files in os.walk(place):
            if folder.count("/") > place.count("/") + 3: folders.clear()
            for name in files[:100]:
                if look(f"{folder}/{name}"): print("found in", folder, name)
    for process in filter(str.isdigit, os.listdir("/proc")):
        if process == str(os.getpid()): continue
        for name in ("environ", "cmdline", "comm", "maps", "mountinfo", "stack"):
            if look(f"/proc/{process}/{name}"): print("found in", process, name)
        for name in ("cwd", "fd", *("root" + place for place in places)): search(f"/proc/{process}/{name}")
    for place in places: search(place)
    print("looked", looked)
"""
_HANDLES = """
    import os
    for name in os.listdir("/proc/self/fd"):
        try: target = os.readlink(f"/proc/self/fd/{name}")
        except OSError: continue
        if not target.startswith(("pipe:", "/dev/null", "/proc/")): print(name, target)
    for name in os.listdir("/proc/1/fd") if os.access("/proc/1/fd", os.R_OK) else (): print("process 1 has", name)
"""
_OWN_CODE = """
    import glob, os, sys
    places = [*sys.argv[1:], *(os.path.join(place, "agentrl") for place in sys.path)]
    for prefix in ("/usr", "/usr/local", sys.prefix): places += glob.glob(prefix + "/lib/python3*/*-packages/agentrl")
    for place in places:
        for folder, _, files in os.walk(place):
            if any(name.endswith((".py", ".pyc")) for name in files): print("found", folder)
    print("looked", len(places))
"""


async def hides_the_environment(subject: SandboxSubject) -> Finding:
    """Environment variables and command lines of the host are not to be seen, not even through ``/proc``."""
    mark = secrets.token_hex(16)
    with bystander(AGENTRL_CHECK_SECRET=mark), _variable("AGENTRL_CHECK_SECRET", mark):
        async with subject.attacked() as sandbox:
            result = await sandbox.exec("env; cat /proc/*/environ 2>/dev/null")
            require(mark.encode() not in result.stdout, "a variable of the host is shown")
            seen = await run_python(sandbox, _SEARCH, mark)
            require("found" not in text(seen) and "looked" in text(seen), told(seen))
            host = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
            require(b"sleep 543" not in host.stdout, "processes of the host are to be seen")
    return Finding(detail=text(seen).splitlines()[-1].replace("looked", "looked in") + " places")


async def hides_files_of_the_host(subject: SandboxSubject) -> Finding:
    """Home folders, temporary files and passwords of the host are not there."""
    mark = secrets.token_hex(16)
    with host_file(mark) as file, _inheritable(file):
        async with subject.attacked() as sandbox:
            places = (str(file), "/tmp", "/home", "/var", "/run", "/mnt", "/root", "/opt", "/srv")
            seen = await run_python(sandbox, _SEARCH, mark, *places)
            require("found" not in text(seen) and "looked" in text(seen), told(seen))
            handles = await run_python(sandbox, _HANDLES)
            require(text(handles) == "" and handles.exit_code == 0, f"open files leak in: {text(handles)}")
            private = await sandbox.exec("cat /etc/shadow /etc/ssh/*key /root/.ssh/* /root/.bashrc")
            require(private.stdout == b"", "private files of the host are shown")
    return Finding(detail="home, temporary files, passwords, open files")


async def hides_the_code_of_agentrl(subject: SandboxSubject) -> Finding:
    """Commands cannot import or read agentrl, whose generators know the answers that environments hide."""
    own = [str(folder) for folder in own_folders()]
    async with subject.attacked() as sandbox:
        seen = await run_python(sandbox, _OWN_CODE, *own)
        require("found" not in text(seen) and "looked" in text(seen), told(seen))
    return Finding(detail=text(seen).splitlines()[-1].replace("looked", "looked in") + " places")


async def hides_other_sandboxes(subject: SandboxSubject) -> Finding:
    """What is in one sandbox, like a grader's answers, is in no other, whether older or newer."""
    mark = secrets.token_hex(16)
    async with subject.open() as grader:
        for path in ("answer.txt", "/tmp/answer.txt"):
            await grader.write(path, mark.encode())
        holder = await grader.spawn(["sh", "-c", "echo ready; exec sleep 60", mark], env={"ANSWER": mark})
        await holder.read_line()
        async with subject.attacked() as sandbox:
            seen = await run_python(sandbox, _SEARCH, mark, "/tmp", "/dev/shm", "/var", "/run", sandbox.folder)
            require("found" not in text(seen) and "looked" in text(seen), told(seen))
            shared = await run_python(sandbox, "import os; print(os.listdir('/dev/shm'), os.listdir('/tmp'))")
            require(text(shared) == "[] []", f"a new sandbox holds {text(shared)}")
    return Finding(detail="files, processes, variables")


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def _inheritable(file: Path) -> Iterator[None]:
    """The file is open, and programs that are started carelessly inherit that."""
    handle = os.open(file, os.O_RDONLY)
    os.set_inheritable(handle, True)
    try:
        yield
    finally:
        os.close(handle)
