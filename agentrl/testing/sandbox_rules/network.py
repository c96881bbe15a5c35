"""The network, which is off unless the spec says otherwise."""

from __future__ import annotations

import contextlib
import secrets
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.sandbox.spec import NO_NETWORK
from agentrl.testing.env_subject import Finding, Missing
from agentrl.testing.sandbox_subject import SandboxSubject, require, run_python, text

_TRY = """
    import socket, sys
    addresses, (port, udp), (path, name) = sys.argv[1].split(","), map(int, sys.argv[2:4]), sys.argv[4:]
    def tried(what, call):
        try: call()
        except (OSError, AttributeError, OverflowError): return
        print(what)
    def open_socket(*kind):
        made = socket.socket(*kind)
        made.settimeout(0.3)
        return made
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        tried(f"TCP to {address}", lambda: open_socket(family, socket.SOCK_STREAM).connect((address, port)))
        try: open_socket(family, socket.SOCK_DGRAM).sendto(b"leak", (address, udp))
        except OSError: pass
    for address in ("1.1.1.1", "8.8.8.8", "169.254.169.254"):
        there = (address, 53)
        tried(f"TCP to {address}", lambda: open_socket(socket.AF_INET, socket.SOCK_STREAM).connect(there))
        tried(f"UDP to {address}", lambda: open_socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"leak", there))
    tried("DNS", lambda: socket.getaddrinfo("example.com", 80))
    for address in (path, chr(0) + name):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            tried(f"unix socket {address!r}", lambda: open_socket(socket.AF_UNIX, kind).connect(address))
    for kind in ((2, socket.SOCK_RAW, 1), (17, socket.SOCK_RAW), (16, socket.SOCK_RAW), (40, socket.SOCK_STREAM)):
        tried(f"a socket of kind {kind}", lambda: socket.socket(*kind))
    print("done")
"""
_LOOPBACK = """
    import socket, threading
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.sendall(b"hello")
    print(server.accept()[0].recv(9).decode())
"""


@dataclass(slots=True)
class _Ears:
    """Sockets of the host that would hear."""

    tcp: socket.socket
    udp: socket.socket
    path: str
    name: str
    unix: list[socket.socket] = field(default_factory=list)

    def heard(self) -> list[str]:
        """What arrived."""
        found = []
        for what, ear in (("TCP", self.tcp), *(("a unix socket", one) for one in self.unix)):
            with contextlib.suppress(OSError):
                ear.accept()
                found.append(what)
        with contextlib.suppress(OSError):
            self.udp.recv(100)
            found.append("UDP")
        return found


async def reaches_no_network(subject: SandboxSubject) -> Finding:
    """No TCP, UDP, DNS, raw or unix socket leads to the host or beyond."""
    if subject.spec.network != NO_NETWORK:
        raise Missing(f"the spec gives network {subject.spec.network}")
    with _listening() as ears:
        async with subject.attacked() as sandbox:
            numbers = [str(ears.tcp.getsockname()[1]), str(ears.udp.getsockname()[1])]
            result = await run_python(sandbox, _TRY, ",".join(_addresses()), *numbers, ears.path, ears.name)
            require(text(result) == "done", f"reached: {text(result)}, {result.stderr[-300:]!r}")
            require(not ears.heard(), f"the host heard {', '.join(ears.heard())}")
            own = await run_python(sandbox, _LOOPBACK)
            require(text(own) == "hello", f"programs in the sandbox do not reach one another: {own.stderr[-200:]!r}")
    return Finding(detail="TCP, UDP, DNS, raw, packet, netlink, vsock and unix sockets; its own loopback works")


@contextlib.contextmanager
def _listening() -> Iterator[_Ears]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o777)
        tcp = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("0.0.0.0", 0))
        ears = _Ears(tcp, udp, str(folder / "socket"), f"agentrl-check-{secrets.token_hex(8)}")
        for address in (ears.path, f"\0{ears.name}"):
            ear = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            ear.bind(address)
            ear.listen()
            ears.unix.append(ear)
        (folder / "socket").chmod(0o777)
        for ear in (tcp, udp, *ears.unix):
            ear.setblocking(False)
        yield ears


def _addresses() -> list[str]:
    """This host's, as far as its name tells."""
    found = {"127.0.0.1", "0.0.0.0"}
    with contextlib.suppress(OSError):
        found |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    return sorted(found)
