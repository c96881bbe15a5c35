"""Rules about sandboxes with limited network access: listed hosts through the proxy, and forwarded ports."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.errors import UsageError
from agentrl.sandbox import ProtocolFactory, Sandbox
from agentrl.testing.report import RuleSkipped, require
from agentrl.testing.sandbox_rules.security import attack_directly
from agentrl.testing.sandbox_subject import SandboxSubject, describe_end, run_python, text

_CLIENT = """
    import hashlib, os, socket, sys
    def talk(port, data, ends=False):
        heard = b""
        with socket.create_connection(("127.0.0.1", port), 5) as end:
            try:
                end.sendall(data)
                if ends: end.shutdown(socket.SHUT_WR)
                while piece := end.recv(65536): heard += piece
            except OSError: pass
        return heard
"""
_PROXY_ATTACKS = (
    _CLIENT
    + """
    proxy = int(os.environ["http_proxy"].rpartition(":")[2])
    open_port, shut = map(int, sys.argv[1:3])
    hosts = ["127.0.0.1", "localhost", "LOCALHOST.", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0x7f.1", "0",
             "127.0.0.1.", "127.0.0.2", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::1%lo]",
             "x@127.0.0.1", f"127.0.0.1:{open_port}@127.0.0.1", "127.0.0.1\\\\t", "\u2460\u2461\u2466.0.0.1",
             "169.254.169.254", *sys.argv[3:]]
    for host in hosts:
        place = f"{host}:{shut}"
        talk(proxy, f"CONNECT {place} HTTP/1.1\\r\\nHost: {place}\\r\\n\\r\\nGET /leak HTTP/1.0\\r\\n\\r\\n".encode())
        talk(proxy, f"GET http://{place}/leak HTTP/1.1\\r\\nHost: {place}\\r\\n\\r\\n".encode())
    there, here = f"127.0.0.1:{shut}", f"127.0.0.1:{open_port}"
    both = "Content-Length: 55\\r\\nTransfer-Encoding: chunked"
    leak = f"GET http://{there}/leak HTTP/1.1\\r\\nHost: {there}\\r\\n\\r\\n"
    inner = leak.replace(f"http://{there}", "")
    for attack in (
        f"GET /leak HTTP/1.1\\r\\nHost: {there}\\r\\n\\r\\n",
        f"GET http://{here}/ok HTTP/1.1\\r\\nHost: {there}\\r\\n\\r\\n",
        f"GET http://{here}\\\\@{there}/leak HTTP/1.1\\r\\n\\r\\n",
        f"GET http://{here}#@{there}/leak HTTP/1.1\\r\\n\\r\\n",
        f"CONNECT {here}\\r\\n{there} HTTP/1.1\\r\\n\\r\\n",
        f"GET http://{here}/ok HTTP/1.1\\r\\nA: b\\r\\n\\r\\n" + leak,
        f"GET http://{here}/ok HTTP/1.1\\r\\nA: b\\n{inner}\\r\\n\\r\\n",
        f"GET http://{here}/ok\\rHost:{there} HTTP/1.1\\r\\n\\r\\n",
        f"POST http://{here}/ok HTTP/1.1\\r\\nContent-Length: 0\\r\\n\\r\\n" + inner,
        f"POST http://{here}/ok HTTP/1.1\\r\\n{both}\\r\\n\\r\\n0\\r\\n\\r\\n{inner}",
        f"POST http://{here}/ok HTTP/1.1\\r\\nTransfer-Encoding: xchunked\\r\\n\\r\\n0\\r\\n\\r\\n{inner}",
        f"POST http://{here}/ok HTTP/1.1\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n0\\r\\n\\r\\n{inner}",
        f"POST http://{here}/ok HTTP/1.1\\r\\nContent-Length: 0\\r\\nContent-Length: {len(inner)}\\r\\n\\r\\n{inner}",
        f" GET http://{here}/ok HTTP/1.1\\r\\nTransfer-Encoding\\x0b: chunked\\r\\n\\r\\n{inner}",
    ):
        talk(proxy, attack.encode())
    tunnel = f"CONNECT {here} HTTP/1.1\\r\\n\\r\\n".encode()
    request = b"GET /ok HTTP/1.0\\r\\n\\r\\n"
    ways = (talk(proxy, tunnel + request), talk(proxy, f"GET http://{here}/ok HTTP/1.1\\r\\n\\r\\n".encode()),
            talk(open_port, request))
    print(len(hosts), *(way.endswith(b"welcome") for way in ways))
"""
)
_FORWARDED = (
    _CLIENT
    + """
    import threading
    port, size, count = map(int, sys.argv[1:])
    data = os.urandom(size)
    print("same" if talk(port, data, ends=True) == data[::-1] else "other", end=" ")
    idle = [socket.socket() for _ in range(count)]
    for end in idle:
        end.setblocking(False)
        end.connect_ex(("127.0.0.1", port))  # some have to wait
    for end in idle[:50]: end.send(b"half a request")
    for end in idle: end.close()
    heard = []
    threads = [threading.Thread(target=lambda: heard.append(talk(port, b"abc", ends=True))) for _ in range(16)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(heard.count(b"cba"))
"""
)
_SIZE = 4 * 2**20
_CONNECTIONS = 300


class _RecordingServer:
    """Web server on this machine's loopback that records requests."""

    def __init__(self, answer: bytes) -> None:
        self.received: list[bytes] = []
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n") and (line := await reader.readline()):
            head += line
        self.received.append(head)
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + self._answer)
        if writer.can_write_eof():
            writer.write_eof()
        self.received[-1] += await reader.read()
        writer.close()


@asynccontextmanager
async def _serving(server: _RecordingServer) -> AsyncIterator[int]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listening:
        yield int(listening.sockets[0].getsockname()[1])


async def reaches_listed_hosts_only(subject: SandboxSubject) -> str:
    """Only listed hosts are reached, through the proxy: not by another notation, by a header, or around the proxy."""
    welcome, hidden = _RecordingServer(b"welcome"), _RecordingServer(secrets.token_hex(16).encode())
    async with _serving(welcome) as open_port, _serving(hidden) as shut:
        network = (f"127.0.0.1:{open_port}", f"localhost:{shut}", "nowhere.invalid")
        listed = SandboxSubject(dataclasses.replace(subject.spec, network=network))
        await _require_possible(listed)
        await attack_directly(listed)
        async with listed.open_for_attack() as sandbox:
            done = await run_python(sandbox, _PROXY_ATTACKS, str(open_port), str(shut))
        require(not hidden.received, f"a host that is not listed was reached: {b' '.join(hidden.received)[:300]!r}")
        require(text(done).endswith("True True True"), f"the listed host is not reached: {describe_end(done)}")
        smuggled = [head for head in welcome.received if b"leak" in head or str(shut).encode() in head]
        require(not smuggled, f"a request was smuggled: {smuggled[:1]!r}")
    return f"{text(done).split()[0]} notations of hosts, 14 requests"


async def forwards_ports(subject: SandboxSubject) -> str:
    """A forwarded port sends data of any size to this process, and closes its connections."""

    async def reverse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read())[::-1])
        writer.close()

    def protocol() -> asyncio.BaseProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), reverse)

    async with subject.open_for_attack() as sandbox:
        port = await _forward(sandbox, protocol)
        result = await run_python(sandbox, _FORWARDED, str(port), str(_SIZE), str(_CONNECTIONS))
        require(text(result) == "same 16", f"the sent data was not returned: {describe_end(result)}")
    return f"{_SIZE >> 20} MiB, {_CONNECTIONS} idle connections"


async def _forward(sandbox: Sandbox, protocol: ProtocolFactory) -> int:
    try:
        return await sandbox.forward(protocol)
    except UsageError as lacking:
        raise RuleSkipped(str(lacking)) from lacking


async def _require_possible(subject: SandboxSubject) -> None:
    try:
        async with subject.open():
            pass
    except UsageError as lacking:
        raise RuleSkipped(str(lacking)) from lacking
