"""Web pages as text, from hosts that the config lists."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from fnmatch import fnmatch
from types import TracebackType
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from agentrl import ToolError, ToolResult, tool
from agentrl.errors import UsageError

from .page_text import page_text

MAX_REDIRECTS = 5
_TEXT = ("text/", "application/json", "application/xml", "application/xhtml+xml")
_HTML = ("text/html", "application/xhtml+xml")


class AddressRefused(Exception):
    """An address that is not allowed."""


class FetchPage:
    """Web access of one episode.

    Args:
        hosts: Allowed hosts: ``example.org``, ``*.example.org``, and ``example.org:8080`` for another port.
        networks: Private networks that are also allowed: ``127.0.0.0/8``. All others are refused, even if an allowed
            name resolves to them.
        max_bytes: Maximum bytes of a page.
        page_characters: Characters of a page's text that one call shows.
        max_seconds: Time limit of one page in seconds.
    """

    def __init__(
        self,
        hosts: list[str],
        *,
        networks: Sequence[str] = (),
        max_bytes: int = 2 * 2**20,
        page_characters: int = 8000,
        max_seconds: float = 15.0,
    ) -> None:
        if not hosts:
            raise UsageError("tool fetch_page has no hosts", expected="a list of hosts, such as [example.org]")
        if any("/" in host for host in hosts):
            raise UsageError(
                "hosts of tool fetch_page are not valid",
                got=", ".join(hosts),
                expected="host names without http: and without paths",
            )
        self._hosts = [host.lower() for host in hosts]
        try:
            self._networks = [ipaddress.ip_network(network) for network in networks]
        except ValueError as error:
            raise UsageError("a network of tool fetch_page is not valid", got=error) from error
        self._max_bytes = max_bytes
        self._page_characters = page_characters
        self._timeout = aiohttp.ClientTimeout(total=max_seconds)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> FetchPage:
        """Open an HTTP client that connects to allowed addresses only."""
        connector = aiohttp.TCPConnector(resolver=CheckedResolver(self))
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def __call__(self, url: str, start: int = 0) -> ToolResult:
        """Shows a web page as text.

        Args:
            url: The full address of the page.
            start: Number of characters to skip, to continue reading a long page.
        """
        text = await self._text(url.strip())
        shown = text[max(start, 0) : max(start, 0) + self._page_characters]
        if not shown and text:
            raise ToolError("start is after the end of the page", got=f"{len(text)} characters", hint="start earlier")
        end = max(start, 0) + len(shown)
        more = f"\n[characters {max(start, 0)} to {end} of {len(text)}; continue with start={end}]"
        return ToolResult(shown + (more if end < len(text) else "") or "[the page has no text]")

    async def _text(self, url: str) -> str:
        assert self._session is not None
        for _ in range(MAX_REDIRECTS):
            self.check(url)
            try:
                async with self._session.get(url, allow_redirects=False) as response:
                    if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                        url = urljoin(url, response.headers["Location"])
                        continue
                    return await self._read(response, url)
            except TimeoutError as late:
                raise ToolError(f"{url} does not answer", got=f"nothing in {self._timeout.total:g} s") from late
            except (aiohttp.ClientError, ValueError) as error:
                if _was_refused(error):
                    raise ToolError(f"{url} is at an address that is not allowed") from error
                raise ToolError(f"{url} cannot be reached", got=type(error).__name__) from error
        raise ToolError("the page redirects too often", got=f"{MAX_REDIRECTS} redirects")

    async def _read(self, response: aiohttp.ClientResponse, url: str) -> str:
        if response.status != 200:
            raise ToolError(f"{url} returned no page", got=f"status {response.status}")
        if not response.content_type.startswith(_TEXT):
            raise ToolError(f"{url} is not a text page", got=response.content_type)
        data = b""
        async for piece in response.content.iter_chunked(2**16):
            data += piece
            if len(data) > self._max_bytes:
                raise ToolError(f"{url} is too large", got=f"more than {self._max_bytes} bytes")
        try:
            text = data.decode(response.charset or "utf-8", errors="replace")
        except LookupError:  # unknown charset
            text = data.decode(errors="replace")
        return page_text(text, url) if response.content_type in _HTML else text

    def check(self, url: str) -> None:
        """Refuse an address whose host the config does not list.

        Raises:
            ToolError: the address is not valid or not allowed; the error lists the allowed hosts.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise ToolError("this is not the address of a page", got=url) from error
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise ToolError("this is not the address of a page", got=url, expected="https://HOST/PATH")
        if not any(_fits(pattern, host, port, parts) for pattern in self._hosts):
            raise ToolError(f"{host} is not among the allowed hosts", expected=", ".join(self._hosts))
        literal = _address(host)
        if literal is not None and not self.allows(literal):
            raise ToolError(f"{host} is at an address that is not allowed")

    def allows(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        """Return True if an address is public or in a network that the config lists."""
        mapped = getattr(address, "ipv4_mapped", None) or address
        listed = any(mapped in network for network in self._networks if network.version == mapped.version)
        return listed or (mapped.is_global and not mapped.is_multicast)


class CheckedResolver(AbstractResolver):
    """Resolver that returns only allowed addresses, so that each connection goes to a checked address."""

    def __init__(self, owner: FetchPage) -> None:
        self._owner = owner
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[Any]:
        """Return the allowed addresses of a name."""
        found: list[ResolveResult] = await self._resolver.resolve(host, port, family)
        kept = [one for one in found if (address := _address(one["host"])) and self._owner.allows(address)]
        if found and not kept:
            raise OSError(None, "addresses that are not allowed") from AddressRefused(host)
        return kept

    async def close(self) -> None:
        """Close the resolver."""
        await self._resolver.close()


def _was_refused(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, AddressRefused):
        error = error.__cause__
    return error is not None


def _fits(pattern: str, host: str, port: int | None, parts: SplitResult) -> bool:
    name, _, wanted = pattern.partition(":")
    default = {"http": 80, "https": 443}[parts.scheme]
    return fnmatch(host, name) and (port or default) == (int(wanted) if wanted.isdigit() else default)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


fetch_page = tool(name="fetch_page", parallel=True)(FetchPage)
