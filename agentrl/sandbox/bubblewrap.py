"""The walls of a local sandbox: a command line for bubblewrap (``bwrap``), which makes the namespaces and mounts."""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import UsageError
from agentrl.sandbox.limits import MIB, Limits
from agentrl.sandbox.spec import ANY_NETWORK

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
_NETWORK_SETTINGS = ("/etc/resolv.conf", "/etc/ssl/certs", "/etc/pki")
_HIDDEN_FILES = ("kcore", "keys", "key-users", "kmsg", "kallsyms", "timer_list", "sched_debug", "config.gz")
_HIDDEN_FOLDERS = ("acpi", "asound", "scsi")
INSTALLED_IN = (PREFIX, Path("/usr"), Path("/usr/local"))
"""Where Pythons that can be seen inside have their packages."""
_INSTALLED = "lib/python3*/*-packages/agentrl"
_OWN_PACKAGES = ("agentrl", "agentrl.envs", "agentrl.tools", "agentrl.agent_loops")
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN")
"""What the first process needs to run commands as a user without any, and to kill them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walls:
    """How one sandbox is closed off."""

    user: int
    """The user that commands become, one of its own for each sandbox; 0: all run as the user who runs agentrl."""
    network: str
    limits: Limits
    readable: tuple[str, ...]
    """Folders of the host that can be read inside, under the same names."""


def new_user() -> int:
    """A user for a sandbox when root runs it: limits per user then are the sandbox's own."""
    return _FIRST_USER + secrets.randbelow(_FIRST_USER) if os.geteuid() == 0 else 0


def find_bubblewrap() -> str:
    """The program, seen to work on this machine.

    Raises:
        UsageError: it is missing, or may not make namespaces.
    """
    found = shutil.which("bwrap")
    if found is None:
        raise UsageError("local sandboxes need bubblewrap", got="no program bwrap", hint=INSTALL)
    complaint = _try(found)
    if complaint:
        raise UsageError(
            "bubblewrap cannot make a sandbox on this machine",
            got=complaint,
            expected="user namespaces, or root with all capabilities",
            hint="in a container, start that with more rights (docker run --privileged); on a host, see "
            "sysctl kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns; "
            "or use a docker or http sandbox",
        )
    return found


@functools.cache
def _try(bubblewrap: str) -> str:
    """What bubblewrap says against making a sandbox that does nothing; empty when it works."""
    walls = Walls(user=new_user(), network="none", limits=Limits(disk_bytes=MIB), readable=())
    command = [bubblewrap, *arguments(walls), "/bin/true"]
    tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    return "" if tried.returncode == 0 else tried.stderr.decode(errors="replace").strip() or f"exit {tried.returncode}"


def arguments(walls: Walls) -> list[str]:
    """Bubblewrap's options; the command to run comes after them."""
    words = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox", "--as-pid-1"]
    words += ["--die-with-parent", "--new-session", "--clearenv"]
    words += [] if walls.network == ANY_NETWORK else ["--unshare-net"]
    if walls.user:
        words += ["--cap-drop", "ALL", *(word for name in _CAPABILITIES for word in ("--cap-add", name))]
    else:
        words += ["--unshare-user", "--uid", str(_PLAIN_USER), "--gid", str(_PLAIN_USER)]
    words += [*_system(walls), *_kernel_files(), *_writable(walls), *_read_only(walls.readable)]
    words += _without_own_code(walls.readable)
    return [*words, "--remount-ro", "/", "--chdir", HOME]


def account_files(user: int) -> dict[str, bytes]:
    """Files under ``/etc`` that name the user."""
    number = user or _PLAIN_USER
    return {
        "/etc/passwd": f"root:x:0:0:root:/:/bin/false\n{USER_NAME}:x:{number}:{number}::{HOME}:/bin/sh\n".encode(),
        "/etc/group": f"root:x:0:\n{USER_NAME}:x:{number}:\n".encode(),
        "/etc/hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
        "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
    }


def _system(walls: Walls) -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for folder in _HOST_FOLDERS:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            words += ["--ro-bind", folder, folder]
    settings = (*_SETTINGS, *(_NETWORK_SETTINGS if walls.network == ANY_NETWORK else ()))
    shared = [path for path in settings if os.path.exists(path)]
    if not PREFIX.is_relative_to("/usr"):
        shared.append(str(PREFIX))
    return words + _read_only(shared)


def _read_only(paths: Sequence[str]) -> list[str]:
    """Parents are made by hand: bubblewrap would let only root pass."""
    parents = dict.fromkeys(str(parent) for path in paths for parent in reversed(Path(path).parents[:-1]))
    made = [word for path in parents if path not in ("/usr", "/tmp") for word in ("--perms", "0755", "--dir", path)]
    return [*made, *(word for path in paths for word in ("--ro-bind", path, path))]


def _without_own_code(readable: Sequence[str]) -> list[str]:
    """Empty folders in place of agentrl, which could make tasks anew with their hidden answers."""
    seen = [Path(path).resolve() for path in ("/usr", str(PREFIX), *readable)]
    hidden = [folder for folder in own_folders() if any(folder.is_relative_to(place) for place in seen)]
    return [word for folder in hidden for word in ("--tmpfs", str(folder), "--remount-ro", str(folder))]


@functools.cache
def own_folders() -> tuple[Path, ...]:
    """Where agentrl's code is on this machine: what runs now, and what is installed for the Python of sandboxes."""
    found = [importlib.util.find_spec(name) for name in _OWN_PACKAGES]
    running = [Path(spec.origin).resolve().parent for spec in found if spec is not None and spec.origin is not None]
    installed = [path for place in INSTALLED_IN for path in place.glob(_INSTALLED)]
    both = dict.fromkeys([*running, *(path.resolve() for path in installed if path.is_dir())])
    return tuple(one for one in both if not any(one.is_relative_to(other) for other in both if other != one))


def _kernel_files() -> list[str]:
    words = ["--proc", "/proc"]
    for name in _HIDDEN_FILES:
        if os.path.exists(f"/proc/{name}"):
            words += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    for name in _HIDDEN_FOLDERS:
        if os.path.isdir(f"/proc/{name}"):
            words += ["--tmpfs", f"/proc/{name}", "--remount-ro", f"/proc/{name}"]
    return words


def _writable(walls: Walls) -> list[str]:
    """Memory file systems of a limited size; bubblewrap's own, under ``/`` and ``/dev``, are closed afterwards."""
    size = str(walls.limits.disk_bytes)
    shared = str(min(_SHARED_MEMORY, walls.limits.disk_bytes or _SHARED_MEMORY))
    words = ["--dev", "/dev", "--size", shared, "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    words += ["--size", size, "--perms", "1777", "--tmpfs", "/tmp", "--size", size, "--perms", "0755", "--tmpfs", HOME]
    return [*words, "--dir", "/run", "--dir", "/var", "--symlink", "/tmp", "/var/tmp"]
