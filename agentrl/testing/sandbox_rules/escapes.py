"""Ways out: rights, devices, namespaces, signals, terminals."""

from __future__ import annotations

import os

from agentrl.testing.env_subject import Finding
from agentrl.testing.sandbox_subject import SandboxSubject, bystander, require, run_python, text, told

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
    tried("pivot_root", lambda: libc.syscall(155, b"/tmp", b"/tmp"))
    tried("setuid", lambda: os.setuid(0))
    tried("setgroups", lambda: os.setgroups([0]))
    tried("device", lambda: os.mknod("disk", 0o60666, os.makedev(8, 0)))
    tried("reboot", lambda: libc.syscall(169, 0xfee1dead, 672274793, 0, None))
    tried("settime", lambda: libc.settimeofday(ctypes.create_string_buffer(16), None))
    tried("module", lambda: libc.syscall(175, b"", 0, b""))
    tried("bpf", lambda: libc.syscall(321, 0, ctypes.create_string_buffer(128), 128))
    tried("keys", lambda: libc.syscall(250, 0, -3, 0))
    tried("io_uring", lambda: libc.syscall(425, 8, ctypes.create_string_buffer(256)))
    tried("userfaultfd", lambda: libc.syscall(323, 0))
    tried("perf", lambda: libc.syscall(298, ctypes.create_string_buffer(128), 0, -1, -1, 0))
    tried("trace of process 1", lambda: libc.ptrace(16, 1, None, None))
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


async def gives_no_rights(subject: SandboxSubject) -> Finding:
    """No namespaces, mounts, devices, kernel settings, tracing, new privileges or capabilities."""
    async with subject.attacked() as sandbox:
        result = await run_python(sandbox, _FORBIDDEN)
        require(text(result) == "done", f"allowed: {text(result)}, {result.stderr[-200:]!r}")
    return Finding(detail="41 ways tried")


async def writes_only_where_it_may(subject: SandboxSubject) -> Finding:
    """The system is read-only, and nothing that was written is seen outside."""
    mark = "agentrl-check-written"
    async with subject.attacked() as sandbox:
        places = "/ /usr /usr/bin /usr/local/bin /etc /bin /lib /var /run /root /home /opt /dev /proc /sys"
        script = f'for place in {places}; do touch "$place/{mark}" && rm "$place/{mark}" && echo "$place"; done; true'
        result = await sandbox.exec(script)
        require(result.stdout == b"", f"can be written: {text(result)}")
        await sandbox.exec(f"touch /tmp/{mark} /var/tmp/{mark} /dev/shm/{mark} ~/{mark}")
        folders = ("/tmp", "/var/tmp", "/dev/shm", os.environ.get("HOME", "/root"), sandbox.folder)
        outside = [folder for folder in folders if mark in _names(folder)]
        require(not outside, f"a file of the sandbox is in {', '.join(outside)}")
    return Finding(detail=f"{len(places.split())} folders tried")


def _names(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


async def signals_nobody_outside(subject: SandboxSubject) -> Finding:
    """No process of the host can be signalled."""
    with bystander() as process:
        async with subject.attacked() as sandbox:
            await run_python(sandbox, _SIGNALS, str(process.pid))
            require(process.poll() is None, "a process of the host was killed")
    return Finding(detail="70,000 numbers tried")


async def has_no_terminal(subject: SandboxSubject) -> Finding:
    """There is no terminal to type into."""
    async with subject.attacked() as sandbox:
        result = await run_python(sandbox, _TERMINAL)
        require(text(result) == "done", told(result))
    return Finding(detail="no controlling terminal, no TIOCSTI")
