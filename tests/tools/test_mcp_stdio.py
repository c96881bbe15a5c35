"""What MCP servers write to their standard output besides one message per line."""

import json
import logging
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from agentrl.tools import mcp_stdio
from agentrl.tools.mcp_lines import OutputLines, UnreadableText

from agentrl.builders.tools import find_tool
from agentrl.errors import EnvironmentFailure
from agentrl.message import ToolCall
from agentrl.rollout.tools import tool_session

PROGRAM = str(Path(__file__).with_name("mcp_raw.py"))
WRITERS = runpy.run_path(PROGRAM)["WRITERS"]
BROKEN = {
    "Python": "Expecting property name",
    "cut": "its end is missing",
    "cut before others": "its end is missing",
    "UTF-16": "it is not encoded as UTF-8",
    "frames": "it frames messages as language servers do; expected one message per line",
    "deep": "recursion limit exceeded" if sys.version_info >= (3, 14) else "maximum recursion depth",
    "quite deep": "recursion limit exceeded",
}
"""Answers that cannot be read, and what is said about them."""
READABLE = {name: write for name, write in WRITERS.items() if name not in BROKEN}
ANSWER = {"jsonrpc": "2.0", "id": 3, "result": {"content": [{"type": "text", "text": "3 rows"}], "[{": '\\"}'}}


def read(text):
    """What is read of a server's output: objects and unreadable texts; and what is reported."""
    reports = []
    lines = OutputLines(reports.append)
    found = [one for line in text.split("\n")[:-1] for one in lines.add(line)]
    return [*found, *lines.give_up()], reports


@pytest.mark.parametrize("name", READABLE)
def test_answers_are_found_however_they_are_written(name):
    found, reports = read(WRITERS[name](ANSWER))
    answers = [one for one in found if isinstance(one, dict) and "method" not in one]
    if name == "raw line breaks":
        answers = [json.loads(json.dumps(one).replace("3\\nrows", "3 rows")) for one in answers]
    assert ANSWER in answers
    assert bool(reports) == name.startswith("log")


@pytest.mark.parametrize("name", [name for name in BROKEN if name != "quite deep"])
def test_answers_that_cannot_be_read_are_named(name):
    text = WRITERS[name](ANSWER)
    found, _ = read(text if text.endswith("\n") else text + "\n")
    problem = next(one for one in found if isinstance(one, UnreadableText))
    assert problem.problem.startswith("line 1 of its standard output (" + BROKEN[name])
    assert problem.request_id == (None if name == "frames" else "3")


@pytest.mark.parametrize(
    "text",
    [
        "Server started on port 80",
        "[INFO] {ready",
        "{'level': 'info'}",
        '{"level": "info", "id": 3}',
        "5",
        '"jsonrpc"',
        "{\n  jsonrpc: 2\n}",
        "[\n  'a'\n]",
        '{"a": "jsonrpc',
        "received {'jsonrpc': '2.0', 'id': 3, 'method': 'tools/call'}",
        'received {"jsonrpc": "2.0", "id": 3, "method": "tools/call"}',
        "{'jsonrpc': '2.0', 'id': 3, 'method': 'tools/call'}",
        'sent {"jsonrpc": "2.0", "id": 3, "result": {"conte',
        "\x1b[32m{",
        "]}",
    ],
)
def test_lines_of_a_log_are_no_answers(text):
    """A server that logs what it receives must not have its own requests answered."""
    found, reports = read(text + "\n")
    assert not found
    assert reports[0].startswith("line")


def test_the_lines_of_a_text_are_named():
    found, reports = read("\nstarting\n{\n'jsonrpc': 1\n}\n")
    assert reports == ["line 2 of its standard output: 'starting'"]
    assert [one.problem.partition(" (")[0] for one in found] == ["lines 3 to 5 of its standard output"]


def server(style, *flags):
    """Make the toolset of a server that writes its answers in a style."""
    return find_tool({"name": "mcp", "command": [sys.executable, PROGRAM, "--write", style, *flags], "shared": True})


async def said(toolset):
    tools = {tool.name: tool for tool in await toolset.tools()}
    try:
        async with tool_session(timeout_s=20.0) as session:
            called = [await session.carry_out(ToolCall(name="fine", arguments={}), tools) for _ in range(2)]
            return [one.result.text.replace("\n", " ") for one in called]
    finally:
        await toolset.close()


@pytest.mark.parametrize("style", READABLE)
async def test_a_server_works_however_it_writes(style, caplog):
    assert await said(server(style)) == ["3 rows"] * 2
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == style.startswith("log")
    assert all("other texts than messages to its standard output; they are ignored: line 1" in text for text in warned)


@pytest.mark.parametrize("style", BROKEN)
async def test_a_call_whose_answer_cannot_be_read_fails_at_once(style, monkeypatch):
    monkeypatch.setattr(mcp_stdio, "UNFINISHED_S", 0.2)
    monkeypatch.setattr(mcp_stdio, "UNREADABLE_S", 0.1)
    for text in await said(server(style, "--calls")):
        assert text.startswith("Error: the server's answer is not valid: line ")
        assert BROKEN[style] in text


@pytest.mark.parametrize("style", [style for style in BROKEN if "deep" not in style])
async def test_a_server_whose_answers_cannot_be_read_does_not_start(style, monkeypatch):
    monkeypatch.setattr(mcp_stdio, "UNFINISHED_S", 0.2)
    monkeypatch.setattr(mcp_stdio, "UNREADABLE_S", 0.1)
    words = (
        r"the MCP server .*mcp_raw\.py.* does not start: got .*answer is not valid: lines? \d.* of its standard output"
    )
    with pytest.raises(EnvironmentFailure, match=words):
        await server(style).tools()


def test_a_cut_answer_names_its_own_id_only():
    texts = ['{"jsonrpc": "2.0", "result": {"id": 1', '{"id": "a-1", "jsonrpc": "2.0", "result": {"id": 1']
    assert [read(text + "\n")[0][0].request_id for text in texts] == [None, "a-1"]
