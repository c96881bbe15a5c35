"""Ports for servers: free, and given to one server only, also among several processes of agentrl on this machine."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import EngineError, UsageError

FIRST_PORT = 20_000
LAST_PORT = 65_535
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Ports that the system gives to outgoing connections: a server must not wait for one of them."""


@dataclass(frozen=True, slots=True)
class PortReservation:
    """A port that nobody else in agentrl takes until it is released or this process ends."""

    port: int
    _mark: socket.socket

    def release(self) -> None:
        """Let others have it; idempotent."""
        self._mark.close()


def reserve_port(candidates: Iterable[int] | None = None) -> PortReservation:
    """The first port that is neither in use nor reserved.

    Args:
        candidates: Ports to try; when left out, those from 20,000 that the system does not
            use itself, from a random one on.

    Raises:
        EngineError: there is none.
    """
    for port in _candidates() if candidates is None else candidates:
        if (reservation := _reserve(port)) is not None:
            return reservation
    raise EngineError("no port is free", expected="one that no process uses and no launched server has")


def reserve_exactly(port: int) -> PortReservation:
    """The port that the user asked for.

    Raises:
        UsageError: it is in use.
    """
    if (reservation := _reserve(port)) is None:
        raise UsageError(f"port {port} is in use", expected="a free port", hint="name another, or end what uses it")
    return reservation


def is_free(port: int) -> bool:
    """Whether a server could listen on the port, on any address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _reserve(port: int) -> PortReservation | None:
    # names in the abstract namespace have the reach of ports, and vanish with the process that holds them
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0agentrl-port-{port}")
    except OSError:
        mark.close()
        return None
    if not is_free(port):
        mark.close()
        return None
    return PortReservation(port, mark)


def _candidates() -> list[int]:
    low, high = map(int, EPHEMERAL_PORTS.read_text().split())
    outside = [port for port in range(FIRST_PORT, LAST_PORT + 1) if not low <= port <= high]
    found = outside or list(range(FIRST_PORT, LAST_PORT + 1))
    first = random.SystemRandom().randrange(len(found))
    return found[first:] + found[:first]
