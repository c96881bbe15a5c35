"""Allow-list of the hosts that a sandbox may reach, and the check for public addresses.

>>> hosts = AllowList.read(["example.org", "*.example.com:8443", "10.0.0.5:5432"])
>>> hosts.permits(read_host("Example.org."), 443), hosts.permits(read_host("a.example.com"), 443)
(True, False)
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentrl.errors import UsageError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Host: TypeAlias = str | Address
"""Name in lower case without a final dot, or an IP address."""
WEB_PORTS = frozenset({80, 443})
"""Default ports of an entry that names no port."""
MAX_NAME_CHARS = 253
EXPECTED = "HOST, HOST:PORT, *.DOMAIN, *.DOMAIN:PORT, an IP address, or gateway"
LOOPBACK = ipaddress.IPv4Address("127.0.0.1")
_PLACE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/?#\\\s]+)(?::([0-9]{1,5}))?")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that NAT64 translates from IPv4 addresses."""
_NOT_PUBLIC = tuple(map(ipaddress.IPv4Network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24")))
"""Azure's metadata service, protocol assignments (with Oracle's metadata service), and 6to4 relays."""


def read_place(text: str) -> tuple[Host, int | None]:
    """Read ``HOST`` or ``HOST:PORT``; IPv6 addresses must be in brackets.

    Raises:
        ValueError: the text is neither, or is an IPv4 address in a notation other than dotted decimal
            (``2130706433``, ``0x7f.1``).
    """
    found = _PLACE.fullmatch(text)
    if found is None:
        raise ValueError(f"not a host: {text[:80]!r}")
    port = None if found[2] is None else int(found[2])
    if port is not None and not 0 < port < 2**16:
        raise ValueError(f"not a port: {port}")
    return read_host(found[1]), port


def read_host(text: str) -> Host:
    """Read a name or an address into its normal form.

    >>> read_host("EXAMPLE.com."), read_host("[::ffff:127.0.0.1]")
    ('example.com', IPv4Address('127.0.0.1'))

    Raises:
        ValueError: the text is neither.
    """
    if text.startswith("["):
        address = ipaddress.IPv6Address(text[1:-1])
        return address.ipv4_mapped or address
    name = text.removesuffix(".").lower()
    labels = name.split(".")
    if not name.isascii() or len(name) > MAX_NAME_CHARS:
        raise ValueError(f"not a host name: {text[:80]!r}")
    if _NUMBER.fullmatch(labels[-1]):
        return ipaddress.IPv4Address(name)
    if not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(f"not a host name: {text[:80]!r}")
    return name


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """Entry of an allow-list."""

    host: Host
    port: int | None
    is_wildcard: bool
    """True if the entry matches all subdomains of `host`, but not `host` itself."""

    def permits(self, host: Host, port: int) -> bool:
        """Return True if the entry matches a host and port."""
        if port not in (WEB_PORTS if self.port is None else (self.port,)):
            return False
        if self.is_wildcard:
            return isinstance(host, str) and host.endswith(f".{self.host}")
        return host == self.host


@dataclass(frozen=True, slots=True)
class AllowList:
    """Hosts and ports that a sandbox may connect to."""

    entries: tuple[AllowedHost, ...]

    @classmethod
    def read(cls, texts: Sequence[str]) -> AllowList:
        """Read the entries of a config.

        Raises:
            UsageError: an entry is invalid.
        """
        return cls(tuple(map(_read_entry, texts)))

    def permits(self, host: Host, port: int) -> bool:
        """Return True if an entry matches a host and port."""
        return any(entry.permits(host, port) for entry in self.entries)

    @property
    def own_ports(self) -> tuple[int, ...]:
        """Listed ports of this machine's 127.0.0.1."""
        return tuple(entry.port for entry in self.entries if entry.host == LOOPBACK and entry.port is not None)

    def permits_address(self, address: Address, port: int) -> bool:
        """Return True if a listed name may resolve to this address: it is public, or listed itself."""
        address = getattr(address, "ipv4_mapped", None) or address
        return is_public(address) or self.permits(address, port)


def _read_entry(text: str) -> AllowedHost:
    is_wildcard = text.startswith("*.")
    try:
        if text.count(":") > 1 and not text.startswith("["):
            text = f"[{text}]"
        host, port = read_place(text[2:] if is_wildcard else text)
        if is_wildcard and not isinstance(host, str):
            raise ValueError("an address has no subdomains")
    except ValueError as error:
        hint = "write non-ASCII names as xn--…" if not text.isascii() else "remove any scheme and path"
        raise UsageError(
            "a host of a sandbox's allow-list is invalid", got=f"{text!r} ({error})", expected=EXPECTED, hint=hint
        ) from error
    return AllowedHost(host, port, is_wildcard)


def is_public(address: Address) -> bool:
    """Return True for an address that is routed on the internet, and not private, local, reserved or for metadata.

    IPv6 addresses that contain an IPv4 address are public if that address is public.
    """
    if isinstance(address, ipaddress.IPv4Address):
        special = address.is_multicast or address.is_reserved
        return address.is_global and not special and not any(address in network for network in _NOT_PUBLIC)
    if address in _TRANSLATED:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    if address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    carried = address.sixtofour is not None or address.teredo is not None  # their relays are no longer operated
    special = address.is_multicast or address.is_reserved or address.is_site_local
    return address.is_global and not special and not carried
