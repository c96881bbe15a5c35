"""Messages of MCP servers that the `mcp` package refuses, from public bug reports."""

import logging
import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from agentrl.tools.mcp_transport import mended_schema

from agentrl.builders.tools import find_tool
from agentrl.message import ToolCall
from agentrl.rollout.tools import tool_session

PROGRAM = str(Path(__file__).with_name("mcp_raw.py"))
PLACE = {"place": {"type": "string"}}


def server(*flags):
    """Make the toolset of the server that is written by hand."""
    return find_tool({"name": "mcp", "command": [sys.executable, PROGRAM, *flags], "shared": True})


async def texts(toolset, calls):
    """Call tools with arguments; what the policy reads."""
    tools = {tool.name: tool for tool in await toolset.tools()}
    try:
        async with tool_session(timeout_s=60.0) as session:
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
