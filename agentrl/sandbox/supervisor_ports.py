"""Port forwarding of the supervisor, in the sandbox: the host serves connections to ports of the sandbox's loopback.

The host requests each connection and each chunk of data (`agentrl.sandbox.channel`), so that no data accumulates here.
The data is not inspected.
"""

from __future__ import annotations

import _socket
import errno
import select

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing these takes as long as starting Python
    from collections.abc import Callable
    from typing import Any

METHODS = frozenset({"listen", "accept", "receive", "send", "shut", "drop"})
BACKLOG = 128
PIECE = 65536
LOOPBACK = "127.0.0.1"


class Connection:
    """Connection of a program in the sandbox, with the host's pending requests."""

    def __init__(self, end: _socket.socket) -> None:
        self.end = end
        self.receiving = 0
        """Number of the pending request for data; 0 if there is none."""
        self.sending = 0
        self.unsent = memoryview(b"")


class SupervisorPorts:
    """Ports that listen for the host."""

    def __init__(
        self,
        watch: Callable[[int, int, Callable[[], None]], None],
        forget: Callable[[int], None],
        answer: Callable[..., None],
    ) -> None:
        self._watch, self._forget, self._answer = watch, forget, answer
        self._listening: dict[int, Any] = {}
        self._open: dict[int, Connection] = {}
        self._count = 0

    def handle(self, request: dict[str, Any], body: bytes) -> None:
        """Serve a request of the host."""
        number, connection = request["number"], self._open.get(request.get("target", 0))
        match request["method"]:
            case "listen":
                self._listen(number, request["port"])
            case "accept":
                self._accept(number, self._listening[request["target"]])
            case "receive" if connection is not None:
                connection.receiving = number
                self._advance(connection)
            case "send" if connection is not None:
                connection.sending, connection.unsent = number, memoryview(body)
                self._advance(connection)
            case "receive" | "send":
                self._answer(number, code=errno.EPIPE)
            case "shut" if connection is not None:
                self._shut(connection)
            case "drop" if connection is not None:
                self._forget(connection.end.fileno())
                connection.end.close()
                del self._open[request["target"]]

    def _listen(self, number: int, port: int) -> None:
        """Answer with the port, or with a negative error number."""
        listening = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        try:
            listening.bind((LOOPBACK, port))
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            self._answer(number, code=-(error.errno or errno.EIO))
            return
        listening.setblocking(False)
        port = listening.getsockname()[1]
        self._listening[port] = listening
        self._answer(number, code=port)

    def _accept(self, number: int, listening: Any) -> None:
        self._watch(listening.fileno(), select.POLLIN, lambda: self._answer_accept(number, listening))

    def _answer_accept(self, number: int, listening: Any) -> None:
        """Answer with the connection's number; 0 if it is already closed or cannot be accepted."""
        self._forget(listening.fileno())
        try:
            fd, _ = listening._accept()
        except OSError:
            self._answer(number)
            return
        end = _socket.socket(fileno=fd)
        end.setblocking(False)
        end.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        self._count += 1
        self._open[self._count] = Connection(end)
        self._answer(number, code=self._count)

    def _advance(self, connection: Connection) -> None:
        """Send and receive as much as possible, and wait for the rest."""
        if connection.sending:
            self._send(connection)
        if connection.receiving:
            self._receive(connection)
        events = select.POLLIN * bool(connection.receiving) | select.POLLOUT * bool(connection.sending)
        if events:
            self._watch(connection.end.fileno(), events, lambda: self._advance(connection))
        else:
            self._forget(connection.end.fileno())

    def _send(self, connection: Connection) -> None:
        code = 0
        try:
            while connection.unsent:
                connection.unsent = connection.unsent[connection.end.send(connection.unsent) :]
        except BlockingIOError:
            return
        except OSError as error:
            code = error.errno or errno.EPIPE
        number, connection.sending = connection.sending, 0
        self._answer(number, code=code)

    def _receive(self, connection: Connection) -> None:
        """Answer with data (empty at the end), or with an error number if the connection broke."""
        data, code = b"", 0
        try:
            data = connection.end.recv(PIECE)
        except BlockingIOError:
            return
        except OSError as error:
            code = error.errno or errno.EPIPE
        number, connection.receiving = connection.receiving, 0
        self._answer(number, code=code, out=data)

    def _shut(self, connection: Connection) -> None:
        try:
            connection.end.shutdown(_socket.SHUT_WR)
        except OSError:  # the other side has closed the connection
            return
