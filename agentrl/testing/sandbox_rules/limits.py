"""Rules about limits: attacks on memory, processes and disk, and commands that resist being killed."""

from __future__ import annotations

import asyncio
import gzip
import time

from agentrl.errors import SandboxError
from agentrl.sandbox import Limits, Sandbox
from agentrl.testing.report import CheckFinding, RuleFailed, RuleWarned, require
from agentrl.testing.sandbox_subject import (
    MIB,
    RULE_GRACE_S,
    TIGHT,
    MachineState,
    SandboxSubject,
    describe_end,
    in_sandbox,
    require_alive,
    require_nothing_left,
    run_python,
    text,
)

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
"""Program that ignores all signals that can be ignored; `beat` shows that it is alive."""
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


@in_sandbox
async def stops_a_fork_bomb(sandbox: Sandbox) -> str:
    """The number of processes is limited, and a fork bomb is killed at its deadline."""
    counted = await run_python(sandbox, _PROCESS_COUNT)
    require(text(counted).isdigit(), describe_end(counted))
    require(int(text(counted)) <= (TIGHT.processes or 0), f"{text(counted)} processes can be made")
    for bomb in (["python3", "-c", "import os\nwhile True: os.fork()"], "bomb() { bomb | bomb & }; bomb; sleep 9"):
        await sandbox.exec(bomb, limits=Limits(seconds=1.0))
    result = await run_python(sandbox, _FORK_BOMB, limits=Limits(seconds=1.0))
    require(result.timed_out, f"a fork bomb ends as {describe_end(result)}")
    left = await sandbox.exec("ls -d /proc/[0-9]* | wc -l")
    require(int(text(left)) < 10, f"{text(left)} processes are left after a fork bomb")
    return f"{text(counted)} processes at most"


@in_sandbox
async def stops_a_memory_bomb(sandbox: Sandbox) -> str:
    """A process that uses all memory is killed."""
    result = await run_python(sandbox, _MEMORY_BOMB, limits=Limits(seconds=4.0))
    require(not result.is_success and not result.timed_out, f"a memory bomb ends as {describe_end(result)}")
    own = await run_python(sandbox, "held = b'x' * 100 * 2**20", limits=Limits(memory_bytes=64 * MIB))
    require(not own.is_success, "a command's own memory limit has no effect")
    return "out of memory" if result.out_of_memory else "memory was refused"


@in_sandbox
async def counts_memory_of_all_processes(sandbox: Sandbox) -> str:
    """Memory is limited for the whole sandbox, not only for each process."""
    most = (TIGHT.memory_bytes or 0) // MIB
    files = await run_python(sandbox, _OUTSIDE_PROCESSES)
    made = int(text(files) or 0)
    require(made <= most, f"{made} MiB fit into files in memory, but {most} MiB are allowed")
    result = await run_python(sandbox, _MANY_HANDS)
    held = int(text(result) or 0)
    if held > most:
        raise RuleWarned(f"10 processes use {held} MiB, but {most} MiB are allowed: no control groups found")
    return f"10 processes of 40 MiB use {held} MiB"


@in_sandbox
async def keeps_no_memory_after_a_command(sandbox: Sandbox) -> str:
    """All memory of a command is freed when it ends, including System V memory and message queues."""
    taken = await run_python(sandbox, _SYSTEM_V)
    require(len(text(taken).split()) == 2, describe_end(taken))
    left = await sandbox.exec("tail -q -n +2 /proc/sysvipc/shm /proc/sysvipc/msg")
    require(text(left) == "", f"left after a command: {text(left)}")
    return "refused" if text(taken) == "-1 -1" else "freed"


@in_sandbox
async def stops_a_disk_fill(sandbox: Sandbox) -> str:
    """The size of files is limited in all folders, and the files are deleted with the sandbox."""
    result = await run_python(sandbox, _FILL, limits=Limits(memory_bytes=MIB * 120))
    filled = await sandbox.exec("du -sk /work /tmp /dev/shm 2>/dev/null | awk '{n += $1} END {print n}'")
    total = max(int(text(result) or 0), int(text(filled) or 0) * 1024) // MIB
    most = 4 * (TIGHT.disk_bytes or 0) // MIB
    require(total <= most, f"{total} MiB can be written in total, but a folder may have 16 MiB")
    await sandbox.exec("rm -rf /work/* /tmp/* /dev/shm/*")
    single = await run_python(sandbox, _ONE_FILE)
    require(int(text(single) or 0) <= (TIGHT.file_bytes or 0), f"a file of {text(single)} bytes can be written")
    many = await run_python(sandbox, _MANY_FILES, limits=Limits(seconds=1.0))
    require(not many.is_success, describe_end(many))
    return f"{total} MiB in all folders together, {int(text(single)) // MIB} MiB in a file"


@in_sandbox
async def stops_a_zip_bomb(sandbox: Sandbox) -> str:
    """Small files that unpack to large ones do not fill disk or memory."""
    bomb = gzip.compress(bytes(300 * MIB), compresslevel=9)
    await sandbox.write("bomb.gz", bomb)
    unpacked = await sandbox.exec("gzip -dc bomb.gz > bomb")
    require(not unpacked.is_success, "a zip bomb was unpacked to the disk")
    size = int(text(await sandbox.exec("wc -c < bomb")))
    require(size <= (TIGHT.file_bytes or 0), f"a zip bomb fills {size} bytes")
    loaded = await run_python(sandbox, "import gzip; print(len(gzip.open('bomb.gz').read()))")
    require(not loaded.is_success, "a zip bomb was unpacked into memory")
    return f"{len(bomb):,} bytes that unpack to {300 * MIB:,}"


@in_sandbox
async def kills_at_the_deadline(sandbox: Sandbox) -> CheckFinding:
    """A command that ignores all signals is killed at its deadline, and its output is kept."""
    start = time.perf_counter()
    result = await run_python(sandbox, f"{_BEATS}    print('on', flush=True); beat()", limits=Limits(seconds=1.0))
    took = time.perf_counter() - start
    require(result.timed_out and not result.is_success, f"an endless command ends as {describe_end(result)}")
    require(took < 1.0 + RULE_GRACE_S, f"1 s became {took:.1f} s")
    require(text(result) == "on", "output until the deadline is lost")
    await _require_silence(sandbox)
    return CheckFinding(f"after {result.seconds:.2f} s", {"over_s": round(result.seconds - 1.0, 3)})


@in_sandbox
async def counts_processor_time(sandbox: Sandbox) -> str:
    """A busy loop is killed when its processor time is used up, before its deadline."""
    result = await run_python(sandbox, "while True: pass", limits=Limits(cpu_seconds=1.0, seconds=60.0))
    require(not result.is_success, f"a busy loop ends as {describe_end(result)}")
    require(not result.timed_out, "processor time is not limited; only the deadline ended a busy loop")
    return f"after {result.seconds:.2f} s"


@in_sandbox
async def kills_what_commands_leave(sandbox: Sandbox) -> str:
    """Daemons, background children and processes without a main thread are killed with the command that made them."""
    program = await sandbox.spawn("echo ready; cat")
    await program.read_line()
    for attack in (_DAEMON, _HEADLESS, _CONTINUERS):
        for seconds in (1.5, 20.0):  # on a busy machine, the first may end before the processes have started
            result = await run_python(sandbox, f"{_BEATS}{attack}", limits=Limits(seconds=seconds))
            require(b"Traceback" not in result.stderr, describe_end(result))
            if (await sandbox.exec("test -s beats")).is_success:
                break
        else:
            raise RuleFailed("no process that a command leaves has started")
        await _require_silence(sandbox)
    start = time.perf_counter()
    result = await sandbox.exec("sleep 60 & echo done")
    require(text(result) == "done", describe_end(result))
    require(time.perf_counter() - start < RULE_GRACE_S, "a background child delays the end of its command")
    await program.write(b"still\n")
    require(await program.read_line() == b"still\n", "a running program died too")
    return "daemon, headless process, processes that wake each other, child with the output"


@in_sandbox
async def survives_signals_from_inside(sandbox: Sandbox) -> str:
    """Commands that signal all visible processes, or lower their limits, affect only themselves."""
    lowered = await run_python(sandbox, _LOWER_LIMITS)
    require(b"Traceback" not in lowered.stderr, describe_end(lowered))
    await require_alive(sandbox, "after its limits were lowered the sandbox does not work")
    for number in ("STOP", "TERM", "INT", "HUP", "CHLD", "SEGV", "KILL"):
        await sandbox.exec(f"kill -{number} $PPID; kill -{number} 1; kill -{number} -1", limits=Limits(seconds=1.0))
        await require_alive(sandbox, f"after kill -{number} -1 the sandbox does not work")
    return "7 signals, 4 limits"


async def stops_with_its_caller(subject: SandboxSubject) -> str:
    """A command whose caller is cancelled is killed; a call during `close` ends with `SandboxError`."""
    before = MachineState.now()
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
            await asyncio.wait_for(task, RULE_GRACE_S)
        except SandboxError:
            continue
        raise RuleFailed("a call interrupted by close does not raise SandboxError")
    await sandbox.close()
    await require_nothing_left(before)
    return "cancelled call, calls during close, closing twice"


async def _wait_for_beats(sandbox: Sandbox) -> None:
    result = await sandbox.exec("while ! test -s beats; do sleep 0.01; done")
    require(result.exit_code == 0, f"a program does not start: {describe_end(result)}")


async def _require_silence(sandbox: Sandbox) -> None:
    """Check that the heartbeat stops; wait a moment, because a call may return before its processes have ended."""
    for _ in range(10):
        seen = await sandbox.exec("wc -c < beats; sleep 0.2; wc -c < beats")
        first, second = text(seen).split()
        if first == second:
            await sandbox.exec("rm -f beats")
            return
    raise RuleFailed("a process continues after its command has ended")
