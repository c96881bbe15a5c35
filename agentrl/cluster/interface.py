"""Which network interface has an address: gloo asks for its name, or takes the loopback."""

from __future__ import annotations

import fcntl
import socket
import struct

VARIABLE = "GLOO_SOCKET_IFNAME"
GET_ADDRESS = 0x8915
"""SIOCGIFADDR of netdevice(7)."""
NAME_BYTES = 15
ADDRESS = slice(20, 24)
"""Of an IPv4 address in what that call fills in."""


def interface_of(address: str) -> str | None:
    """Its name; ``None`` where no interface of this machine has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                told = fcntl.ioctl(probe, GET_ADDRESS, struct.pack("256s", name.encode()[:NAME_BYTES]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(told[ADDRESS]) == address:
                return name
    return None


def gloo_variables(address: str) -> dict[str, str]:
    """What lets gloo meet others at an address of this machine."""
    name = interface_of(address)
    return {} if name is None else {VARIABLE: name}
