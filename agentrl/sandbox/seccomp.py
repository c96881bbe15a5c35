"""The filter of system calls of a local sandbox: what no program needs there and kernels have been broken with."""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.errors import UsageError

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in ``struct seccomp_data``."""
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000
"""From this number on, x86-64 has a second table of the same calls."""
_NAMESPACES = 0x7E020000
"""The flags of ``clone`` that make namespaces."""
_FAMILIES = (1, 2, 10)
"""Sockets that exist only inside the network namespace: UNIX, IPv4, IPv6; others (vsock, netlink) may lead out."""
_TERMINAL_REQUESTS = (0x5412, 0x541C)
"""``TIOCSTI`` and ``TIOCLINUX`` type into the terminal."""


@dataclass(frozen=True, slots=True)
class _Machine:
    architecture: int
    clone: int
    clone3: int
    socket: int
    ioctl: int
    prlimit: int
    denied: tuple[int, ...]
    unaccounted: tuple[int, ...]
    """Calls whose memory belongs to no process: ``memfd_create``, ``memfd_secret``."""


_DENIED: Mapping[str, tuple[int, int | None]] = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "iopl": (172, None),
    "ioperm": (173, None),
}
"""Numbers on x86-64 and on aarch64: namespaces, mounts, keys, modules, clocks, doors into the kernel, and
System V memory and messages, which nobody's end would free."""


def _numbers(column: int) -> tuple[int, ...]:
    return tuple(number for numbers in _DENIED.values() if (number := numbers[column]) is not None)


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 56, 435, 41, 16, 302, _numbers(0), (319, 447)),
    "aarch64": _Machine(0xC00000B7, 220, 435, 198, 29, 261, _numbers(1), (279, 447)),
}


def all_filter_programs() -> dict[str, bytes]:
    """The filter for each kind of machine that is known, where control groups count memory."""
    return {machine: filter_program(is_memory_counted=True, machine=machine) for machine in _MACHINES}


def filter_program(*, is_memory_counted: bool, machine: str | None = None) -> bytes:
    """The filter as the kernel reads it (classic BPF, as in ``seccomp(2)``).

    Args:
        is_memory_counted: A control group counts memory that belongs to no process; else the calls that make such
            memory are refused.
        machine: As `platform.machine` calls it; this one by default.

    Raises:
        UsageError: the numbers of this machine's system calls are not known.
    """
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise UsageError(
            "local sandboxes do not know the system calls of this processor",
            got=name,
            expected=" or ".join(_MACHINES),
            hint="use a docker or http sandbox",
        )
    known = _MACHINES[name]
    refused = [*known.denied, *(() if is_memory_counted else known.unaccounted)]
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_IF_EQUAL, known.architecture, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_IF_AT_LEAST, _X32, 0, 1),
        _step(_RETURN, _ERROR | errno.ENOSYS),
        *(step for number in refused for step in _refuse(number, errno.EPERM)),
        *_refuse(known.clone3, errno.ENOSYS),  # its flags cannot be seen here; libraries then take clone
        *_for_call(known.clone, 0, [_step(_IF_ANY_BIT, _NAMESPACES, 0, 1), _step(_RETURN, _ERROR | errno.EPERM)]),
        *_for_call(known.socket, 0, [*map(_allow, _FAMILIES), _step(_RETURN, _ERROR | errno.EAFNOSUPPORT)]),
        *_for_call(known.ioctl, 1, [step for request in _TERMINAL_REQUESTS for step in _refuse(request, errno.EPERM)]),
        *_for_call(known.prlimit, 0, [_allow(0), _step(_RETURN, _ERROR | errno.EPERM)]),  # only a process's own limits
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
    """For one call: look at an argument's lower half; what no step returns for is allowed."""
    body = b"".join([_step(_LOAD, _ARGUMENTS + 8 * argument), *steps, _step(_RETURN, _ALLOW)])
    return [_step(_IF_EQUAL, number, 0, len(body) // 8), body]
