"""Messages of MCP servers that the `mcp` package refuses, from public bug reports."""

import json
import logging
import runpy
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

pytest.importorskip("mcp")

from agentrl.tools.mcp_transport import mended_message, mended_schema

from agentrl.builders.tools import find_tool
from agentrl.errors import EnvironmentFailure
from agentrl.message import ToolCall
from agentrl.rollout.tools import tool_session

PROGRAM = str(Path(__file__).with_name("mcp_raw.py"))
answer = runpy.run_path(PROGRAM)["answer"]
PLACE = {"place": {"type": "string"}}


def server(*flags):
    """Make the toolset of the server that is written by hand."""
    return find_tool({"name": "mcp", "command": [sys.executable, PROGRAM, *flags], "shared": True})


async def texts(toolset, calls):
    """Call tools with arguments; what the policy reads."""
    tools = {tool.name: tool for tool in await toolset.tools()}
    try:
        async with tool_session(timeout_s=10.0) as session:
            called = [await session.carry_out(ToolCall(name=name, arguments=said), tools) for name, said in calls]
            return [one.result.text for one in called]
    finally:
        await toolset.close()


async def test_texts_that_cannot_be_encoded_arrive_and_the_session_goes_on():
    # mksglu/context-mode#659, elizaOS/eliza#23686: texts cut within a pair; hermes-agent#46099: bytes that are no UTF-8
    calls = [(name, {}) for name in ("cut_pair", "latin_1", "null_flag", "fine")]
    assert await texts(server(), calls) == ["fern \ufffd", "caf\ufffd", "3 rows", "3 rows"]


async def test_tools_whose_descriptions_break_the_protocol_are_offered_if_they_can_be_called(caplog):
    # modelcontextprotocol/servers#3051, zereight/gitlab-mcp#286, mastra#21859, mastra#23731, neuro-san#1341
    toolset = server("--odd")
    names = [tool.name for tool in await toolset.tools()]
    assert names == [
        *("nothing", "dialect", "untyped", "empty_list", "nulls", "required_inside", "alternatives", "missing"),
        "list_output",
    ]
    left_out = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split(" is left out")[0] for text in left_out] == ["MCP tool text", "MCP tool None", "MCP tool None"]
    given = {"place": "a"}
    assert await texts(toolset, [("untyped", given), ("required_inside", given), ("missing", {})]) == [
        '{"place": "a"}',
        '{"place": "a"}',
        "{}",
    ]


SAID = {
    "no_code": 'the shelf is locked\n{"by": "Ann"}',
    "text_code": "no such plant",
    "own_code": "the shelf is locked",
    "only_text": "the shelf is full",
    "no_message": '{"code": -32602, "detail": "no such plant"}',
    "null_message": '{"code": -32602, "message": null}',
}
"""What the policy reads of errors in forms that JSON-RPC does not allow."""


ANSWERED = {
    "no_version": "3 rows",  # ARBuilder#2
    "null_id": "Error: the shelf is locked",  # helidon-mcp#65, java-sdk#506
    "no_id": "Error: the shelf is locked",  # tower-mcp#802
    "nothing": "Error: the server answered without a result",  # helidon-mcp#152
    "null_result": "Error: the server answered without a result",
    "null_error": "3 rows",
    "both": "Error: the shelf is locked",
}
"""What the policy reads of answers whose other fields break the protocol."""


@pytest.mark.parametrize("flags", [[], ["--text-ids"]])
async def test_answers_that_break_the_protocol_arrive_at_once(flags):
    assert await texts(server(*flags), [(name, {}) for name in ANSWERED]) == list(ANSWERED.values())


async def test_errors_in_other_forms_than_the_protocols_arrive_at_once():
    expected = [*map("Error: {}".format, SAID.values()), "3 rows"]
    assert await texts(server(), [(name, {}) for name in (*SAID, "fine")]) == expected


@asynccontextmanager
async def over_http(reply):
    """Serve MCP over HTTP: `reply` makes the response to a call from the JSON-RPC answer and the tool's name."""

    async def handle(request):
        asked = await request.json()
        if "id" not in asked:
            return web.Response(status=202)
        answered = {"jsonrpc": "2.0", "id": asked["id"], **answer(asked["method"], asked.get("params") or {})}
        answered = {key: value for key, value in answered.items() if value is not ...}
        if asked["method"] != "tools/call":
            return web.json_response(answered, headers={"mcp-session-id": "1"})
        return reply(answered, asked["params"]["name"])

    application = web.Application()
    application.router.add_post("/mcp", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield find_tool({"name": "mcp", "url": f"http://127.0.0.1:{runner.addresses[0][1]}/mcp", "shared": True})
    finally:
        await runner.cleanup()


def as_json(answered, _):
    return web.json_response(answered)


def as_event(answered, _):
    text = f"event: message\r\ndata: {json.dumps(answered)}\r\n\r\n"
    return web.Response(text=text, content_type="text/event-stream")


def as_bad_request(answered, name):
    return web.json_response(answered, status=400 if name in SAID else 200)


@pytest.mark.parametrize("reply", [as_json, as_event, as_bad_request])
async def test_errors_in_other_forms_arrive_over_http_too(reply):
    expected = [*map("Error: {}".format, SAID.values()), "fern \ufffd"]
    async with over_http(reply) as toolset:
        assert await texts(toolset, [(name, {}) for name in (*SAID, "cut_pair")]) == expected
        assert await texts(toolset, [(name, {}) for name in ANSWERED]) == list(ANSWERED.values())


@pytest.mark.parametrize("status", [401, 404, 500])
async def test_what_a_server_says_with_an_http_error_is_told(status):
    def refuse(_, __):
        return web.json_response({"error": "the token has expired"}, status=status)

    async with over_http(refuse) as toolset:
        with pytest.raises(EnvironmentFailure, match=f"It wrote: HTTP {status} .*the token has expired"):
            await texts(toolset, [("fine", {})])


@pytest.mark.parametrize(
    ("raw", "mended"),
    [
        (b"not JSON", None),
        (b"[" * 100_000, None),
        (b'{"jsonrpc":"2.0","id":1,"result":{"error":{"message":"x"}}}', None),
        (b'{"jsonrpc":"2.0","id":1,"error":null,"result":{}}', None),
        (b'{"error":"no token"}', None),
        (b'{"jsonrpc":"2.0","id":1,"method":"roots/list"}', None),
        (b'\xef\xbb\xbf{"jsonrpc":"2.0","id":1,"error":{"message":"x"}}', (-32603, "x")),
        (b'{"jsonrpc":"2.0","id":1,"error":{"code":true,"message":"x"},"result":null}', (-32603, "x")),
        (b'{"id":1,"error":{"code":1.5,"message":""}}', (-32603, '{"code": 1.5, "message": ""}')),
        (b'{"jsonrpc":"2.0","id":1,"error":[]}', (-32603, "[]")),
    ],
)
def test_only_errors_that_break_the_protocol_are_changed(raw, mended):
    if mended is None:
        assert mended_message(raw) == raw
    else:
        read = json.loads(mended_message(raw))
        assert (read["jsonrpc"], read["id"], read["error"]["code"], read["error"]["message"]) == ("2.0", 1, *mended)


@pytest.mark.parametrize(
    ("schema", "read"),
    [
        ({}, {"type": "object"}),
        ({"type": ["object", "null"]}, {"type": "object"}),
        ({"type": "string"}, {"type": "string"}),
        # PHP: shopware#18722, elementor#37327, webcalendar#725; null: LichtFeld-Studio#1430, PraisonAI#3111
        ({"type": "object", "properties": []}, {"type": "object", "properties": {}}),
        ({"type": "object", "properties": None, "required": None}, {"type": "object", "properties": {}}),
        # mastra#23731
        (
            {"type": "object", "properties": {**PLACE, "required": ["place"]}},
            {"type": "object", "properties": PLACE, "required": ["place"]},
        ),
        (
            {"properties": {"required": {"type": "boolean"}}},
            {"type": "object", "properties": {"required": {"type": "boolean"}}},
        ),
        (
            {
                "properties": {
                    "a": {"type": "object", "properties": [], "enum": None, "default": None},
                    "b": "text",
                    "c": None,
                }
            },
            {
                "type": "object",
                "properties": {"a": {"type": "object", "properties": {}, "default": None}, "b": {}, "c": {}},
            },
        ),
        (
            {"anyOf": [{"required": None}], "items": {"title": None}, "$defs": {"A": {"const": None}}},
            {"type": "object", "anyOf": [{}], "items": {}, "$defs": {"A": {"const": None}}},
        ),
    ],
)
def test_schemas_are_read_as_they_are_meant(schema, read):
    assert mended_schema(schema) == read
