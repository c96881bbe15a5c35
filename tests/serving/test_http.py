import asyncio
import socket
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentrl.engine import ServerLost
from agentrl.errors import EngineError, UsageError
from agentrl.serving.http import HttpSession, ServerStatusError


@asynccontextmanager
async def serving(handler, **settings):
    """A real server that answers every route with `handler`, and a session that talks to it."""
    application = web.Application()
    application.router.add_route("*", "/{route:.*}", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    session = HttpSession(f"http://127.0.0.1:{port}/", **settings)
    try:
        yield session
    finally:
        await session.close()
        await runner.cleanup()


def answering(body, status=200):
    async def handler(_):
        return web.Response(status=status, text=body)

    return handler


async def test_json_goes_out_and_comes_back_with_the_key(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")

    async def echo(request):
        body = await request.json()
        return web.json_response({"body": body, "path": request.path_qs, "key": request.headers["Authorization"]})

    async with serving(echo, api_key_variable="MY_KEY") as session:
        answer = await session.post("/a?b=c", {"ids": [1, 2]}, deadline_s=10)
    assert answer == {"body": {"ids": [1, 2]}, "path": "/a?b=c", "key": "Bearer secret"}


async def test_an_empty_body_is_none_and_text_is_text():
    async def handler(request):
        assert request.method == "GET" or not request.can_read_body
        return web.Response(text="" if request.method == "POST" else "up 1")

    async with serving(handler) as session:
        assert await session.post("/x", deadline_s=10) is None
        assert await session.get_text("/metrics", deadline_s=10) == "up 1"


async def test_connections_are_used_again():
    ports = set()

    async def handler(request):
        ports.add(request.transport.get_extra_info("peername")[1])
        return web.json_response({})

    async with serving(handler) as session:
        for _ in range(5):
            await session.get("/x", deadline_s=10)
    assert len(ports) == 1


async def test_hundreds_of_requests_are_open_at_once():
    waiting, full = 0, asyncio.Event()

    async def handler(_):
        nonlocal waiting
        waiting += 1
        if waiting == 300:
            full.set()
        await full.wait()
        return web.json_response({})

    async with serving(handler) as session:
        answers = await asyncio.gather(*(session.post("/x", {}, deadline_s=60) for _ in range(300)))
    assert answers == [{}] * 300


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"error": {"message": "too long", "code": 400}}', "too long"),
        ('{"object": "error", "message": "too long"}', "too long"),
        ('{"detail": "too long"}', "too long"),
        ('{"error": "too long"}', "too long"),
        ("too long", "too long"),
        ('{"success": false}', "{'success': False}"),
    ],
)
async def test_an_error_status_is_refused_with_what_the_server_says(body, said):
    async with serving(answering(body, 400)) as session:
        with pytest.raises(ServerStatusError, match="returned an error: got 400") as found:
            await session.post("/x", {}, deadline_s=10)
    assert (found.value.status, found.value.message) == (400, said)
    assert not isinstance(found.value, ServerLost)


async def test_a_refused_key_is_the_users_to_change(monkeypatch):
    monkeypatch.setenv("MY_KEY", "old")
    async with serving(answering("no", 401), api_key_variable="MY_KEY") as session:
        with pytest.raises(UsageError, match=r"refuses the key.*MY_KEY to a valid key"):
            await session.get("/x", deadline_s=10)
    async with serving(answering("no", 401)) as session:
        with pytest.raises(UsageError, match=r"refuses the key.*engine\.api_key_variable"):
            await session.get("/x", deadline_s=10)
    async with serving(answering("no", 401), section="algorithm.teacher") as session:
        with pytest.raises(UsageError, match=r"refuses the key.*algorithm\.teacher\.api_key_variable"):
            await session.get("/x", deadline_s=10)


async def test_a_key_that_is_not_set_is_the_users_to_change(monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    async with serving(answering("{}"), api_key_variable="MY_KEY") as session:
        with pytest.raises(UsageError, match="MY_KEY is not set"):
            await session.get("/x", deadline_s=10)


async def test_what_is_not_json_is_an_engine_error():
    async with serving(answering("<html>")) as session:
        with pytest.raises(EngineError, match=r"/x is not valid JSON: got '<html>'") as found:
            await session.get("/x", deadline_s=10)
    assert not isinstance(found.value, ServerLost)


async def test_a_server_that_hangs_up_is_lost():
    async def handler(request):
        request.transport.close()
        return web.Response()

    async with serving(handler) as session:
        with pytest.raises(ServerLost, match="cannot be reached"):
            await session.post("/x", {}, deadline_s=10)


async def test_a_kept_connection_that_the_server_closed_is_no_lost_server():
    answered = []

    async def one_answer_per_connection(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        answered.append(1)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(one_answer_per_connection, "127.0.0.1", 0) as server:
        session = HttpSession(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for _ in range(3):
            assert await session.post("/x", deadline_s=10) == {}
        await session.close()
    assert len(answered) == 3


async def test_a_server_that_hangs_up_inside_its_answer_is_lost():
    async def handler(request):
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"a"')
        request.transport.close()
        return response

    async with serving(handler) as session:
        with pytest.raises(ServerLost, match="cannot be reached"):
            await session.post("/x", {}, deadline_s=10)


async def test_a_server_that_is_not_there_is_lost():
    async with serving(answering("{}")) as session:
        url = session.url
    gone = HttpSession(url)
    with pytest.raises(ServerLost, match="cannot be reached"):
        await gone.get("/x", deadline_s=10)
    await gone.close()


async def test_a_server_whose_name_nobody_knows_is_lost(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    nowhere = HttpSession("http://nowhere.invalid")
    with pytest.raises(ServerLost, match=r"nowhere\.invalid/x cannot be reached"):
        await nowhere.post("/x", {}, deadline_s=10)
    await nowhere.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "http://nowhere.invalid"])
async def test_nothing_at_the_address_of_an_attached_server_is_found_out_early(monkeypatch, url):
    monkeypatch.setattr("agentrl.serving.http.UNREACHABLE_S", 0.3)
    with socket.socket() as unused:  # bound, but not listening
        unused.bind(("127.0.0.1", 0))
        session = HttpSession(url.format(port=unused.getsockname()[1]))
        with pytest.raises(UsageError, match=f"nothing answers at {session.url}: got Client.*expected a running vLLM"):
            await asyncio.wait_for(session.wait_until_up("/health", "vLLM", deadline_s=600, is_attached=True), 60)
        with pytest.raises(ServerLost, match=r"did not become ready in 0\.5 s"):
            await session.wait_until_up("/health", "vLLM", deadline_s=0.5)
        await session.close()


async def test_an_attached_server_that_is_still_starting_is_awaited(monkeypatch):
    monkeypatch.setattr("agentrl.serving.http.UNREACHABLE_S", 0.1)
    began = time.monotonic()

    statuses = []

    async def starting(_):
        statuses.append(200 if time.monotonic() - began > 0.5 else 503)
        return web.Response(status=statuses[-1])

    async with serving(starting) as session:
        await session.wait_until_up("/health", "vLLM", deadline_s=60, is_attached=True)
    assert statuses[0] == 503
    assert statuses[-1] == 200


class _Slow(EngineError):
    pass


async def test_a_missed_deadline_is_a_lost_server_or_what_the_caller_says():
    release = asyncio.Event()

    async def hang(_):
        await release.wait()
        return web.Response()

    async with serving(hang) as session:
        with pytest.raises(ServerLost, match=r"/x missed its deadline: got no answer in 0\.05 s"):
            await session.get("/x", deadline_s=0.05)
        with pytest.raises(_Slow, match="missed its deadline"):
            await session.post("/x", {}, deadline_s=0.05, late=_Slow)
        release.set()


async def test_cancelling_a_request_hangs_up():
    begun, hung_up = asyncio.Event(), asyncio.Event()

    async def swallow(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        begun.set()
        await reader.read()
        hung_up.set()
        writer.close()

    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as server:
        session = HttpSession(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        task = asyncio.ensure_future(session.post("/x", {}, deadline_s=None))
        await begun.wait()
        task.cancel()
        await asyncio.wait_for(hung_up.wait(), 60)
        await session.close()
    assert task.cancelled()


async def test_closing_ends_what_runs_and_what_comes_later_as_engine_errors():
    begun, release = asyncio.Event(), asyncio.Event()

    async def hang(_):
        begun.set()
        await release.wait()
        return web.Response()

    async with serving(hang) as session:
        task = asyncio.ensure_future(session.post("/x", {}, deadline_s=None))
        await begun.wait()
        await session.close()
        with pytest.raises(EngineError, match="closed during a request") as found:
            await asyncio.wait_for(task, 60)
        assert not isinstance(found.value, ServerLost)
        with pytest.raises(EngineError, match="is closed"):
            await session.get("/x", deadline_s=10)
        await session.close()
        release.set()
