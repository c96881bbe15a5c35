"""What clients may send that are broken or hostile: they are refused, in time, and others are still served."""

from __future__ import annotations

import gzip
import json
import select
import socket
import time
import urllib.error
from contextlib import ExitStack
from typing import Any

import pytest
from served_worlds import STAIRS
from test_protocol import SESSION, Client, ask

from agentrl.errors import UsageError
from agentrl.remote import listening
from agentrl.remote.env_methods import SERVED_METHODS
from agentrl.remote.listening import LOCAL_NAMES, is_own_host, own_names
from agentrl.remote.server.sandboxes import SANDBOX_METHODS, SandboxServer, ServedSandbox
from agentrl.remote.server.server import ServerSettings
from agentrl.remote.server.session import error_answer
from agentrl.remote.wire import MAX_CALL_BYTES, Refusal
from agentrl.sandbox import Limits, SandboxSpec
from agentrl.sandbox.http import largest_request

JSON = b"Content-Type: application/json\r\n"


@pytest.fixture
def url(serve: Any) -> str:
    address: str = serve(STAIRS, max_sessions=4).url
    Client(address).call(1, "reset", seed=3, options={})
    return address


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def say(url: str, data: bytes) -> bytes:
    """All that the server answers to some bytes until it closes the connection or waits for more."""
    with connect(url) as connection:
        connection.sendall(data)
        connection.settimeout(5)
        found = b""
        while b"\r\n\r\n" not in found and (piece := connection.recv(65536)):
            found += piece
        return found


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def head(method: str, route: str, *lines: bytes, host: bytes = b"127.0.0.1") -> bytes:
    return b"%s %s HTTP/1.1\r\nHost: %s\r\n%s\r\n" % (method.encode(), route.encode(), host, b"".join(lines))


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil"])
def test_dns_rebinding_is_rejected(url: str, host: str) -> None:
    assert status(say(url, head("GET", "/v1/info", host=host.encode()))) == 403


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "[::1]:80", "LOCALHOST:9", "10.0.0.7"])
def test_this_machine_and_addresses_are_served(url: str, host: str) -> None:
    assert status(say(url, head("GET", "/v1/info", host=host.encode()))) == 200


def test_names_of_a_server_that_others_reach() -> None:
    names = own_names("0.0.0.0")
    assert is_own_host(f"{socket.gethostname()}:80", names)
    assert not is_own_host("evil.example", names)
    assert own_names("127.0.0.1") == LOCAL_NAMES


def test_with_a_token_any_name_will_do(serve: Any) -> None:
    url = serve(STAIRS, token="secret").url
    token = b"Authorization: Bearer secret\r\n"
    assert status(say(url, head("GET", "/v1/info", token, host=b"games.example"))) == 200
    assert status(say(url, head("GET", "/v1/info", host=b"games.example"))) == 401


DEEP = b'{"number": 2, "action": ' + b"[" * 5000 + b"]" * 5000 + b"}"
NESTED = b'{"number": 2, "action": "up", "x": ' + b"[" * 200 + b"]" * 200 + b"}"


@pytest.mark.parametrize(
    "body",
    [
        DEEP,
        DEEP.replace(b"[", b'{"a":').replace(b"]", b"}").replace(b":}", b":1}"),
        NESTED,
        b'{"number": 2, "action": "up", "action": "down"}',
        b'{"number": 2, "action": "\xff"}',
        b'{"number": 2e0, "action": "up"}',
        b'{"number": true, "action": "up"}',
        b'{"number": ' + b"9" * 5000 + b', "action": "up"}',
        b"",
        b"\x00" * 50,
        "{}".encode("utf-16"),
    ],
)
def test_invalid_requests_are_rejected_without_effect(url: str, body: bytes) -> None:
    said = ask(url, "POST", f"{SESSION}/step", body)
    assert (said.status, said.kind) == (400, "request")
    assert ask(url, "POST", f"{SESSION}/step", {"number": 2, "action": "up"}).status == 200


FIELDS = ("seed", "options", "action", "name", "arguments", "data", "observation", "random_state")
VALUES = (None, True, -3, 2**300, 10**400, 1.5, float("nan"), "text", "\ud800\0", [], [[3], {}], {}, {"a": [None]})


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_no_value_of_any_field_is_a_failure_of_the_server(url: str, value: Any) -> None:
    """Wrong values are the client's fault (4xx), or are for the environment, which may fail."""
    for number, method in enumerate(SERVED_METHODS, 2):
        said = ask(url, "POST", f"{SESSION}/{method}", {"number": number, **dict.fromkeys(FIELDS, value)})
        assert said.status < 500 or "of environment stairs" in said.message, (method, said)


@pytest.mark.parametrize("seed", [-1, 2**200, 10**400, 1e30, float("nan"), True, "3", [3]])
def test_seeds_are_whole_numbers(url: str, seed: Any) -> None:
    assert ask(url, "POST", f"{SESSION}/reset", {"number": 2, "seed": seed, "options": {}}).status == 400


def test_a_body_that_is_announced_as_too_long_is_not_read(url: str) -> None:
    length = b"Content-Length: 99999999999\r\n"
    assert status(say(url, head("POST", f"{SESSION}/step", JSON, length))) == 413
    assert status(say(url, head("PUT", SESSION, JSON, length))) == 413


@pytest.mark.parametrize(
    ("coding", "begin", "repeated"),
    [("identity", b"", b" "), ("gzip", gzip.compress(b"{}"), b"\0")],
    ids=["plain", "padding after compressed data"],
)
def test_endless_body_is_rejected_at_the_size_limit(url: str, coding: str, begin: bytes, repeated: bytes) -> None:
    piece = b"10000\r\n" + repeated * 65536 + b"\r\n"
    lines = JSON, b"Transfer-Encoding: chunked\r\n", b"Content-Encoding: %s\r\n" % coding.encode()
    with connect(url) as connection:
        connection.sendall(head("POST", f"{SESSION}/step", *lines))
        connection.sendall(b"%x\r\n%s\r\n" % (len(begin), begin) if begin else b"")
        sent = 0
        connection.settimeout(0.001)
        answer = b""
        while not answer:
            assert sent < 4 * MAX_CALL_BYTES, "the server reads on"
            try:
                answer = connection.recv(100)
            except TimeoutError:
                connection.settimeout(60)
                connection.sendall(piece)
                connection.settimeout(0.001)
                sent += len(piece)
    assert status(answer) == 413


def test_compression_bomb_is_rejected_by_its_decompressed_size(url: str) -> None:
    data = gzip.compress(b" " * (8 * MAX_CALL_BYTES))
    lines = JSON, b"Content-Encoding: gzip\r\n", b"Content-Length: %d\r\n" % len(data)
    assert status(say(url, head("POST", f"{SESSION}/step", *lines) + data)) == 413


def test_an_unknown_encoding_is_named(url: str) -> None:
    lines = JSON, b"Content-Encoding: br\r\n", b"Content-Length: 2\r\n"
    answer = say(url, head("POST", f"{SESSION}/step", *lines) + b"{}")
    assert status(answer) == 415
    assert b"Content-Encoding 'br' is not read here: expected gzip, deflate or none" in answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01 no HTTP\r\n\r\n",
        b"GET /v1/info HTTP/1.1\r\n\r\n",
        head("GET", "/v1/info", b"X: " + b"a" * 100_000 + b"\r\n"),
        head("GET", "/v1/info", *(b"X%d: a\r\n" % number for number in range(2000))),
        head("GET", "/" + "a" * 100_000),
        head("GET", "/v1/info", b"Content-Length: -3\r\n"),
        head("POST", f"{SESSION}/step", JSON, b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n") + b"0\r\n\r\n",
        head("TRACE", "/v1/info"),
        head("CONNECT", "evil.example:80"),
        head("OPTIONS", "/v1/info"),
        head("DELETE", "/v1/info"),
        head("GET", "/v1/sessions/../../etc/passwd"),
        head("GET", "/v1/tasks/..%2f..%2fetc%2fpasswd"),
        head("GET", "/v1/tasks/%00"),
        head("GET", "/v1/tasks/%ff"),
        head("GET", "//v1/info"),
        head("GET", "http://evil.example/v1/info"),
        head("PUT", "/v1/sessions/%2e%2e%2f%2e%2e%2f", JSON, b"Content-Length: 2\r\n") + b"{}",
    ],
)
def test_malformed_http_is_a_client_error(url: str, request_bytes: bytes) -> None:
    assert 400 <= status(say(url, request_bytes)) < 500
    assert ask(url, "GET", "/v1/info").status == 200


def test_an_upgrade_is_not_followed(url: str) -> None:
    lines = b"Connection: Upgrade\r\n", b"Upgrade: websocket\r\n", b"Sec-WebSocket-Key: eA==\r\n"
    assert status(say(url, head("GET", "/v1/info", *lines, b"Sec-WebSocket-Version: 13\r\n"))) == 200


def test_connections_beyond_the_bound_are_dropped_and_others_are_served(serve: Any) -> None:
    url = serve(STAIRS, max_sessions=1).url
    most = ServerSettings(max_sessions=1).most_connections
    with ExitStack() as stack:
        held = [stack.enter_context(connect(url)) for _ in range(most)]
        for one in held:
            one.sendall(b"GET / HT")  # half a request
        extra = stack.enter_context(connect(url))
        assert _is_dropped(extra)
        held.pop().close()
        while not _is_served(url):  # the server has to notice that one is gone
            pass


def _is_served(url: str) -> bool:
    try:
        return ask(url, "GET", "/v1/info").status == 200
    except (ConnectionError, urllib.error.URLError):
        return False


def _is_dropped(connection: socket.socket) -> bool:
    try:
        return connection.recv(10) == b""
    except ConnectionResetError:
        return True


def test_half_requests_and_slow_bodies_are_closed(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "IDLE_CONNECTION_S", 0.05)
    monkeypatch.setattr(listening, "BODY_S", 0.05)
    url = serve(STAIRS).url
    for sent in (b"", b"GET /v1/info HT", b"GET /v1/info HTTP/1.1\r\nX-Slow: "):
        with connect(url) as connection:
            connection.sendall(sent)
            assert connection.recv(10) == b"", "the server closes it"
    answer = say(url, head("PUT", SESSION, JSON, b"Content-Length: 1000\r\n") + b"{")
    assert status(answer) == 408


def test_a_body_that_drips_is_closed_in_time(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "BODY_S", 0.4)
    monkeypatch.setattr(listening, "SLOWEST", 5 * MAX_CALL_BYTES)  # 0.6 s in all
    with connect(serve(STAIRS).url) as connection:
        connection.sendall(head("PUT", SESSION, JSON, b"Content-Length: 1000\r\n"))
        answer = b""
        for _ in range(100):
            connection.sendall(b" ")
            if select.select([connection], [], [], 0.05)[0]:
                answer = connection.recv(1000)
                break
        assert status(answer) == 408


def test_a_broken_chunk_after_the_headers_is_not_waited_for_as_long_as_a_large_body(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "BODY_S", 0.2)
    with connect(serve(STAIRS).url) as connection:
        connection.settimeout(MAX_CALL_BYTES / listening.SLOWEST - 2)
        connection.sendall(head("PUT", SESSION, JSON, b"Transfer-Encoding: chunked\r\n"))
        time.sleep(0.05)
        connection.sendall(b"xyz\r\n")
        assert status(connection.recv(1000)) in (400, 408)


@pytest.mark.parametrize("value", [0, -1, 1e30, 2**61, float("nan"), float("inf"), True, "5", None, [], 1.5])
@pytest.mark.parametrize("name", ["memory_bytes", "processes", "seconds"])
def test_limits_are_numbers_in_a_range(name: str, value: Any) -> None:
    if value is None or (name, value) == ("seconds", 1.5):
        assert Limits(**{name: value}).non_null in ({}, {name: value})
        return
    with pytest.raises(UsageError, match=f"limit {name} is invalid"):
        Limits(**{name: value})


class _NoSandbox:
    """Stands where a sandbox would be: requests that reach it were not refused."""

    def __getattr__(self, name: str) -> Any:
        async def reached(*_arguments: Any, **_options: Any) -> None:
            raise AssertionError(f"{name} was reached")

        return reached


WRONG = {
    "command": [3, [], [3], [[]], {}, None, True],
    "stdin": [3, "no base64!", None],
    "cwd": [3, [], "a\0b"],
    "env": [[], "x", {"A": 3}, {"A": None}, {"": "x"}, {"A=B": "x"}, {"A": "\0"}],
    "limits": [[], "x", 3, {"seconds": -1}, {"seconds": True}, {"memory_bytes": 1e30}, {"secs": 1}, {"seconds": "1"}],
}
RIGHT = {"command": "true", "stdin": "", "env": {}, "cwd": None, "limits": None}
PATHS = (3, None, [])
WRONG_CALLS = [
    *(("exec", {**RIGHT, name: value}) for name, values in WRONG.items() for value in values),
    *(("spawn", {**RIGHT, name: value}) for name, values in WRONG.items() if name != "stdin" for value in values),
    *(("read", {"path": "a", "most": most}) for most in (0, -1, 2**62, 1e30, True, "9", None)),
    *(("list", {"path": path}) for path in PATHS),
    *(("read", {"path": path, "most": 9}) for path in PATHS),
    *(("write", {"path": path, "data": "", "executable": False}) for path in PATHS),
    *(("write", {"path": "a", "data": data, "executable": False}) for data in (3, "!", None)),
    ("write", {"path": "a", "data": "", "executable": "yes"}),
    *(("process_read", {"process": number}) for number in (-1, 0, 2**70, "0", 1.0, True, None)),
    ("restore", {"data": "!"}),
    ("cancel", {"target": 3}),
]


async def test_wrong_types_are_rejected_before_the_sandbox() -> None:
    served = ServedSandbox(_NoSandbox(), lambda: 0.0)
    for number, call in enumerate(WRONG_CALLS):
        method, body = call

        async def do(method: str = method, body: dict[str, Any] = body) -> dict[str, Any]:
            return await SANDBOX_METHODS[method](served, body)

        answer = await served.answer(str(number), b"", do)
        assert answer.status == 400, (method, body, json.loads(answer.body))


@pytest.mark.parametrize(
    "wanted",
    [
        {"limits": []},
        {"limits": {"seconds": 1e300}},
        {"limits": {"processes": True}},
        {"network": 3},
        {"network": [[]]},
        {"network": {"a": 1}},
        {"image": []},
        {"env": {"A": 3}},
        {"demanded": "x"},
        {"demanded": [[]], "limits": {"seconds": -1}},
    ],
)
def test_limits_of_wrong_types_are_rejected(wanted: dict[str, Any]) -> None:
    server = SandboxServer(SandboxSpec(), ServerSettings())
    with pytest.raises((Refusal, UsageError)) as caught:
        server._narrow_spec({"env": {}, **wanted})
    assert error_answer(caught.value).status == 400


def test_body_size_limits_follow_the_sandbox_limits() -> None:
    small = Limits(file_bytes=2**20, disk_bytes=2**24)
    assert largest_request("write", small) < 8 * 2**20
    assert largest_request("restore", small) < 32 * 2**20
    assert largest_request("list", small) == 4 * 2**20
    assert largest_request("restore", Limits(disk_bytes=2**50)) == 512 * 2**20
