"""Attacks on memory, processes and disk."""

from __future__ import annotations

import gzip

from agentrl.sandbox import Limits
from agentrl.testing.env_subject import Broken, Finding, Suspect
from agentrl.testing.sandbox_subject import MIB, TIGHT, SandboxSubject, require, run_python, text, told

_FORK_BOMB = """
    import os
    while True:
        try: os.fork()
        except OSError: pass
"""
_PROCESS_COUNT = """
    import os, time
    made = 0
    for _ in range(500):
        try: pid = os.fork()
        except OSError: break
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
    print(made)
"""
_MEMORY_BOMB = """
    kept = []
    while True: kept.append(b"x" * 2**20)
"""
_MANY_HANDS = """
    import os, time
    for _ in range(10):
        if os.fork() == 0:
            held = b"x" * (40 * 2**20)
            open(f"held{os.getpid()}", "w").close()
            time.sleep(2)
            os._exit(0)
    time.sleep(1.5)
    alive = [name for name in os.listdir(".") if name.startswith("held") and os.path.exists("/proc/" + name[4:])]
    states = [open("/proc/" + name[4:] + "/stat").read().rpartition(")")[2].split()[0] for name in alive]
    print(40 * sum(state != "Z" for state in states))
"""
_FILL = """
    import os, sys
    total = 0
    places = [".", "/", "/dev", "/dev/shm", "/tmp", "/var/tmp", "/run", "/etc", "/usr", "/proc", "/sys", "/mnt"]
    places += [os.path.join(place, name) for place in ("/", "/var", "/dev") for name in os.listdir(place)]
    for place in places:
        number = 0
        while total < 2**30:
            try:
                with open(f"{place}/fill{number}", "xb", buffering=0) as file:
                    number += 1
                    for _ in range(4): total += file.write(bytes(2**20))
            except OSError: break
    print(total)
"""
_ONE_FILE = """
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    total = 0
    try:
        with open("large", "wb", buffering=0) as file:
            while total < 2**28: total += file.write(bytes(2**20))
    except OSError: pass
    print(total)
"""
_MANY_FILES = """
    import os
    number = 0
    while True:
        try:
            os.mkdir(f"d{number}")
            number += 1
        except OSError: os._exit(3)
"""
_OUTSIDE_PROCESSES = """
    import mmap, os, time
    kept = []
    for number in range(64):
        try: fd = os.memfd_create(str(number))
        except (OSError, AttributeError): break
        kept.append(fd)
        try:
            for _ in range(8): os.write(fd, bytes(2**20))
        except OSError: break
    print(8 * len(kept))
"""
_SYSTEM_V = """
    import ctypes
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    number = libc.shmget(0, 64 * 2**20, 0o1600)
    if number >= 0:
        place = libc.shmat(number, None, 0)
        ctypes.memset(place, 1, 64 * 2**20)
    print(number, libc.msgget(0, 0o1600))
"""


async def stops_a_fork_bomb(subject: SandboxSubject) -> Finding:
    """Processes are limited, and a fork bomb is dead after its deadline."""
    async with subject.attacked() as sandbox:
        counted = await run_python(sandbox, _PROCESS_COUNT)
        require(text(counted).isdigit(), told(counted))
        require(int(text(counted)) <= (TIGHT.processes or 0), f"{text(counted)} processes can be made")
        for bomb in (["python3", "-c", "import os\nwhile True: os.fork()"], "bomb() { bomb | bomb & }; bomb; sleep 9"):
            await sandbox.exec(bomb, limits=Limits(seconds=1.0))
        result = await run_python(sandbox, _FORK_BOMB, limits=Limits(seconds=1.0))
        require(result.timed_out, f"a fork bomb ends as {told(result)}")
        left = await sandbox.exec("ls -d /proc/[0-9]* | wc -l")
        require(int(text(left)) < 10, f"{text(left)} processes are there after a fork bomb")
    return Finding(detail=f"{text(counted)} processes at most")


async def stops_a_memory_bomb(subject: SandboxSubject) -> Finding:
    """A process that takes all memory is ended."""
    async with subject.attacked() as sandbox:
        result = await run_python(sandbox, _MEMORY_BOMB, limits=Limits(seconds=4.0))
        require(not result.succeeded and not result.timed_out, f"a memory bomb ends as {told(result)}")
        own = await run_python(sandbox, "held = b'x' * 100 * 2**20", limits=Limits(memory_bytes=64 * MIB))
        require(not own.succeeded, "a command's own memory limit does not count")
    return Finding(detail="out of memory" if result.out_of_memory else "memory was refused")


async def counts_memory_of_all_processes(subject: SandboxSubject) -> Finding:
    """Memory is limited for the whole sandbox, and not for each process alone."""
    async with subject.attacked() as sandbox:
        most = (TIGHT.memory_bytes or 0) // MIB
        files = await run_python(sandbox, _OUTSIDE_PROCESSES)
        made = int(text(files) or 0)
        require(made <= most, f"{made} MiB fit into files in memory where {most} MiB are allowed")
        result = await run_python(sandbox, _MANY_HANDS)
        held = int(text(result) or 0)
        if held > most:
            raise Suspect(f"10 processes hold {held} MiB where {most} MiB are allowed: there are no control groups")
    return Finding(detail=f"10 processes of 40 MiB hold {held} MiB")


async def keeps_no_memory_after_a_command(subject: SandboxSubject) -> Finding:
    """What a command took is free when it ends, System V memory and message queues too."""
    async with subject.attacked() as sandbox:
        taken = await run_python(sandbox, _SYSTEM_V)
        require(len(text(taken).split()) == 2, told(taken))
        left = await sandbox.exec("tail -q -n +2 /proc/sysvipc/shm /proc/sysvipc/msg")
        require(text(left) == "", f"after a command there are {text(left)}")
    return Finding(detail="refused" if text(taken) == "-1 -1" else "freed")


async def stops_a_disk_fill(subject: SandboxSubject) -> Finding:
    """Everything that can be written is limited in size, and gone with the sandbox."""
    async with subject.attacked() as sandbox:
        result = await run_python(sandbox, _FILL, limits=Limits(memory_bytes=MIB * 120))
        filled = await sandbox.exec("du -sk /work /tmp /dev/shm 2>/dev/null | awk '{n += $1} END {print n}'")
        total = max(int(text(result) or 0), int(text(filled) or 0) * 1024) // MIB
        most = 4 * (TIGHT.disk_bytes or 0) // MIB
        require(total <= most, f"{total} MiB can be written where 16 MiB fit into a folder")
        await sandbox.exec("rm -rf /work/* /tmp/* /dev/shm/*")
        single = await run_python(sandbox, _ONE_FILE)
        require(int(text(single) or 0) <= (TIGHT.file_bytes or 0), f"a file of {text(single)} bytes can be written")
        many = await run_python(sandbox, _MANY_FILES, limits=Limits(seconds=1.0))
        require(not many.succeeded, told(many))
    return Finding(detail=f"{total} MiB in all folders together, {int(text(single)) // MIB} MiB in a file")


async def stops_a_zip_bomb(subject: SandboxSubject) -> Finding:
    """Small files that unpack to large ones fill neither disk nor memory."""
    bomb = gzip.compress(bytes(300 * MIB), compresslevel=9)
    async with subject.attacked() as sandbox:
        await sandbox.write("bomb.gz", bomb)
        unpacked = await sandbox.exec("gzip -dc bomb.gz > bomb")
        require(not unpacked.succeeded, "a zip bomb was unpacked to the disk")
        size = int(text(await sandbox.exec("wc -c < bomb")))
        require(size <= (TIGHT.file_bytes or 0), f"a zip bomb fills {size} bytes")
        loaded = await run_python(sandbox, "import gzip; print(len(gzip.open('bomb.gz').read()))")
        if loaded.succeeded:
            raise Broken("a zip bomb was unpacked into memory")
    return Finding(detail=f"{len(bomb):,} bytes that unpack to {300 * MIB:,}")
