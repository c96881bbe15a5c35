"""Custom tools of the Responses API: Codex's ``apply_patch`` and others that take a text.

codex#16397, command-code#885, CLIProxyAPI#5753, workbuddy2api-intl#12, sub2api#3390, ds4#745, free-claude-code#859:
servers that refuse them, drop them, or answer with calls of functions, which Codex takes for a broken payload.
"""

import json
import typing

import openai
import pytest
from openai.types.responses import CustomToolParam

from agentrl.gateway import DIALECTS, custom_tools, responses
from agentrl.gateway.dialect import BadRequest

_, RESPONSES, _ = DIALECTS
USER = {"role": "user", "content": "one"}
PATCH = '*** Begin Patch\n*** Add File: a.txt\n+"one" \\ ü\n*** End Patch'
TOOL = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
SHELL = {
    "type": "function",
    "name": "shell",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def written(name="apply_patch", **arguments):
    """A call as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def client_of(gateway, session):
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key, max_retries=0)


async def respond(client, items, *, streams=False, **fields):
    """Ask with both tools; the response."""
    fields = {"model": "p", "input": items, "tools": [TOOL, SHELL], "store": False, **fields}
    if not streams:
        return await client.responses.create(**fields)
    async with client.responses.stream(**fields) as stream:
        events = [event async for event in stream]
        return events, await stream.get_final_response()


def read(**fields):
    return RESPONSES.read({"model": "p", "input": [USER], **fields}, {})


async def test_a_call_is_a_text_for_the_client_and_comes_back_as_it_was_sampled(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            history = [USER]
            for _ in range(2):
                reply = await respond(client, history)
                (call,) = reply.output
                assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", PATCH)
                assert [tool.type for tool in reply.tools] == ["custom", "function"]
                result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
                history += [call.model_dump(exclude_unset=True), result]

    trajectory, script = await played(play, written(input=PATCH))
    assert (len(trajectory.turns), len(trajectory.sequences)) == (2, 1)
    script.check(trajectory)


async def test_a_stream_has_the_events_of_a_text(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            events, reply = await respond(client, [USER], streams=True)
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert ("".join(deltas), len(deltas) > 1) == (PATCH, True)
        (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
        assert (done.input, done.item_id) == (PATCH, reply.output[0].id)
        assert [call.type for call in reply.output] == ["custom_tool_call", "function_call"]
        assert not [
            event for event in events if event.type.startswith("response.function_call") and "Patch" in str(event)
        ]

    await played(play, f"{written(input=PATCH)}\n{written('shell', a=1)}")


async def test_an_item_of_a_stored_reply_may_be_referred_to(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            (call,) = (await respond(client, [USER], store=True)).output
            result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
            assert (await respond(client, [USER, {"type": "item_reference", "id": call.id}, result])).output

    trajectory, _ = await played(play, written(input=PATCH))
    assert (len(trajectory.turns), len(trajectory.sequences)) == (2, 1)


@pytest.mark.parametrize("arguments", [{}, {"input": 3}, {"patch": PATCH}, {"input": PATCH, "more": 1}])
async def test_a_call_that_is_no_text_is_text_of_the_answer(played, arguments):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            reply = await respond(client, [USER])
            assert (reply.output_text, len(reply.output)) == (written(**arguments), 1)
            history = [USER, *[item.model_dump(exclude_unset=True) for item in reply.output], USER]
            await respond(client, history)

    trajectory, _ = await played(play, written(**arguments))
    assert len(trajectory.turns) == 2


def test_every_field_of_the_vendors_package_is_known():
    known = {*custom_tools.CUSTOM_FIELDS, *responses.CALLER_FIELDS}
    assert set(typing.get_type_hints(CustomToolParam)) <= known


def test_the_policy_reads_a_tool_with_one_text_and_the_grammar():
    (tool,) = read(tools=[{**TOOL, "format": GRAMMAR}]).tools
    assert tool["function"] == {
        "name": "apply_patch",
        "description": "Edit files.\n\nThe input follows this grammar (lark):\nstart: /.+/s",
        "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
    }
    (plain,) = read(tools=[{"type": "custom", "name": "say", "format": {"type": "text"}}]).tools
    assert plain["function"]["description"] == ""


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "apply_patch"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
    ],
)
def test_its_call_may_be_forced(choice):
    assert read(tools=[TOOL, SHELL], tool_choice=choice).form.calls == ("apply_patch",)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{**TOOL, "format": {"type": "json"}}]}, "tools.0.format.type"),
        ({"tools": [{**TOOL, "format": {"type": "grammar", "syntax": "lark"}}]}, "tools.0.format.definition"),
        ({"tools": [{"type": "custom"}]}, "tools.0.name"),
        ({"tools": [{**TOOL, "parameters": {}}]}, "tools.0.parameters"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"input": [USER, {"type": "custom_tool_call", "call_id": "1", "name": "say"}]}, "input.1.input"),
        ({"input": [USER, {"type": "custom_tool_call_output", "call_id": "1", "output": ""}]}, "input.1.call_id"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(fields, named):
    with pytest.raises(BadRequest) as refused:
        read(**fields)
    assert refused.value.field == named
