"""What real MCP servers answer besides a text: every result reaches the policy, and none costs an episode."""

from __future__ import annotations

import logging
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mcp")

from agentrl.tools import mcp_results, mcp_session, mcp_tools

from agentrl.builders.tools import find_tool
from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.message import ToolCall
from agentrl.render.tool_parsers.xml_calls import parse_qwen3_coder
from agentrl.rollout.tools import tool_session

PROGRAM = str(Path(__file__).with_name("mcp_oddities.py"))


@pytest.fixture
def entry(fork_server):
    """Make the entry of a server, whose program need not import the library again."""

    def make(*flags, **options):
        return {"name": "mcp", "command": fork_server.command(PROGRAM, *flags), **options}

    return make


@pytest.fixture
def served(entry):
    """Open a session, with a function that calls a tool and returns what came of it.

    A shared session needs one server process rather than one for the list of tools and one for calls.
    """

    @asynccontextmanager
    async def opened(*flags, timeout_s=30.0, shared=True, **options):
        toolset = find_tool(entry(*flags, shared=shared, **options))
        tools = {tool.name: tool for tool in await toolset.tools()}
        try:
            async with tool_session(timeout_s=timeout_s) as session:

                async def call(name, **arguments):
                    return await session.carry_out(ToolCall(name=name, arguments=arguments), tools)

                yield tools, call
        finally:
            await toolset.close()

    return opened


PIECES = """\
[image: image/png]
[audio: audio/wav]
first line
a,b
[resource: file:///c.pdf, application/pdf]
[report: file:///d.md] Of May."""

RESULTS = {
    "structured": '{"rows": 3, "name": "fern"}',
    "repeated": '{\n  "rows": 3\n}',
    "summary": '3 plants found\n{"plants": ["fern", "moss", "ivy"]}',
    "wrapped": "fern\nmoss",
    "empty": "[nothing]",
    "unstructured": "no rows here",
    "pieces": PIECES,
    "refusal": "Error: the shelf is full\ntry again later",
    "structured_refusal": 'Error: {"error": "the shelf is full"}',
    "silent_refusal": "Error: silent_refusal failed",
    "internal": "Error: File /shelf/moss not found\nit was eaten",
    "own_code": "Error: sign in first",
    "implementation": "Error: Database is locked",
    "invalid": "Error: Invalid arguments: thing",
}


async def test_each_kind_of_result_is_text_for_the_policy(served):
    async with served() as (_, call):
        assert {name: (await call(name)).result.text for name in RESULTS} == RESULTS
        assert (await call("internal")).fault is not None


async def test_results_that_break_their_own_schema_are_passed_on_and_reported_once(served, caplog):
    async with served() as (_, call):
        for _ in range(2):
            called = await call("broken")
            assert (called.result.text, called.failed) == ("many rows", False)
            assert (await call("dangling")).result.text == "3 rows"
    assert [record.levelno for record in caplog.records if "output schema" in record.message] == 2 * [logging.WARNING]
    assert caplog.text.count("the output schema of MCP tool dangling cannot be checked") == 1
    assert "results of MCP tool broken break its own output schema: 'many' is not of type 'integer'" in caplog.text


INVALID = {
    "null_content": "content: Input should be a valid list",
    "unknown_part": "content.0.TextContent.text: Field required",
    "text_as_content": "content: Input should be a valid list",
}


@pytest.mark.slow
async def test_answers_that_are_no_results_are_errors_for_the_policy():
    toolset = find_tool({"name": "mcp", "command": [sys.executable, str(Path(PROGRAM).with_name("mcp_raw.py"))]})
    tools = {tool.name: tool for tool in await toolset.tools()}
    async with tool_session() as session:
        said = {}
        for name in (*INVALID, "no_content", "empty", "no_result", "fine"):
            said[name] = (await session.carry_out(ToolCall(name=name, arguments={}), tools)).result.text
    assert said.pop("no_result").startswith(
        "Error: the server's answer is not valid: line 8 of its standard output (its result is not an object): '{"
    )
    answers = {name: f"Error: the server's answer is not valid: {problem}" for name, problem in INVALID.items()}
    assert said == {
        **answers,
        "no_content": '{"rows": 3}',
        "empty": "[nothing]",
        "fine": "3 rows",
    }
    await toolset.close()


async def test_names_that_models_cannot_write_are_replaced(served):
    async with served(prefix="web.") as (tools, call):
        long = next(name for name in tools if name.startswith("web_a_tool"))
        again = next(name for name in tools if name.startswith("web_shelf_put_one_"))
        assert (len(long), len(again)) == (64, len("web_shelf_put_one_") + 8)
        assert (await call("web_shelf_put_one")).result.text == "this is shelf.put/one"
        assert (await call(again)).result.text == "this is shelf/put.one"
        assert (await call(long)).result.text.startswith("this is a_tool_with_a_name_that_is_much_longer_than")
        assert tools[long].schema["function"]["name"] == long


@pytest.mark.parametrize("chosen", ["shelf.put/one", "shelf_put_one"])
async def test_tools_are_chosen_by_either_name(served, chosen):
    async with served(tools=[chosen]) as (tools, _):
        assert list(tools) == ["shelf_put_one"]


async def test_an_argument_of_any_type_is_written_in_tags_and_stored(served):
    async with served(tools=["put"]) as (tools, call):
        schemas = {name: tool.schema for name, tool in tools.items()}
        value = "\n[1, {}]\n"
        written = f"<tool_call>\n<function=put>\n<parameter=value>{value}</parameter>\n</function>\n</tool_call>"
        parsed = parse_qwen3_coder(written, schemas).calls[0]
        assert (await call("put", **parsed.arguments)).result.text.startswith("stored ")
        assert (await call("put", value=[1, {}])).result.text == "stored [1, {}]"


@pytest.mark.slow
async def test_a_slow_call_is_given_up_and_the_session_goes_on(served):
    async with served(timeout_s=2.0, shared=False) as (_, call):
        assert (await call("structured")).result.text == RESULTS["structured"]
        assert (await call("slow")).result.text == "Error: slow did not answer in 2 s"
        assert (await call("wrapped")).result.text == RESULTS["wrapped"]


@pytest.mark.slow
async def test_a_shared_server_that_died_is_started_again(entry):
    toolset = find_tool(entry(shared=True))
    tools = {tool.name: tool for tool in await toolset.tools()}
    for _ in range(2):
        async with tool_session() as session:
            assert (await session.carry_out(ToolCall(name="wrapped", arguments={}), tools)).result.text == "fern\nmoss"
            with pytest.raises(EnvironmentFailure, match=r"the MCP server .* failed.*It wrote: the shelf fell down"):
                await session.carry_out(ToolCall(name="die", arguments={}), tools)
    await toolset.close()


async def test_a_list_without_an_end_is_refused(entry):
    with pytest.raises(EnvironmentFailure, match=r"never stops listing its tools: got cursor 'again' twice"):
        await find_tool(entry("--endless")).tools()


async def test_a_server_without_tools_is_refused(entry):
    with pytest.raises(UsageError, match="offers no tools"):
        await find_tool(entry("--none")).tools()


@pytest.mark.parametrize(
    ("flag", "deadline", "words"),
    [("--mute", "MCP_START_S", "does not start"), ("--unlisted", "LIST_S", "does not list its tools")],
)
@pytest.mark.slow
async def test_a_server_that_says_nothing_is_given_up(entry, flag, deadline, words, monkeypatch):
    monkeypatch.setattr(mcp_session, deadline, 0.5)
    with pytest.raises(EnvironmentFailure, match=f"{words}: got no answer in 0.5 s"):
        await find_tool(entry(flag)).tools()


def options(**headers):
    return {"name": "mcp", "url": "http://127.0.0.1:1/mcp", "headers": headers}


@pytest.mark.parametrize("value", ["Bearer $NO_SUCH", "$NO_SUCH", "${NO_SUCH}", "a$NO_SUCH/b"])
def test_a_variable_that_is_not_set_is_found_anywhere_in_a_value(value):
    with pytest.raises(UsageError, match=r"^an environment variable is not set: NO_SUCH\."):
        find_tool(options(Authorization=value))


@pytest.mark.parametrize("value", ["${NAME:-default}", "Bearer ${env:NAME}", "${ NAME }", "${NAME", "${}"])
def test_a_variable_in_another_notation_is_refused(value):
    with pytest.raises(UsageError, match=r"cannot be read: got \$\{.*, expected \$NAME or \$\{NAME\}"):
        find_tool(options(Authorization=value))


def test_each_missing_variable_is_named_once():
    with pytest.raises(UsageError, match=r"not set: NO_A, NO_B\. Set it"):
        find_tool(options(first="$NO_B $NO_A", second="${NO_B}"))


def test_values_of_variables_are_not_read_again(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "$ecret$HOME")
    filled = mcp_tools._fill_in(
        {"a": "Bearer $MY_SECRET", "b": "${MY_SECRET}x", "c": "$$HOME costs 5$", "d": "$5 and $-", "e": "plain"}
    )
    assert filled == {
        "a": "Bearer $ecret$HOME",
        "b": "$ecret$HOMEx",
        "c": "$HOME costs 5$",
        "d": "$5 and $-",
        "e": "plain",
    }


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (None, "Invalid params"),
        ({}, "Invalid params"),
        ("Invalid", "Invalid params"),
        ("a is missing", "Invalid params\na is missing"),
        ({"path": ["a"], "why": "missing"}, 'Invalid params\n{"path": ["a"], "why": "missing"}'),
    ],
)
def test_the_policy_reads_what_a_protocol_error_says(data, text):
    error = SimpleNamespace(code=-32602, message="Invalid params", data=data)
    assert mcp_results.error_text(error) == text


def test_a_variable_that_is_empty_is_set(monkeypatch):
    monkeypatch.setenv("MY_EMPTY", "")
    assert mcp_tools._fill_in({"a": "x$MY_EMPTY"}) == {"a": "x"}
