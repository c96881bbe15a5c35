"""Isolation of a local sandbox: command line for bubblewrap (``bwrap``), which creates namespaces and mounts.

A seccomp filter rejects system calls that programs do not need and that have been used in kernel exploits.
"""

from __future__ import annotations

import errno
import functools
import importlib.util
import os
import platform
import secrets
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import UsageError
from agentrl.sandbox.spec import ANY_NETWORK, MIB, NO_NETWORK

HOME = "/work"
USER_NAME = "agent"
PYTHON = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
PREFIX = Path(sys.base_prefix).resolve()
INSTALL = "install it: apt-get install bubblewrap (or dnf, pacman, apk); or use a docker or http sandbox"
_FIRST_USER = 1_000_000_000
_PLAIN_USER = 1000
_SHARED_MEMORY = 64 * MIB
_HOST_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SETTINGS = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
_CERTIFICATES = ("/etc/ssl/certs", "/etc/pki")
_NETWORK_SETTINGS = ("/etc/resolv.conf", *_CERTIFICATES)
_SYSTEM_FOLDERS = frozenset(
    {"bin", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr", "var"}
)
_HIDDEN_FILES = ("kcore", "keys", "key-users", "kmsg", "kallsyms", "timer_list", "sched_debug", "config.gz")
_HIDDEN_FOLDERS = ("acpi", "asound", "scsi")
INSTALLED_IN = (PREFIX, Path("/usr"), Path("/usr/local"))
"""Prefixes of the Python installations that are mounted in the sandbox."""
_INSTALLED = "lib/python3*/*-packages/agentrl"
_OWN_PACKAGES = ("agentrl", "agentrl.envs", "agentrl.tools", "agentrl.agent_loops")
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN")
"""Capabilities that the first process needs to run commands as a user without capabilities, and to kill them."""
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in ``struct seccomp_data``."""
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000
"""First number of x86-64's second table of system calls (x32)."""
_NAMESPACES = 0x7E020000
"""Flags of ``clone`` that create namespaces."""
_FAMILIES = (1, 2, 10)
"""Allowed socket families, confined by the network namespace: UNIX, IPv4, IPv6; others (vsock, netlink) may escape."""
_TERMINAL_REQUESTS = (0x5412, 0x541C)
"""``TIOCSTI`` and ``TIOCLINUX``, which insert input into the terminal."""
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Architecture numbers of the kernel, in the order of the columns above."""


def new_user() -> int:
    """Choose a separate user ID for a sandbox if agentrl runs as root, for limits per user; otherwise return 0."""
    return _FIRST_USER + secrets.randbelow(_FIRST_USER) if os.geteuid() == 0 else 0


def find_bubblewrap() -> str:
    """Find bubblewrap and test it on this machine.

    Raises:
        UsageError: it is missing, or cannot create namespaces.
    """
    found = shutil.which("bwrap")
    if found is None:
        raise UsageError("local sandboxes need bubblewrap", got="no program bwrap", hint=INSTALL)
    complaint = _try(found)
    if complaint:
        raise UsageError(
            "bubblewrap cannot create a sandbox on this machine",
            got=complaint,
            expected="user namespaces, or root with all capabilities",
            hint="in a container, start it with more rights (docker run --privileged); on a host, see "
            "sysctl kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns; "
            "or use a docker or http sandbox",
        )
    return found


@functools.cache
def _try(bubblewrap: str) -> str:
    """Create an empty sandbox; return bubblewrap's error, or an empty text if it works."""
    command = [bubblewrap, *arguments(new_user(), NO_NETWORK, disk_bytes=MIB), "/bin/true"]
    tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    return "" if tried.returncode == 0 else tried.stderr.decode(errors="replace").strip() or f"exit {tried.returncode}"


def arguments(
    user: int,
    network: str | Sequence[str],
    *,
    disk_bytes: int,
    readable: Sequence[str] = (),
    writable: Sequence[str] = (),
) -> list[str]:
    """Build bubblewrap's options, which are followed by the command to run.

    Args:
        user: User ID of commands; 0 for the user who runs agentrl.
        network: Value of `SandboxSpec.network`.
        disk_bytes: Size of each writable folder.
        readable: Folders of the host that are readable inside, at the same paths.
        writable: Additional writable folders, initially empty.
    """
    options = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox", "--as-pid-1"]
    options += ["--die-with-parent", "--new-session", "--clearenv"]
    options += [] if network == ANY_NETWORK else ["--unshare-net"]
    if user:
        options += ["--cap-drop", "ALL", *(word for name in _CAPABILITIES for word in ("--cap-add", name))]
    else:
        options += ["--unshare-user", "--uid", str(_PLAIN_USER), "--gid", str(_PLAIN_USER)]
    options += [*_system(network), *_kernel_files(), *_writable(disk_bytes, writable), *_read_only(readable)]
    return [*options, *_without_own_code(readable), "--remount-ro", "/", "--chdir", HOME]


def account_files(user: int) -> dict[str, bytes]:
    """Return the files under ``/etc`` that define the user."""
    number = user or _PLAIN_USER
    return {
        "/etc/passwd": f"root:x:0:0:root:/:/bin/false\n{USER_NAME}:x:{number}:{number}::{HOME}:/bin/sh\n".encode(),
        "/etc/group": f"root:x:0:\n{USER_NAME}:x:{number}:\n".encode(),
        "/etc/hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
        "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
    }


def _system(network: str | Sequence[str]) -> list[str]:
    options = ["--ro-bind", "/usr", "/usr"]
    for folder in _HOST_FOLDERS:
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            options += ["--ro-bind", folder, folder]
    certificates = () if isinstance(network, str) else _CERTIFICATES
    settings = (*_SETTINGS, *(_NETWORK_SETTINGS if network == ANY_NETWORK else certificates))
    shared = [path for path in settings if os.path.exists(path)]
    if not PREFIX.is_relative_to("/usr"):
        shared.append(str(PREFIX))
    return options + _read_only(shared)


def _read_only(paths: Sequence[str]) -> list[str]:
    """Bind folders read-only. Their parents are created explicitly, as only root can enter those of bubblewrap."""
    parents = dict.fromkeys(str(parent) for path in paths for parent in reversed(Path(path).parents[:-1]))
    made = [word for path in parents if path not in ("/usr", "/tmp") for word in ("--perms", "0755", "--dir", path)]
    return [*made, *(word for path in paths for word in ("--ro-bind", path, path))]


def _without_own_code(readable: Sequence[str]) -> list[str]:
    """Mount empty folders over agentrl's code, whose generators contain the hidden answers of tasks."""
    seen = [Path(path).resolve() for path in ("/usr", str(PREFIX), *readable)]
    hidden = [folder for folder in own_folders() if any(folder.is_relative_to(root) for root in seen)]
    return [word for folder in hidden for word in ("--tmpfs", str(folder), "--remount-ro", str(folder))]


@functools.cache
def own_folders() -> tuple[Path, ...]:
    """Return the folders with agentrl's code: this process's, and those installed for the sandbox's Python."""
    found = [importlib.util.find_spec(name) for name in _OWN_PACKAGES]
    running = [Path(spec.origin).resolve().parent for spec in found if spec is not None and spec.origin is not None]
    installed = [path for root in INSTALLED_IN for path in root.glob(_INSTALLED)]
    both = dict.fromkeys([*running, *(path.resolve() for path in installed if path.is_dir())])
    return tuple(one for one in both if not any(one.is_relative_to(other) for other in both if other != one))


def _kernel_files() -> list[str]:
    options = ["--proc", "/proc"]
    for name in _HIDDEN_FILES:
        if os.path.exists(f"/proc/{name}"):
            options += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    for name in _HIDDEN_FOLDERS:
        if os.path.isdir(f"/proc/{name}"):
            options += ["--tmpfs", f"/proc/{name}", "--remount-ro", f"/proc/{name}"]
    return options


def is_free(path: str) -> bool:
    """Return True if a folder can be created in a sandbox: the path is absolute and not a system folder."""
    parts = path.strip("/").split("/")
    if not path.startswith("/") or not parts[0] or {"", ".", ".."} & set(parts) or "\0" in path:
        return False
    return parts[0] not in _SYSTEM_FOLDERS and not any(held.is_relative_to(path) for held in (PREFIX, Path(HOME)))


def _writable(disk_bytes: int, further: Sequence[str]) -> list[str]:
    """Return options for tmpfs mounts of limited size; bubblewrap's mounts on ``/`` and ``/dev`` become read-only."""
    size, shared = str(disk_bytes), str(min(_SHARED_MEMORY, disk_bytes))
    options = ["--dev", "/dev", "--size", shared, "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    parents = dict.fromkeys(str(parent) for path in further for parent in reversed(Path(path).parents[:-1]))
    made = [word for path in parents for word in ("--perms", "0755", "--dir", path)]
    options += ["--size", size, "--perms", "1777", "--tmpfs", "/tmp", *made]
    options += [word for path in (HOME, *further) for word in ("--size", size, "--perms", "0755", "--tmpfs", path)]
    return [*options, "--dir", "/run", "--dir", "/var", "--symlink", "/tmp", "/var/tmp"]


def _numbers(text: str) -> dict[str, tuple[int, int]]:
    """Parse a table of system calls with their numbers on x86-64 and aarch64; -1 if aarch64 lacks a call."""
    calls = (call.split() for line in text.strip().splitlines() for call in line.partition(":")[2].split(","))
    return {name: (int(x86), int(arm)) for name, x86, arm in calls}


_DENIED = _numbers("""
namespaces: unshare 272 97, setns 308 268, chroot 161 51, pivot_root 155 41
mounts: mount 165 40, umount2 166 39, open_tree 428 428, move_mount 429 429, mount_setattr 442 442
file systems: fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, quotactl 179 60, quotactl_fd 443 443
files by handle: open_by_handle_at 304 265, name_to_handle_at 303 264, lookup_dcookie 212 18, fanotify_init 300 262
keys: keyctl 250 219, add_key 248 217, request_key 249 218
modules: init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294
doors into the kernel: bpf 321 280, perf_event_open 298 241, userfaultfd 323 282
input and output: io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, iopl 172 -1, ioperm 173 -1
machine: reboot 169 142, swapon 167 224, swapoff 168 225, syslog 103 116, acct 163 89, vhangup 153 58
clocks: settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266
System V memory and messages, which outlive their makers: shmget 29 194, msgget 68 186
""")
_UNACCOUNTED = _numbers("memory of no process: memfd_create 319 279, memfd_secret 447 447")
_CHECKED = _numbers("by arguments: clone 56 220, clone3 435 435, socket 41 198, ioctl 16 29, prlimit64 302 261")


def all_filter_programs() -> dict[str, bytes]:
    """Build the filter of each known machine, for environments in which control groups count memory."""
    return {machine: filter_program(is_memory_counted=True, machine=machine) for machine in _MACHINES}


def filter_program(*, is_memory_counted: bool, machine: str | None = None) -> bytes:
    """Build the seccomp filter (classic BPF, see ``seccomp(2)``).

    Args:
        is_memory_counted: True if a control group counts memory that belongs to no process; otherwise the calls that
            allocate such memory are rejected.
        machine: Machine as in `platform.machine`; this machine by default.

    Raises:
        UsageError: the system call numbers of the machine are unknown.
    """
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise UsageError(
            "local sandboxes do not support this processor's system calls",
            got=name,
            expected=" or ".join(_MACHINES),
            hint="use a docker or http sandbox",
        )
    column = list(_MACHINES).index(name)
    calls = _DENIED if is_memory_counted else _DENIED | _UNACCOUNTED
    refused = [numbers[column] for numbers in calls.values() if numbers[column] >= 0]
    clone, clone3, socket, ioctl, prlimit = (numbers[column] for numbers in _CHECKED.values())
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_IF_EQUAL, _MACHINES[name], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_IF_AT_LEAST, _X32, 0, 1),
        _step(_RETURN, _ERROR | errno.ENOSYS),
        *(step for number in refused for step in _refuse(number, errno.EPERM)),
        *_refuse(clone3, errno.ENOSYS),  # a filter cannot read its flags; libraries fall back to clone
        *_for_call(clone, 0, [_step(_IF_ANY_BIT, _NAMESPACES, 0, 1), _step(_RETURN, _ERROR | errno.EPERM)]),
        *_for_call(socket, 0, [*map(_allow, _FAMILIES), _step(_RETURN, _ERROR | errno.EAFNOSUPPORT)]),
        *_for_call(ioctl, 1, [step for request in _TERMINAL_REQUESTS for step in _refuse(request, errno.EPERM)]),
        *_for_call(prlimit, 0, [_allow(0), _step(_RETURN, _ERROR | errno.EPERM)]),  # only a process's own limits
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _refuse(value: int, error: int) -> list[bytes]:
    return [_step(_IF_EQUAL, value, 0, 1), _step(_RETURN, _ERROR | error)]


def _allow(value: int) -> bytes:
    return _step(_IF_EQUAL, value, 0, 1) + _step(_RETURN, _ALLOW)


def _for_call(number: int, argument: int, steps: list[bytes]) -> list[bytes]:
    """Apply steps to the lower 32 bits of one call's argument; the call is allowed if no step returns."""
    body = b"".join([_step(_LOAD, _ARGUMENTS + 8 * argument), *steps, _step(_RETURN, _ALLOW)])
    return [_step(_IF_EQUAL, number, 0, len(body) // 8), body]
