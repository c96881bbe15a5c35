"""Custom tools of OpenAI's APIs: Codex's ``apply_patch`` and others that take a text.

codex#16397, command-code#885, CLIProxyAPI#5753, workbuddy2api-intl#12, sub2api#3390, ds4#745, free-claude-code#859:
servers that refuse them, drop them, or answer with calls of functions, which Codex takes for a broken payload.
"""

import json
import typing

import openai
import pytest
from openai.types.chat.chat_completion_custom_tool_param import Custom
from openai.types.responses import CustomToolParam

from agentrl.gateway import DIALECTS, custom_tools, responses
from agentrl.gateway.dialect import BadRequest

CHAT, RESPONSES, _ = DIALECTS
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


CHAT_TOOL = {"type": "custom", "custom": {"name": "apply_patch", "description": "Edit files."}}
CHAT_SHELL = {"type": "function", "function": {key: value for key, value in SHELL.items() if key != "type"}}
BOTH = f"{written(input=PATCH)}\n{written('shell', a=1)}"


def read_chat(**fields):
    return CHAT.read({"model": "p", "messages": [USER], **fields}, {})


async def ask(client, messages, **fields):
    """Ask with both tools in Chat Completions."""
    return await client.chat.completions.create(model="p", messages=messages, tools=[CHAT_TOOL, CHAT_SHELL], **fields)


async def test_a_call_in_chat_completions_is_a_text_and_comes_back_as_it_was_sampled(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            history = [USER]
            for _ in range(2):
                (choice,) = (await ask(client, history)).choices
                call, other = choice.message.tool_calls
                assert (call.type, call.custom.name, call.custom.input) == ("custom", "apply_patch", PATCH)
                assert (other.type, other.function.arguments) == ("function", '{"a": 1}')
                assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
                results = [{"role": "tool", "tool_call_id": one.id, "content": "Done."} for one in (call, other)]
                history += [choice.message.model_dump(exclude_unset=True), *results]

    trajectory, script = await played(play, BOTH)
    assert (len(trajectory.turns), len(trajectory.sequences)) == (2, 1)
    script.check(trajectory)


async def test_a_stream_of_chat_completions_has_pieces_of_the_text(played):
    """openai-openapi#576 has the form of the pieces. The vendor's package reads it, but does not declare it, and its
    helper ``stream()`` cannot join them (openai-python#3505)."""

    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            deltas = [
                call.model_dump(exclude_unset=True)
                async for chunk in await ask(client, [USER], stream=True)
                for call in chunk.choices[0].delta.tool_calls or []
            ]
        first, *rest = [delta for delta in deltas if delta["index"] == 0]
        assert first == {
            "index": 0,
            "id": first["id"],
            "type": "custom",
            "custom": {"name": "apply_patch", "input": ""},
        }
        assert all(delta.keys() == {"index", "custom"} and delta["custom"].keys() == {"input"} for delta in rest)
        assert "".join(delta["custom"]["input"] for delta in rest) == PATCH
        assert len(rest) > 1
        assert "".join(delta["function"]["arguments"] for delta in deltas if delta["index"] == 1) == '{"a": 1}'

    await played(play, BOTH)


@pytest.mark.parametrize("arguments", [{}, {"input": 3}])
async def test_a_call_in_chat_completions_that_is_no_text_is_text_of_the_answer(played, arguments):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            message = (await ask(client, [USER])).choices[0].message
        assert (message.content, message.tool_calls) == (written(**arguments), None)

    await played(play, written(**arguments))


def test_every_field_of_chat_completions_is_known():
    assert set(typing.get_type_hints(Custom)) == set(custom_tools.CUSTOM_FIELDS) - {"type"}


def test_the_policy_reads_the_same_tool_in_both_apis():
    nested = {"type": "grammar", "grammar": {"syntax": GRAMMAR["syntax"], "definition": GRAMMAR["definition"]}}
    chat = read_chat(tools=[{"type": "custom", "custom": {**CHAT_TOOL["custom"], "format": nested}}])
    other = read(tools=[{**TOOL, "format": GRAMMAR}])
    assert (chat.tools, chat.text_tools) == (other.tools, other.text_tools)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "apply_patch"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CHAT_TOOL]}},
    ],
)
def test_its_call_may_be_forced_in_chat_completions(choice):
    assert read_chat(tools=[CHAT_TOOL, CHAT_SHELL], tool_choice=choice).form.calls == ("apply_patch",)


def answered(**custom):
    call = {"id": "1", "type": "custom", "custom": {"name": "apply_patch", **custom}}
    return [USER, {"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [TOOL]}, "tools.0.custom"),
        ({"tools": [{"type": "other"}]}, "tools.0.type"),
        ({"tools": [{"type": []}]}, "tools.0.type"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "parameters": {}}}]}, "tools.0.custom.parameters"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.custom.name"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar", "grammar": {}}}}]},
            "tools.0.custom.format.grammar.syntax",
        ),
        ({"tools": [CHAT_TOOL], "tool_choice": {"type": "custom", "custom": {"name": "b"}}}, "tool_choice"),
        ({"messages": answered()}, "messages.1.tool_calls.0.custom.input"),
        ({"messages": answered(input={})}, "messages.1.tool_calls.0.custom.input"),
    ],
)
def test_what_cannot_be_read_in_chat_completions_is_refused_by_name(fields, named):
    with pytest.raises(BadRequest) as refused:
        read_chat(**fields)
    assert refused.value.field == named
