"""Allow-lists and the proxy by themselves, with names that lead where a test says; no sandbox is needed."""

import asyncio
import ipaddress
from contextlib import asynccontextmanager

import pytest

from agentrl.errors import UsageError
from agentrl.sandbox import proxy
from agentrl.sandbox.allow_list import AllowList, is_public, read_host, read_place
from agentrl.sandbox.proxy import HostProxy, ProxyRefusal, read_request

LISTED = AllowList.read(
    ["example.com", "*.example.org", "*.cdn.net:8443", "10.0.0.5:5432", "[::1]:80", "93.184.216.34"]
)


@pytest.mark.parametrize(
    ("place", "is_allowed"),
    [
        ("example.com:443", True),
        ("EXAMPLE.com.:80", True),
        ("example.com:22", False),
        ("evil-example.com:443", False),
        ("example.com.evil.net:443", False),
        ("www.example.com:443", False),
        ("a.b.example.org:443", True),
        ("example.org:443", False),
        ("evilexample.org:443", False),
        ("example.org.evil.net:443", False),
        ("a.cdn.net:8443", True),
        ("a.cdn.net:443", False),
        ("10.0.0.5:5432", True),
        ("10.0.0.5:80", False),
        ("10.0.0.6:5432", False),
        ("[::ffff:10.0.0.5]:5432", True),
        ("[0:0:0:0:0:0:0:1]:80", True),
        ("127.0.0.1:80", False),
        ("93.184.216.34:443", True),
    ],
)
def test_entry_matches_only_its_hosts_and_ports(place, is_allowed):
    host, port = read_place(place)
    assert LISTED.permits(host, port) is is_allowed


@pytest.mark.parametrize(
    ("address", "port", "may_lead"),
    [
        ("8.8.8.8", 443, True),
        ("8.8.8.8", 81, True),
        ("10.0.0.5", 82, True),
        ("::ffff:10.0.0.5", 82, True),
        ("10.0.0.5", 83, False),
        ("10.0.0.6", 82, False),
    ],
)
def test_listed_names_may_resolve_to_public_or_listed_addresses(address, port, may_lead):
    hosts = AllowList.read(["example.org", "10.0.0.5:82"])
    assert hosts.permits_address(ipaddress.ip_address(address), port) is may_lead


@pytest.mark.parametrize(
    "text",
    [
        *("127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.0.0.1.x.0", "1.2.3.256", "a.0x"),
        *("bücher.de", "①②⑦.0.0.1", "a..b", "-a.com", ".a.com", "a b", "a@b", "a/b", "a%00b", "[::1%lo]", "[::g]", ""),
        *("a" * 64 + ".com", ".".join(["a" * 60] * 5), "a\r\nb", "a:b:c", "a:0", "a:65536", "a:٣"),
    ],
)
def test_unusual_host_notations_are_rejected(text):
    with pytest.raises(ValueError, match=r"."):
        read_place(text)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("http://a.org", "any scheme and path"),
        ("bücher.de", "xn--"),
        ("*", "invalid"),
        ("*.10.0.0.5", "no subdomains"),
        ("a.*.org", "invalid"),
        ("10.0.0.0/8", "invalid"),
        ("a.org:http", "invalid"),
    ],
)
def test_invalid_entries_are_rejected(entry, complaint):
    with pytest.raises(UsageError, match=complaint):
        AllowList.read([entry])


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.100.100.200", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "168.63.129.16", "192.0.0.192", "240.0.0.1", "::", "::1", "fe80::1"),
        *("fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:10.0.0.1", "::10.0.0.1", "64:ff9b::169.254.169.254"),
        *("2002:7f00:1::", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:db8::1", "64:ff9b:1::1"),
    ],
)
def test_non_public_addresses(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::93.184.216.34"])
def test_public_addresses(address):
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "head",
    [
        *(
            "GET / HTTP/1.1",
            "GET https://a.com/ HTTP/1.1",
            "CONNECT a.com HTTP/1.1",
            "CONNECT http://a.com:80 HTTP/1.1",
        ),
        *(
            "get http://a.com/ HTTP/1.1",
            "GET  http://a.com/ HTTP/1.1",
            "GET http://a.com/ HTTP/2.0",
            "GET http://a.com/",
        ),
        *("GET http://a.com/#x HTTP/1.1", "GET http://x@a.com/ HTTP/1.1", "GET http://a.com:/ HTTP/1.1"),
        *(
            f"POST http://a.com/ HTTP/1.1\r\n{headers}"
            for headers in (
                "Content-Length: 1\r\nContent-Length: 1",
                "Content-Length: 1\r\nTransfer-Encoding: chunked",
                "Content-Length: +1",
                "Content-Length: 1, 1",
                "Transfer-Encoding: gzip, chunked",
                "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
                "Transfer-Encoding : chunked",
                "A: b\r\n c",
                "A: b\nHost: c",
                "A: b\rHost: c",
                "A: \0",
                "Host: a.com\r\nHost: b.com",
                "no colon",
            )
        ),
    ],
)
def test_ambiguous_request_heads_are_rejected(head):
    with pytest.raises(ProxyRefusal) as refused:
        read_request(f"{head}\r\n\r\n".encode())
    assert refused.value.status == 400


def test_a_plain_request_is_written_anew():
    lines = ["GET http://A.com:8080?q=1 HTTP/1.0", "host: evil.com", "Accept: x", "Proxy-Authorization: y"]
    request = read_request(
        "\r\n".join([*lines, "Connection: X-Hop, content-length", "X-Hop: 1", "Content-Length: 3", "", ""]).encode()
    )
    assert request.head.split(b"\r\n") == [
        b"GET /?q=1 HTTP/1.1",
        b"Host: a.com:8080",
        b"Accept: x",
        b"Content-Length: 3",
        b"Connection: close",
        b"",
        b"",
    ]
    assert request.size == 3


def _reader(data):
    reader = asyncio.StreamReader(limit=proxy.MAX_HEAD_BYTES)
    reader.feed_data(data)
    return reader


async def echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def proxied(*hosts, names=(), serve=echo):
    """A proxy that allows `hosts`, in which PORT is that of a server, and where names lead; a function that asks it."""
    names, asked = dict(names), []

    async def resolve(name, port):
        asked.append(name)
        found = names[name]
        return [found.pop(0)] if isinstance(found, list) else [found]

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        made = HostProxy(AllowList.read([host.replace("PORT", str(port)) for host in hosts]), resolve=resolve)
        listening = await asyncio.get_running_loop().create_server(made.protocol, "127.0.0.1", 0)

        async def talk(text, *more):
            reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
            writer.write(text.replace("PORT", str(port)).encode())
            for piece in more:
                writer.write(piece)
            writer.write_eof()
            heard = await reader.read()
            writer.close()
            return heard

        talk.asked, talk.port, talk.proxy = asked, port, listening.sockets[0].getsockname()
        try:
            yield talk
        finally:
            listening.close()
            await made.close()


async def test_a_tunnel_carries_bytes_until_both_sides_have_ended():
    data = bytes(range(256)) * 4096
    async with proxied("127.0.0.1:PORT") as talk:
        heard = await talk("CONNECT 127.0.0.1:PORT HTTP/1.1\r\nHost: x\r\n\r\n", data)
    assert heard == b"HTTP/1.1 200 Connection established\r\n\r\n" + data


async def test_a_name_that_is_not_listed_is_not_even_looked_up():
    async with proxied("a.com:PORT", names={"b.com": "93.184.216.34"}) as talk:
        heard = await talk("CONNECT b.com:PORT HTTP/1.1\r\n\r\n")
        assert heard.startswith(b"HTTP/1.1 403 ")
        assert b"may not reach b.com" in heard
        assert talk.asked == []


async def test_name_is_resolved_once_and_the_checked_address_is_used():
    rebinding = {"a.com": ["127.0.0.1", "93.184.216.34"]}
    async with proxied("a.com:PORT", names=rebinding) as talk:
        assert (await talk("CONNECT a.com:PORT HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 403 ")
    rebinding = {"a.com": ["127.0.0.1", "169.254.169.254"]}
    async with proxied("a.com:PORT", "127.0.0.1:PORT", names=rebinding) as talk:
        assert (await talk("CONNECT a.com:PORT HTTP/1.1\r\n\r\n", b"here")).endswith(b"\r\n\r\nhere")
        assert talk.asked == ["a.com"]
        assert (await talk("CONNECT a.com:PORT HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 403 ")


async def test_names_that_resolve_to_this_machine_are_rejected(monkeypatch):
    monkeypatch.setattr("agentrl.sandbox.allow_list.is_public", lambda _: True)
    async with proxied("a.com:PORT", names={"a.com": "127.0.0.1"}) as talk:
        assert b"does not resolve to a public or listed address" in await talk("CONNECT a.com:PORT HTTP/1.1\r\n\r\n")


async def test_failures_have_distinct_responses(monkeypatch):
    async def fails(name, port):
        raise OSError("no such name")

    made = HostProxy(AllowList.read(["a.com"]), resolve=fails)
    with pytest.raises(ProxyRefusal, match=r"a\.com has no address: no such name") as refused:
        await made._connect(read_request(b"CONNECT a.com:443 HTTP/1.1\r\n\r\n"), "a.com:443")
    assert refused.value.status == 502
    async with proxied("127.0.0.1:1") as talk:
        assert (await talk("CONNECT 127.0.0.1:1 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 502 ")
        with pytest.raises(ProxyRefusal, match="too long"):
            await proxy._receive_head(_reader(b"GET http://127.0.0.1:1/" + b"x" * 2**17))
        monkeypatch.setattr(proxy, "HEAD_S", 0.05)
        reader, writer = await asyncio.open_connection(*talk.proxy)
        writer.write(b"GET http")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_dns_lookups_of_a_sandbox_are_limited():
    running, gate, most = [0, 0], asyncio.Event(), proxy.LOOKUPS

    async def slow(name, port):
        running[0] += 1
        running[1] = max(running)
        await gate.wait()
        running[0] -= 1
        raise OSError("no such name")

    made = HostProxy(AllowList.read(["*.a.com"]), resolve=slow)
    requests = [read_request(f"CONNECT x{n}.a.com:443 HTTP/1.1\r\n\r\n".encode()) for n in range(20)]
    tasks = [asyncio.create_task(made._addresses(request)) for request in requests]
    await asyncio.sleep(0.01)
    for task in tasks[:10]:
        task.cancel()  # a client that has left makes no room before its lookup has ended
    await asyncio.sleep(0.01)
    assert running == [most, most]
    gate.set()
    assert all(
        isinstance(one, ProxyRefusal | asyncio.CancelledError)
        for one in await asyncio.gather(*tasks, return_exceptions=True)
    )
    assert running == [0, most]


async def test_events_pass_as_they_come():
    more = asyncio.Event()

    async def events(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        await more.wait()
        writer.write(b"data: 2\n\n")
        writer.close()

    async with proxied("127.0.0.1:PORT", serve=events) as talk:
        reader, writer = await asyncio.open_connection(*talk.proxy)
        writer.write(f"GET http://127.0.0.1:{talk.port}/ HTTP/1.1\r\n\r\n".encode())
        assert (await reader.readuntil(b"data: 1\n\n")).startswith(b"HTTP/1.1 200")
        more.set()
        assert await reader.read() == b"data: 2\n\n"
        writer.close()


@pytest.mark.parametrize(
    ("headers", "body", "arrives"),
    [
        ("Content-Length: 4\r\n", b"abcd", b"abcd"),
        (
            "Transfer-Encoding: chunked\r\n",
            b"3;x=y\r\nabc\r\n1\r\nd\r\n0\r\nTrailer: x\r\n\r\n",
            b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n",
        ),
    ],
)
async def test_body_ends_at_its_declared_size(headers, body, arrives):
    heard = asyncio.Queue()

    async def keeps(reader, writer):
        heard.put_nowait(await reader.readuntil(b"\r\n\r\n"))
        heard.put_nowait(await reader.readexactly(len(arrives)))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nfine")
        writer.close()

    async with proxied("127.0.0.1:PORT", serve=keeps) as talk:
        head = f"POST http://127.0.0.1:PORT/x HTTP/1.1\r\n{headers}\r\n"
        assert (await talk(head, body)).endswith(b"fine")
        heard.get_nowait()
        assert heard.get_nowait() == arrives
        await talk(head, body + b"GET /smuggled HTTP/1.1\r\n\r\n")
        while not heard.empty():
            assert b"smuggled" not in heard.get_nowait()


@pytest.mark.parametrize("chunks", [b"x\r\n", b"-1\r\n", b"3\nabc\r\n", b"3\r\nabcd\r\n", b"0x3\r\nabc\r\n0\r\n\r\n"])
async def test_a_chunk_that_is_not_understood_ends_the_connection(chunks):
    async with proxied("127.0.0.1:PORT") as talk:
        heard = await talk("POST http://127.0.0.1:PORT/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", chunks)
    assert b"\r\n0\r\n" not in heard


def test_addresses_are_compared_by_value():
    assert read_host("[::FFFF:10.0.0.5]") == read_host("10.0.0.5")
    assert read_host("[FE80::1]") == ipaddress.IPv6Address("fe80::1")
