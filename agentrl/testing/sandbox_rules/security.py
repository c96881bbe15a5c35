"""Rules about security: rights, devices, namespaces, signals, terminals, the network, and hidden data."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from agentrl.sandbox import Sandbox
from agentrl.sandbox.isolation import own_folders
from agentrl.sandbox.spec import ANY_NETWORK
from agentrl.testing.report import RuleSkipped, require
from agentrl.testing.sandbox_subject import (
    SandboxSubject,
    bystander,
    describe_end,
    host_file,
    in_sandbox,
    run_python,
    text,
)

_FORBIDDEN = """
    import ctypes, os, socket
    libc = ctypes.CDLL(None, use_errno=True)
    def tried(name, call):
        try: result = call()
        except (OSError, AttributeError): return
        if result != -1: print(name, result)
    for name, flag in {"user": 0x10000000, "mount": 0x20000, "net": 0x40000000, "pid": 0x20000000}.items():
        tried(f"unshare {name} namespace", lambda: libc.unshare(flag))
    tried("mount", lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
    tried("remount", lambda: libc.mount(b"none", b"/usr", None, 32 | 4096, None))
    tried("umount", lambda: libc.umount2(b"/proc", 2))
    tried("setuid", lambda: os.setuid(0))
    tried("setgroups", lambda: os.setgroups([0]))
    tried("device", lambda: os.mknod("disk", 0o60666, os.makedev(8, 0)))
    tried("settime", lambda: libc.settimeofday(ctypes.create_string_buffer(16), None))
    tried("trace of process 1", lambda: libc.ptrace(16, 1, None, None))
    room = ctypes.create_string_buffer(256)
    for name, *call in (("pivot_root", 155, b"/tmp", b"/tmp"), ("reboot", 169, 0xfee1dead, 672274793, 0, None),
                        ("module", 175, b"", 0, b""), ("bpf", 321, 0, room, 128), ("keys", 250, 0, -3, 0),
                        ("io_uring", 425, 8, room), ("userfaultfd", 323, 0), ("perf", 298, room, 0, -1, -1, 0)):
        tried(name, lambda: libc.syscall(*call))
    for path in ("/proc/1/mem", "/proc/1/environ", "/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmsg", "/dev/sda",
                 "/dev/vda", "/dev/fuse", "/dev/kvm", "/dev/net/tun", "/dev/vsock", "/proc/sysrq-trigger"):
        tried(f"open {path}", lambda: len(open(path, "rb").read(1)) or -1)
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches",
                 "/proc/1/oom_score_adj", "/sys/kernel/uevent_helper", "/sys/fs/cgroup/release_agent", "/dev/mem",
                 "/proc/sys/kernel/hostname"):
        tried(f"write {path}", lambda: os.open(path, os.O_WRONLY))
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    for name in ("CapEff", "CapPrm", "CapAmb"):
        if int(status[name], 16): print(name, status[name].strip())
    if status["NoNewPrivs"].strip() != "1": print("set-user-ID programs get their rights")
    if os.getuid() == 0: print("user 0")
    print("done")
"""
_TERMINAL = """
    import fcntl, os, termios
    try: print("a terminal", os.open("/dev/tty", os.O_RDWR))
    except OSError: pass
    ours, theirs = os.openpty()
    os.setsid() if os.getpid() != os.getsid(0) else None
    for fd in (0, 1, 2, theirs):
        try: fcntl.ioctl(fd, termios.TIOCSTI, b"x")
        except OSError: continue
        if fd != theirs: print("typed into", fd)
    print("done")
"""
_SIGNALS = """
    import os, signal, sys
    for pid in [int(word) for word in sys.argv[1:]] + list(range(2, 70000)):
        if pid in (os.getpid(), os.getppid()): continue
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
"""
_TRY = """
    import socket, sys
    addresses, (port, udp), (path, name) = sys.argv[1].split(","), map(int, sys.argv[2:4]), sys.argv[4:]
    def tried(what, call):
        try: call()
        except (OSError, AttributeError, OverflowError): return
        print(what)
    def open_socket(*kind):
        made = socket.socket(*kind)
        made.settimeout(0.3)
        return made
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        tried(f"TCP to {address}", lambda: open_socket(family, socket.SOCK_STREAM).connect((address, port)))
        try: open_socket(family, socket.SOCK_DGRAM).sendto(b"leak", (address, udp))
        except OSError: pass
    for address in ("1.1.1.1", "8.8.8.8", "169.254.169.254"):
        there = (address, 53)
        tried(f"TCP to {address}", lambda: open_socket(socket.AF_INET, socket.SOCK_STREAM).connect(there))
        tried(f"UDP to {address}", lambda: open_socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"leak", there))
    tried("DNS", lambda: socket.getaddrinfo("example.com", 80))
    for address in (path, chr(0) + name):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            tried(f"unix socket {address!r}", lambda: open_socket(socket.AF_UNIX, kind).connect(address))
    for kind in ((2, socket.SOCK_RAW, 1), (17, socket.SOCK_RAW), (16, socket.SOCK_RAW), (40, socket.SOCK_STREAM)):
        tried(f"a socket of kind {kind}", lambda: socket.socket(*kind))
    print("done")
"""
_LOOPBACK = """
    import socket, threading
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.sendall(b"hello")
    print(server.accept()[0].recv(9).decode())
"""
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
    def found(*place):
        print("found in", *place)
        sys.exit()
    def search(place):
        if look(place): found(place)
        for folder, folders, files in os.walk(place):
            if folder.count("/") > place.count("/") + 3: folders.clear()
            for name in files[:100]:
                if look(f"{folder}/{name}"): found(folder, name)
    for place in places: search(place)
    for process in filter(str.isdigit, os.listdir("/proc")):
        if process == str(os.getpid()): continue
        for name in ("environ", "cmdline", "comm", "maps", "mountinfo", "stack"):
            if look(f"/proc/{process}/{name}"): found(process, name)
        for name in ("cwd", "fd", *("root" + place for place in places)): search(f"/proc/{process}/{name}")
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


@in_sandbox
async def gives_no_rights(sandbox: Sandbox) -> str:
    """No namespaces, mounts, devices, kernel settings, tracing, new privileges or capabilities."""
    result = await run_python(sandbox, _FORBIDDEN)
    require(text(result) == "done", f"allowed: {text(result)}, {result.stderr[-200:]!r}")
    return "41 ways tried"


@in_sandbox
async def writes_only_where_it_may(sandbox: Sandbox) -> str:
    """The system is read-only, and written files are not visible outside."""
    mark = "agentrl-check-written"
    places = "/ /usr /usr/bin /usr/local/bin /etc /bin /lib /var /run /root /home /opt /dev /proc /sys"
    script = f'for place in {places}; do touch "$place/{mark}" && rm "$place/{mark}" && echo "$place"; done; true'
    result = await sandbox.exec(script)
    require(result.stdout == b"", f"can be written: {text(result)}")
    await sandbox.exec(f"touch /tmp/{mark} /var/tmp/{mark} /dev/shm/{mark} ~/{mark}")
    folders = ("/tmp", "/var/tmp", "/dev/shm", os.environ.get("HOME", "/root"), sandbox.folder)
    outside = [folder for folder in folders if (Path(folder) / mark).is_file()]
    require(not outside, f"a file of the sandbox is in {', '.join(outside)}")
    return f"{len(places.split())} folders tried"


async def signals_nobody_outside(subject: SandboxSubject) -> str:
    """No process of the host can be signalled."""
    with bystander() as process:
        async with subject.open_for_attack() as sandbox:
            await run_python(sandbox, _SIGNALS, str(process.pid))
            require(process.poll() is None, "a process of the host was killed")
    return "70,000 numbers tried"


@in_sandbox
async def has_no_terminal(sandbox: Sandbox) -> str:
    """Programs have no terminal to type into."""
    result = await run_python(sandbox, _TERMINAL)
    require(text(result) == "done", describe_end(result))
    return "no controlling terminal, no TIOCSTI"


async def reaches_no_network(subject: SandboxSubject) -> str:
    """No TCP, UDP, DNS, raw or unix socket leads to the host or beyond."""
    if subject.spec.network == ANY_NETWORK:
        raise RuleSkipped(f"the spec gives network {subject.spec.network}")
    return await attack_directly(subject)


async def attack_directly(subject: SandboxSubject) -> str:
    """Try sockets of all kinds, which must not connect even if the sandbox may use a proxy.

    Raises:
        RuleFailed: a socket reaches the host or beyond, or the sandbox's own loopback does not work.
    """
    with _listening() as ears:
        tcp, udp, path, name = (ear.getsockname() for ear in ears.values())
        async with subject.open_for_attack() as sandbox:
            words = ",".join(_addresses()), str(tcp[1]), str(udp[1]), path, name[1:].decode()
            result = await run_python(sandbox, _TRY, *words)
            require(text(result) == "done", f"reached: {text(result)}, {result.stderr[-300:]!r}")
            readable, _, _ = select.select(list(ears.values()), [], [], 0)
            require(
                not readable, f"the host received {', '.join(what for what, ear in ears.items() if ear in readable)}"
            )
            own = await run_python(sandbox, _LOOPBACK)
            require(text(own) == "hello", f"programs in the sandbox do not reach one another: {own.stderr[-200:]!r}")
    return "TCP, UDP, DNS, raw, packet, netlink, vsock and unix sockets; its own loopback works"


@contextmanager
def _listening() -> Iterator[dict[str, socket.socket]]:
    """Open sockets of the host, by kind, that become readable when they receive something."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o777)
        tcp = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("0.0.0.0", 0))
        ears = {"TCP": tcp, "UDP": udp}
        for kind, address in (("path", f"{folder}/socket"), ("name", f"\0agentrl-check-{secrets.token_hex(8)}")):
            ear = ears[f"a unix socket with a {kind}"] = stack.enter_context(socket.socket(socket.AF_UNIX))
            ear.bind(address)
            ear.listen()
        (folder / "socket").chmod(0o777)
        yield ears


def _addresses() -> list[str]:
    """Return this host's addresses, as far as its name resolves to them."""
    found = {"127.0.0.1", "0.0.0.0", "::1", "::ffff:127.0.0.1"}
    with contextlib.suppress(OSError):
        found |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    return sorted(found)


async def _search(sandbox: Sandbox, program: str, *words: str) -> str:
    """Run a program that must find nothing; return a text with the number of places that it searched."""
    seen = await run_python(sandbox, program, *words)
    require("found" not in text(seen) and "looked" in text(seen), describe_end(seen))
    return text(seen).splitlines()[-1].replace("looked", "looked in") + " places"


async def hides_the_environment(subject: SandboxSubject) -> str:
    """Environment variables and command lines of the host are not visible, not even through ``/proc``."""
    mark = secrets.token_hex(16)
    with bystander(AGENTRL_CHECK_SECRET=mark), mock.patch.dict(os.environ, AGENTRL_CHECK_SECRET=mark):
        async with subject.open_for_attack() as sandbox:
            result = await sandbox.exec("env; cat /proc/*/environ 2>/dev/null")
            require(mark.encode() not in result.stdout, "a variable of the host is shown")
            seen = await _search(sandbox, _SEARCH, mark)
            host = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
            require(b"sleep 543" not in host.stdout, "processes of the host are visible")
    return seen


async def hides_files_of_the_host(subject: SandboxSubject) -> str:
    """Home folders, temporary files and passwords of the host are not visible."""
    mark = secrets.token_hex(16)
    with host_file(mark) as file, file.open() as handle:
        os.set_inheritable(handle.fileno(), True)  # a sandbox must not inherit it
        async with subject.open_for_attack() as sandbox:
            places = (str(file), "/tmp", "/home", "/var", "/run", "/mnt", "/root", "/opt", "/srv")
            await _search(sandbox, _SEARCH, mark, *places)
            handles = await run_python(sandbox, _HANDLES)
            require(text(handles) == "" and handles.exit_code == 0, f"open files leak in: {text(handles)}")
            private = await sandbox.exec("cat /etc/shadow /etc/ssh/*key /root/.ssh/* /root/.bashrc")
            require(private.stdout == b"", "private files of the host are shown")
    return "home, temporary files, passwords, open files"


@in_sandbox
async def hides_the_code_of_agentrl(sandbox: Sandbox) -> str:
    """Commands cannot import or read agentrl, whose generators contain the answers that environments hide."""
    own = [str(folder) for folder in own_folders()]
    return await _search(sandbox, _OWN_CODE, *own)


async def hides_other_sandboxes(subject: SandboxSubject) -> str:
    """Content of one sandbox, such as a grader's answers, is not visible in any other, older or newer."""
    mark = secrets.token_hex(16)
    async with subject.open() as grader:
        for path in ("answer.txt", "/tmp/answer.txt"):
            await grader.write(path, mark.encode())
        holder = await grader.spawn(["sh", "-c", "echo ready; exec sleep 60", mark], env={"ANSWER": mark})
        await holder.read_line()
        async with subject.open_for_attack() as sandbox:
            await _search(sandbox, _SEARCH, mark, "/tmp", "/dev/shm", "/var", "/run", sandbox.folder)
            shared = await run_python(sandbox, "import os; print(os.listdir('/dev/shm'), os.listdir('/tmp'))")
            require(text(shared) == "[] []", f"a new sandbox contains {text(shared)}")
    return "files, processes, variables"
