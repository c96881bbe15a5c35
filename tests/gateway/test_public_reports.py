"""Requests and answers from public bug reports about other servers, in short, with what is right for them."""

import base64
import json
import typing

import aiohttp
import pytest
from anthropic.types import ToolParam
from anthropic.types.beta import message_create_params as anthropic_params
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import FunctionToolParam, response_create_params
from support.gateway_client import DIALECTS as CLIENTS
from support.gateway_client import TOOL, post

from agentrl.gateway import DIALECTS, anthropic_messages, chat_completions, responses
from agentrl.gateway.dialect import BadRequest, Reply, ReplyAnswer
from agentrl.gateway.fields import arguments
from agentrl.message import Message
from agentrl.rollout.budget import EpisodeLimits

CHAT, RESPONSES, ANTHROPIC = DIALECTS
USER = {"role": "user", "content": "one"}
HEADER = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch={};"


async def text_of(url, key, body):
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as answer,
    ):
        assert answer.status == 200
        return await answer.text()


def events_of(stream):
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in stream.split("\n\n")]
    return [(block.get("event"), block["data"]) for block in blocks if "data" in block]


def chat(*messages, **fields):
    return CHAT.read({"model": "p", "messages": [USER, *messages], **fields}, {})


def respond(**fields):
    return RESPONSES.read({"model": "p", "input": "one", **fields}, {})


def message(**fields):
    return ANTHROPIC.read({"model": "p", "max_tokens": 9, "messages": [USER], **fields}, {})


def called(text):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": text}}
    return {"role": "assistant", "tool_calls": [call]}


def test_every_field_of_the_vendors_packages_is_read_or_refused_for_a_reason():
    # claude-code and codex send new fields soon after they are published
    def names(kind):
        return set(typing.get_type_hints(kind)) - {"stream"}

    known = {*chat_completions.READ, *chat_completions.IGNORED}
    assert names(chat_params.CompletionCreateParamsBase) <= known
    assert names(response_create_params.ResponseCreateParamsBase) <= {*responses.READ, *responses.LABELS}
    assert names(FunctionToolParam) <= {*responses.TOOL_FIELDS, *responses.CALLER_FIELDS}
    known = {*anthropic_messages.READ, *anthropic_messages.IGNORED}
    assert names(anthropic_params.MessageCreateParamsBase) <= known
    message(tools=[dict.fromkeys(names(ToolParam)) | {"name": "add", "input_schema": TOOL}])


@pytest.mark.parametrize(
    ("read", "fields"),
    [
        (chat, {"prompt_cache_options": {"ttl": "30m"}}),
        (respond, {"prompt_cache_options": {"mode": "implicit"}}),
        (respond, {"reasoning": {"effort": "low", "context": "auto", "mode": "standard"}}),
        (respond, {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}),
        (
            respond,
            {
                "tools": [
                    {
                        "type": "function",
                        "name": "add",
                        "parameters": TOOL,
                        "strict": True,
                        "defer_loading": False,
                        "async": False,
                        "allowed_callers": ["direct", "programmatic"],
                        "output_schema": {"type": "object"},
                    }
                ]
            },
        ),
        (message, {"speed": "fast"}),
        (message, {"diagnostics": {"previous_message_id": None}}),
        (message, {"fallbacks": "default", "user_profile_id": "u", "workspace_id": "w"}),
        (message, {"output_config": {"effort": "low", "task_budget": {"type": "tokens", "total": 1000}}}),
    ],
)
def test_fields_without_an_effect_on_the_answer_are_accepted(read, fields):
    assert read(**fields).messages == read().messages


@pytest.mark.parametrize(
    ("read", "fields", "named"),
    [
        (chat, {"moderation": {"model": "m"}}, "moderation"),
        (respond, {"moderation": {"model": "m"}}, "moderation"),
        (respond, {"reasoning": {"context": 3}}, "reasoning.context"),
        (respond, {"background_options": {"completion_window": "2h"}}, "background_options"),
        (
            respond,
            {"tools": [{"type": "function", "name": "add", "allowed_callers": ["programmatic"]}]},
            "tools.0.allowed_callers",
        ),
        (respond, {"tools": [{"type": "function", "name": "add", "async": True}]}, "tools.0.async"),
        (message, {"compaction": {"type": "enabled"}}, "compaction"),
        (message, {"output_config": {"task_budget": 3}}, "output_config.task_budget"),
    ],
)
def test_fields_with_an_effect_are_refused_by_name(read, fields, named):
    with pytest.raises(BadRequest) as refused:
        read(**fields)
    assert refused.value.field == named


@pytest.mark.parametrize("text", [None, "", "null", " null ", "{}", {}])
def test_calls_without_arguments_come_back_in_many_forms(text):
    # vllm#43851, langroid#988, langchain#34242: null, or the text "null", for tools without parameters
    assert (
        chat(called(text), {"role": "tool", "tool_call_id": "1", "content": "3"}).messages[1].tool_calls[0].arguments
        == {}
    )


@pytest.mark.parametrize("text", ["3", "true", '"{}"', "1.5", "[1]", '{"a": '])
def test_arguments_that_are_no_object_are_refused(text):
    with pytest.raises(BadRequest) as refused:
        chat(called(text))
    assert refused.value.field == "messages.1.tool_calls.0.function.arguments"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=3))
def test_any_json_in_place_of_arguments_is_read_or_refused(value):
    for written in (value, json.dumps(value)):
        if written in (None, "") or (isinstance(written, str) and written.strip() == "null"):
            assert arguments(written, "a") == {}
        elif is_object(written):
            assert isinstance(arguments(written, "a"), dict)
        else:
            with pytest.raises(BadRequest):
                arguments(written, "a")


def is_object(value):
    """Return True for the JSON text of an object."""
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
def test_a_tool_that_returns_nothing_has_an_empty_result(content):
    # TQZHR/grok2api#41: null in messages of assistants and tools
    result = chat(called("{}"), {"role": "tool", "tool_call_id": "1", **content}).messages[-1]
    assert result == Message(role="tool", content="", tool_call_id="1", name="add")


def test_thinking_that_is_not_text_is_refused():
    with pytest.raises(BadRequest) as refused:
        chat({"role": "assistant", "content": "two", "reasoning": [{"type": "reasoning.text"}]})
    assert refused.value.field == "messages.1.reasoning"


@pytest.mark.parametrize(
    ("system", "read"),
    [
        ([{"type": "text", "text": HEADER.format("1")}, {"type": "text", "text": "Act."}], "Act."),
        (HEADER.format("1") + "\nAct.", "Act."),
        ([{"type": "text", "text": HEADER.format("1")}], None),
        (
            [{"type": "text", "text": "Never send x-anthropic-billing-header: a"}],
            "Never send x-anthropic-billing-header: a",
        ),
    ],
)
def test_the_billing_line_of_claude_code_is_left_out(system, read):
    assert [one.content for one in message(system=system).messages if one.role == "system"] == [read] * (
        read is not None
    )


async def test_turns_whose_billing_line_differs_are_one_conversation(played):
    # vllm#36829, sglang#21064, ollama#14918, claude-code#68900
    async def play(gateway, session):
        turns = [USER]
        for number in range(3):
            system = [{"type": "text", "text": HEADER.format(number)}, {"type": "text", "text": "Act."}]
            body = {"model": "p", "max_tokens": 50, "system": system, "messages": turns}
            status, reply = await post(gateway.url + "/v1/messages", session.key, body)
            assert status == 200
            turns += [{"role": "assistant", "content": reply["content"]}, USER]

    trajectory, _ = await played(play, "it is so")
    assert (len(trajectory.turns), len(trajectory.sequences)) == (3, 1)


@pytest.mark.parametrize("dialect", CLIENTS)
async def test_a_text_that_was_cut_within_a_pair_is_read_without_its_half(played, renderer, dialect):
    # claude-code#66932, mksglu/context-mode#659, DeepSeek-Reasonix#1976: agents in JavaScript cut long results
    route, write, *_ = CLIENTS[dialect]

    async def play(gateway, session):
        body = json.dumps(write([{"role": "user", "text": "CUT"}], False))
        data = body.replace("CUT", r"whole \ud83d\ude00 half \ud83d quoted \\ud83d").encode()
        headers = {"Authorization": f"Bearer {session.key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(gateway.url + route, data=data, headers=headers) as answer,
        ):
            assert answer.status == 200

    _, script = await played(play, "it is so")
    sent = renderer.encoder.decode(list(script.requests[0].prompt_ids))
    assert "whole \N{GRINNING FACE} half \ufffd quoted \\ud83d" in sent


@pytest.mark.parametrize("dialect", CLIENTS)
async def test_streams_have_no_line_breaks_within_events_whatever_a_client_takes_for_one(played, dialect):
    # openai-python#1230, dify#39008, evalscope#1642, langgraph#2593: str.splitlines() and httpx's lines
    route, write, _, read_stream = CLIENTS[dialect]
    said = "one\u2028two\u2029three\x85four"

    async def play(gateway, session):
        body = write([{"role": "user", "text": "one"}], False) | {"stream": True}
        headers = {"Authorization": f"Bearer {session.key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(gateway.url + route, json=body, headers=headers) as answer,
        ):
            assert (answer.content_type, answer.charset) == ("text/event-stream", "utf-8")
            stream = await answer.text()
        assert stream.splitlines() == stream.split("\n")[:-1]
        assert read_stream(events_of(stream))["text"] == said

    await played(play, said)


@pytest.mark.parametrize("ask", ["of tools", "of text"])
async def test_items_of_stored_replies_may_be_referred_to(played, ask):
    # Vercel's AI SDK (@ai-sdk/openai) sends references to items instead of the items of replies that are stored
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    answer = f"<think>\nhm\n</think>\n\nI add.\n{call}" if ask == "of tools" else "it is so"

    async def play(gateway, session):
        url, history = gateway.url + "/v1/responses", [USER]
        body = {"model": "p", "tools": [{"type": "function", "name": "add", "parameters": TOOL}]}
        for _ in range(2):
            status, reply = await post(url, session.key, body | {"input": history})
            assert status == 200
            history += [{"type": "item_reference", "id": item["id"]} for item in reply["output"]]
            calls = [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
            results = [{"type": "function_call_output", "call_id": call_id, "output": "3"} for call_id in calls]
            history += results or [USER]
        assert (await post(url, session.key, body | {"input": history}))[0] == 200
        unknown = [USER, {"type": "item_reference", "id": "msg_lost"}]
        assert (await post(url, session.key, body | {"input": unknown}))[0] == 404

    trajectory, _ = await played(play, answer)
    assert (len(trajectory.turns), len(trajectory.sequences)) == (3, 1)


@pytest.mark.parametrize(
    ("fields", "reply"),
    [
        ({"previous_response_id": "resp_1"}, "resp_1"),
        ({"input": [USER, {"type": "item_reference", "id": "fc_7_0"}]}, "resp_7"),
        ({"input": [USER, {"type": "item_reference", "id": "item"}]}, None),
        ({"input": [3, {"type": "item_reference"}]}, None),
        ({"input": "one"}, None),
        ({}, None),
    ],
)
def test_a_request_tells_which_session_stores_the_reply_that_it_refers_to(fields, reply):
    assert responses.reply_referred_to(fields) == reply


def test_a_text_block_has_no_citations_rather_than_null():
    # @ai-sdk/anthropic refuses null there
    reply = Reply(id="1", created=0, model="p", answers=[ReplyAnswer(text="so", finish="stop")])
    assert ANTHROPIC.write(message(), reply)["content"] == [{"type": "text", "text": "so"}]


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/messages", "/messages", "/v1/v1/responses"])
async def test_a_wrong_base_url_is_explained(played, path):
    # langchain#31325, aider-desk#854, streamystats#491
    async def play(gateway, session):
        status, said = await post(gateway.url + path, session.key, {})
        assert (status, "The base URL ends with /v1 in OpenAI's packages" in said["error"]["message"]) == (404, True)
        assert (await post(gateway.url + "/v1/chat/completions", session.key, {"model": "p", "messages": [USER]}))[
            0
        ] == 200

    await played(play, "it is so")


BAD_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>'
HUGE_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1' + "0" * 400 + "]}}\n</tool_call>"
THOUGHTS = {
    # jundot/omlx#2606, EleutherAI/lm-evaluation-harness#3382: thinking that is cut off is no answer
    "cut off": ("<think>\nIs it 42", ""),
    # waybarrios/vllm-mlx#161: thinking before a call
    "before an unreadable call": (f"<think>\nIs it 42?\n</think>\n\n{BAD_CALL}", BAD_CALL),
    "before a call that cannot be sent": (f"<think>\nIs it 42?\n</think>\n\n{HUGE_CALL}", HUGE_CALL),
    "none before a call that cannot be sent": (HUGE_CALL, HUGE_CALL),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", CLIENTS)
@pytest.mark.parametrize("name", THOUGHTS)
async def test_thinking_never_becomes_text_and_what_is_sent_can_come_back(played, dialect, name, stream):
    answer, expected = THOUGHTS[name]
    route, write, read, read_stream = CLIENTS[dialect]

    async def play(gateway, session):
        history = [{"role": "user", "text": "one"}]
        body = write(history, True) | {"stream": stream} | ({"max_tokens": 1000} if dialect == "anthropic" else {})
        got = await text_of(gateway.url + route, session.key, body)
        reply = read_stream(events_of(got)) if stream else read(json.loads(got))
        assert (reply["text"], reply["calls"]) == (expected, [])
        history += [reply, {"role": "user", "text": "go on"}]
        status, _ = await post(gateway.url + route, session.key, write(history, True))
        assert status == 200

    trajectory, _ = await played(play, answer, "it is so", limits=EpisodeLimits(max_answer_tokens=1000))
    assert len(trajectory.turns) == 2


@pytest.mark.parametrize("number", [2**53 + 1, 1234567890123456789, 10**60])
async def test_large_numbers_that_javascript_rounds_do_not_fork_a_conversation(played, number):
    # claude-code#78762, oceanbase/powercontext#1100: ids of 64 bits, which JavaScript agents send back rounded
    async def play(gateway, session):
        body = {"model": "p", "max_tokens": 90, "messages": [USER], "tools": [{"name": "add", "input_schema": TOOL}]}
        _, reply = await post(gateway.url + "/v1/messages", session.key, body)
        (call,) = reply["content"]
        call["input"]["a"] = float(call["input"]["a"])
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "3"}
        turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        assert (await post(gateway.url + "/v1/messages", session.key, body | {"messages": turns}))[0] == 200

    call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>'
    trajectory, _ = await played(play, call, "it is so")
    assert len(trajectory.sequences) == 1


@pytest.mark.parametrize("dialect", CLIENTS)
async def test_attempts_with_equal_actions_continue_their_own_answers(played, renderer, dialect):
    # an agent that tries a question several times in one session gets the same results for the same calls
    route, write, read, _ = CLIENTS[dialect]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    async def play(gateway, session):
        for _ in range(3):
            history = [{"role": "user", "text": "one"}]
            _, reply = await post(gateway.url + route, session.key, write(history, True))
            answer = read(reply)
            history += [answer, {"role": "tool", "text": "3", "call_id": answer["calls"][0][0]}]
            assert (await post(gateway.url + route, session.key, write(history, True)))[0] == 200

    answers = [answer for number in "123" for answer in (f"<think>\ntry {number}\n</think>\n\n{call}", "it is so")]
    trajectory, script = await played(play, *answers)
    assert [len(sequence.turns) for sequence in trajectory.sequences] == [2, 2, 2]
    prompts = [renderer.encoder.decode(list(request.prompt_ids)) for request in script.requests[1::2]]
    assert [f"try {number}" in prompt for number, prompt in zip("123", prompts, strict=True)] == [True] * 3


def test_an_image_whose_base64_is_broken_into_lines_is_read():
    # omnimind-ai/OmniBot#360: Android writes base64 in lines
    wrapped = base64.encodebytes(bytes(range(256))).decode()
    assert wrapped.count("\n") > 2
    url = {"url": f"data:image/png;base64,{wrapped}"}
    (part,) = chat({"role": "user", "content": [{"type": "image_url", "image_url": url}]}).messages[1].content
    assert part.data == bytes(range(256))
