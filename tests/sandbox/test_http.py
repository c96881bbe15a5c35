"""Sandboxes behind a server, on a real socket; the rules of the kit that the way there could break."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from agentrl.errors import SandboxError, UsageError
from agentrl.remote.server import ServerSettings
from agentrl.remote.server.sandboxes import SandboxServer
from agentrl.sandbox import Limits, SandboxSpec, open_sandbox
from agentrl.sandbox.http import SANDBOXES, TOKEN_VARIABLE
from agentrl.testing.sandbox_check import check_sandbox

RULES = (
    "runs commands",
    "tells how commands end",
    "keeps programs running",
    "keeps output within limits",
    "reads what was written",
    "says why a file cannot be read",
    "keeps snapshots",
    "lets no path lead out",
    "stops with its caller",
    "hides files of the host",
    "leaves nothing behind",
)


@pytest.fixture
async def server() -> AsyncIterator[SandboxServer]:
    served = SandboxServer(SandboxSpec(limits=Limits(processes=40)), ServerSettings(max_sessions=8))
    await served.start()
    yield served
    await served.close()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.slow
async def test_served_sandboxes_keep_the_rules(server: SandboxServer, rule: str):
    report = await check_sandbox({"type": "http", "url": server.url}, only=[rule])
    assert report.passed, report


async def test_repeated_call_is_executed_once(server: SandboxServer):
    async with aiohttp.ClientSession() as session:
        place = f"{server.url}{SANDBOXES}/name-of-it"
        for _ in range(2):
            async with session.put(place, json={"env": {}}) as answer:
                assert answer.status == 200
        assert len(server.sandboxes) == 1
        call = {"id": "first", "command": "echo x >> file; cat file", "stdin": "", "env": {}}
        answers = []
        for _ in range(2):
            async with session.post(f"{place}/exec", json=call) as answer:
                answers.append(await answer.json())
        assert answers[0] == answers[1]
        async with session.post(f"{place}/exec", json={**call, "command": "true"}) as answer:
            assert (answer.status, (await answer.json())["error"]["kind"]) == (409, "number")
        async with session.post(f"{place}/exec", json={**call, "id": "second", "command": []}) as answer:
            assert answer.status == 400
        async with session.post(f"{place}/exec", json={**call, "id": "third", "limits": {"secs": 1}}) as answer:
            assert answer.status == 400


async def test_clients_get_no_more_than_the_server_gives(server: SandboxServer):
    async with open_sandbox({"type": "http", "url": server.url}) as sandbox:  # whose default is 128 processes
        made = await sandbox.exec("for n in $(seq 90); do sleep 9 & done; jobs | wc -l", limits=Limits(seconds=3))
        assert made.exit_code != 0 or int(made.stdout) < 40
    with pytest.raises(UsageError, match=r"lower limits: got limits.processes=1000, expected at most 40"):
        await open_sandbox({"type": "http", "url": server.url, "limits": {"processes": 1000}}).start()
    with pytest.raises(UsageError, match="the server does not allow this network: got all, expected none"):
        await open_sandbox({"type": "http", "url": server.url, "network": "all"}).start()
    with pytest.raises(UsageError, match="the server does not allow this image"):
        await open_sandbox({"type": "http", "url": server.url, "image": "debian"}).start()


async def test_unused_sandbox_is_closed(server: SandboxServer):
    now = 0.0
    server._clock = lambda: now
    sandbox = open_sandbox({"type": "http", "url": server.url})
    await sandbox.start()
    now = 1e9
    server.sandboxes.expire()
    with pytest.raises(SandboxError, match="idle for 900 s"):
        await sandbox.exec("true")
    await sandbox.close()


async def test_token_is_required(monkeypatch: pytest.MonkeyPatch):
    served = SandboxServer(SandboxSpec(), ServerSettings(token="secret"))
    await served.start()
    spec = {"type": "http", "url": served.url}
    try:
        with pytest.raises(UsageError, match=TOKEN_VARIABLE):
            await open_sandbox(spec).start()
        monkeypatch.setenv(TOKEN_VARIABLE, "secret")
        async with open_sandbox(spec) as sandbox:
            assert (await sandbox.exec("echo in")).stdout == b"in\n"
    finally:
        await served.close()


async def test_a_lost_server_is_a_failure_of_the_machinery():
    with pytest.raises(SandboxError, match=r"the connection to the sandbox server http://127.* failed"):
        await open_sandbox({"type": "http", "url": "http://127.0.0.1:1", "options": {"patience_s": 0}}).start()
    for spec in ({}, {"url": "http://x", "options": {"patience": 1}}):
        with pytest.raises(UsageError):
            open_sandbox({"type": "http", **spec})


async def test_requests_to_a_full_server_are_retried(server: SandboxServer):
    spec = {"type": "http", "url": server.url}
    opened = [open_sandbox(spec) for _ in range(8)]
    await asyncio.gather(*(sandbox.start() for sandbox in opened))
    late = open_sandbox(spec)
    waiting = asyncio.create_task(late.start())
    await opened[0].exec("true")
    await opened[0].close()
    await waiting
    assert (await late.exec("echo late")).stdout == b"late\n"
    for sandbox in (*opened, late):
        await sandbox.close()
