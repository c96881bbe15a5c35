"""The tools of a real MCP server. Needs the extra: skipped where it is not installed."""

from __future__ import annotations

import contextlib
import socket
import sys
from contextlib import contextmanager

import pytest

from agentrl.builders.tools import find_tool
from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.message import ToolCall
from agentrl.rollout.tools import tool_session

pytest.importorskip("mcp")

SERVER = '''
import os, sys
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("shelf")
kept = []

@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def keep(thing: str) -> str:
    """Keep a thing."""
    kept.append(thing)
    return ", ".join(kept) + os.environ.get("SHELF_MARK", "")

@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("the shelf is full")

@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)

if len(sys.argv) > 1:
    server.run(transport="streamable-http", port=int(sys.argv[1]))
else:
    server.run()
'''


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return str(path)


@pytest.fixture
def entry_of(fork_server):
    """Make the entry of a server, whose program need not import the library again."""

    def make(program, **options):
        return {"name": "mcp", "command": fork_server.command(program), **options}

    return make


async def opened(entry):
    toolset = find_tool(entry)
    return toolset, {tool.name: tool for tool in await toolset.tools()}


async def said(session, tools, name, **arguments):
    return (await session.carry_out(ToolCall(name=name, arguments=arguments), tools)).result.text


@pytest.mark.slow
async def test_a_server_over_standard_input_and_output(program, entry_of, monkeypatch):
    monkeypatch.setenv("MARK_OF_TEST", "!")
    entry = entry_of(program, env={"SHELF_MARK": "$MARK_OF_TEST"})
    toolset, tools = await opened(entry)
    assert list(tools) == ["add", "keep", "fail", "die"]
    assert tools["add"].rules.parallel
    assert not tools["keep"].rules.parallel
    assert tools["add"].schema["function"]["parameters"]["required"] == ["a"]
    for _ in range(2):  # each episode has a server of its own, which remembers nothing of others
        async with tool_session() as session:
            assert await said(session, tools, "add", a=2, b=3) == "5"
            assert await said(session, tools, "keep", thing="fern") == "fern!"
            assert await said(session, tools, "keep", thing="moss") == "fern, moss!"
            assert await said(session, tools, "fail") == "Error: Error executing tool fail"
            told = await said(session, tools, "add", a="x", c=1)
            assert told == (
                "Error: wrong arguments for add: unknown argument c; a: 'x' is not of type 'integer'; it takes: a, b"
            )
    await toolset.close()


async def test_a_server_that_dies_is_a_failure_of_the_machinery(program, entry_of):
    toolset, tools = await opened(entry_of(program))
    async with tool_session() as session:
        with pytest.raises(EnvironmentFailure, match=r"the MCP server .*server\.py failed"):
            await said(session, tools, "die")
    async with tool_session() as session:
        assert await said(session, tools, "add", a=1) == "2"
    await toolset.close()


async def test_some_tools_under_other_names_in_a_session_of_all(program, entry_of):
    entry = entry_of(program, tools=["keep"], prefix="shelf_", shared=True)
    toolset, tools = await opened(entry)
    assert list(tools) == ["shelf_keep"]
    for expected in ("fern", "fern, fern"):
        async with tool_session() as session:
            assert await said(session, tools, "shelf_keep", thing="fern") == expected
    await toolset.close()


@contextmanager
def serving(fork_server, program, port):
    """A server over HTTP, that is ready."""
    with contextlib.closing(fork_server.start(program, str(port))) as running:
        while "running on" not in running.stderr.readline():
            assert running.poll() is None
        yield f"http://127.0.0.1:{port}/mcp"


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def address(fork_server, program, port):
    with serving(fork_server, program, port) as url:
        yield url


async def test_a_server_over_http(address):
    toolset, tools = await opened({"name": "mcp", "url": address})
    async with tool_session() as session:
        assert await said(session, tools, "add", a=20, b=22) == "42"
    await toolset.close()


@pytest.mark.slow
async def test_a_shared_session_is_opened_again_when_its_server_was_restarted(fork_server, program, port):
    with serving(fork_server, program, port) as url:
        toolset, tools = await opened({"name": "mcp", "url": url, "shared": True})
        async with tool_session() as session:
            assert await said(session, tools, "keep", thing="fern") == "fern"
    with serving(fork_server, program, port):
        async with tool_session() as session:
            with contextlib.suppress(EnvironmentFailure):  # this server does not know the session
                await said(session, tools, "add", a=1)
        async with tool_session() as session:
            assert await said(session, tools, "keep", thing="moss") == "moss"
        await toolset.close()


async def test_an_address_without_a_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/mcp"
        with pytest.raises(EnvironmentFailure, match=r"does not start: got (?!ExceptionGroup)"):
            await find_tool({"name": "mcp", "url": url}).tools()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs one address"),
        ({"command": "python x.py", "url": "http://x"}, "expected a list"),
        ({"command": ["a"], "headers": {"a": "b"}}, "option headers of tool mcp has no effect here"),
        ({"command": ["a"], "env": {"A": "$NO_SUCH_VARIABLE"}}, "is not set: NO_SUCH_VARIABLE"),
        ({"comand": ["a"]}, r"unknown argument comand \(did you mean command"),
    ],
)
def test_wrong_options_are_found_before_the_run(options, words):
    with pytest.raises(UsageError, match=words):
        find_tool({"name": "mcp", **options})


async def test_a_command_that_is_no_server_says_what_it_wrote(program):
    entry = {"name": "mcp", "command": [sys.executable, "-c", "raise SystemExit('no shelf here')"]}
    with pytest.raises(EnvironmentFailure, match=r"does not start: got .*It wrote: no shelf here"):
        await find_tool(entry).tools()
    with pytest.raises(EnvironmentFailure, match="does not start"):
        await find_tool({"name": "mcp", "command": ["/nowhere/server"]}).tools()


async def test_tools_that_the_server_does_not_have_are_refused(program, entry_of):
    entry = entry_of(program, tools=["ad"])
    with pytest.raises(UsageError, match="has no such tools: got ad, expected add, keep, fail, die"):
        await find_tool(entry).tools()
