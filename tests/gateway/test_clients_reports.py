"""What clients send and expect, from public bug reports about other servers: read as meant, or refused by name."""

import json

import aiohttp
import pytest
from support.gateway_client import TOOL, post

from agentrl.gateway import DIALECTS
from agentrl.gateway.dialect import BadRequest
from agentrl.message import Message, TextPart

CHAT, RESPONSES, ANTHROPIC = DIALECTS
USER = {"role": "user", "content": "one"}
ADD = {"type": "function", "function": {"name": "add", "parameters": TOOL}}
FLAT = {"type": "function", "name": "add", "parameters": TOOL}
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def chat(*messages, **fields):
    return CHAT.read({"model": "p", "messages": [USER, *messages], **fields}, {})


def respond(*items, **fields):
    return RESPONSES.read({"model": "p", "input": [USER, *items], **fields}, {})


def message(*turns, **fields):
    return ANTHROPIC.read({"model": "p", "max_tokens": 9, "messages": [USER, *turns], **fields}, {})


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": {"effort": "high"}},  # cline#14351
        {"reasoning": {"exclude": True}},  # cline#11086
        {"reasoning": {"enabled": False}},
        {"thinking": {"type": "disabled"}},
        {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False}},  # pi#2020, langchain-qwq#47
        {"include_reasoning": True},  # BerriAI/litellm#8130
        {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.0},  # SkyRL#1885
        {"top_k": -1},
        {"max_tokens": 32_000},  # colibri#260
        # litellm and mini-swe-agent for OpenRouter; openai-api-rs#138
        {"usage": {"include": True}, "provider": {"order": ["DeepSeek"]}, "models": ["a"], "route": "fallback"},
        {"skip_special_tokens": True, "ignore_eos": False, "min_tokens": 0, "separate_reasoning": True},  # AReaL#738
        {"tools": [{"type": "function", "function": {**ADD["function"], "strict": True}}]},  # pydantic-ai#3062
    ],
)
def test_settings_of_other_services_are_accepted_without_an_effect(fields):
    read = chat(**fields)
    assert read.messages == chat().messages
    followed = {"temperature", "top_p", "seed"}
    assert not followed & set(read.settings)


async def test_settings_without_an_effect_are_named_once_in_the_log(played, caplog):
    async def play(gateway, session):
        for _ in range(2):
            body = {"model": "p", "messages": [USER], "enable_thinking": False, "top_k": 20}
            assert (await post(gateway.url + CHAT.path, session.key, body))[0] == 200

    await played(play, "it is so")
    said = [record.getMessage() for record in caplog.records if "a client requests" in record.getMessage()]
    assert said == ["a client requests top_k=20.0, enable_thinking=false: ignored, because the run sets them"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"chat_template_kwargs": {"custom_prompt": "x"}}, "chat_template_kwargs.custom_prompt"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),  # SkyRL#1885
        *(({name: value}, name) for name, value in (("skip_special_tokens", False), ("ignore_eos", True))),  # AReaL#738
        ({"transforms": ["middle-out"]}, "transforms"),  # openai-agents-js#667
        ({"truncate_prompt_tokens": 1792}, "truncate_prompt_tokens"),  # vllm#6890
        ({"guided_choice": ["a", "b"]}, "guided_choice"),  # vllm#4597
        ({"return_token_ids": True}, "return_token_ids"),  # agent-lightning#262, strands-agents/harness-sdk#1375
        ({"max_tokens": 0}, "max_tokens"),  # EleutherAI/lm-evaluation-harness#1903
        ({"max_tokens": -1, "stream": True}, "max_tokens"),  # BerriAI/litellm#18689
        ({"messages": [{**USER, "name": "the user"}]}, "messages.0.name"),  # autogen#3017
        (
            {"messages": [{**USER, "content": [[{"type": "text", "text": "one"}]]}]},
            "messages.0.content.0",
        ),  # ApeRAG#1396
        ({"tools": [ADD], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
    ],
)
def test_settings_with_an_effect_are_refused_by_name(fields, named):
    with pytest.raises(BadRequest) as refused:
        chat(**fields)
    assert refused.value.field == named


@pytest.mark.parametrize(
    "row",
    [
        {"role": "user", "content": "one", "id": 1947269257, "opts": {"visible": False}},  # vllm#10463
        {"role": "user", "content": "one", "sent_from": "role_play1", "send_to": ["all"]},  # ms-agent#574
        {"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},  # BerriAI/litellm#11820
    ],
)
def test_messages_with_more_keys_mean_the_same(row):
    assert chat(messages=[row]).messages == [Message(role="user", content="one")]


@pytest.mark.parametrize(
    ("row", "read"),
    [
        # langchain#34751: parts of the Responses API
        (
            {"content": [{"type": "output_text", "text": "two", "annotations": []}]},
            Message(role="assistant", content="two"),
        ),
        ({"content": ""}, Message(role="assistant", content="")),  # autogen#1521
        ({"content": None, "refusal": "No."}, Message(role="assistant", content="No.")),
        ({"content": "two", "refusal": None}, Message(role="assistant", content="two")),
        # langchainjs#11049, openwiki#231, SREGym#787: libraries send thinking back as parts of the answer
        (
            {"content": [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "two"}]},
            Message(role="assistant", content="two", reasoning="hm"),
        ),
        (
            {"content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "two"}]},
            Message(role="assistant", content="two", reasoning="hm"),
        ),
        (
            {"content": [{"type": "reasoning_content", "reasoning_content": {"text": "hm", "signature": "x"}}]},
            Message(role="assistant", content="", reasoning="hm"),
        ),
        # langchainjs#10421
        (
            {"content": [{"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}]},
            Message(role="assistant", content="", reasoning="hm"),
        ),
        ({"content": [{"type": "reasoning", "summary": []}]}, Message(role="assistant", content="", reasoning=None)),
        (
            {"reasoning_content": "so", "content": [{"type": "thinking", "thinking": "hm"}]},
            Message(role="assistant", content="", reasoning="so"),
        ),
    ],
)
def test_answers_in_the_forms_of_other_interfaces_are_read(row, read):
    assert chat({"role": "assistant", **row}).messages[1] == read


@pytest.mark.parametrize("part", [{"type": "thinking", "thinking": 3}, {"type": "reasoning", "summary": [3]}])
def test_thinking_in_a_part_must_be_text(part):
    with pytest.raises(BadRequest) as refused:
        chat({"role": "assistant", "content": [part]})
    assert refused.value.field == f"messages.1.content.0.{part['type']}"


async def test_thinking_that_comes_back_as_a_part_continues_the_recorded_conversation(played):
    async def play(gateway, session):
        body = {"model": "p", "messages": [USER]}
        _, reply = await post(gateway.url + CHAT.path, session.key, body)
        answer = reply["choices"][0]["message"]
        parts = [
            {"type": "reasoning", "reasoning": answer["reasoning_content"]},
            {"type": "output_text", "text": answer["content"]},
        ]
        history = [USER, {"role": "assistant", "content": parts}, USER]
        assert (await post(gateway.url + CHAT.path, session.key, body | {"messages": history}))[0] == 200

    trajectory, _ = await played(play, "<think>\nhm\n</think>\n\nit is so")
    assert (len(trajectory.turns), len(trajectory.sequences)) == (2, 1)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
        {"type": "image_url", "image_url": PIXEL},  # langchain#22460
        {"type": "input_image", "image_url": PIXEL},  # langchain4j#4551
    ],
)
def test_images_are_read_in_each_form(part):
    (image,) = chat({"role": "user", "content": [part]}).messages[1].content
    assert image.media_type == "image/png"


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ({"type": "function", "function": {"name": "add"}}, ("add",)),
        ({"type": "function", "name": "add"}, ("add",)),  # BerriAI/litellm#10069, openai-python#2772
        ({"function": {"name": "add"}}, ("add",)),
        ({"type": "required"}, ("add",)),
        ({"type": "any"}, ("add",)),
        ({"type": "auto"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_choices_of_tools_are_read_in_both_notations(choice, calls):
    for read in (chat(tools=[ADD], tool_choice=choice), respond(tools=[FLAT], tool_choice=choice)):
        assert (None if read.form is None else read.form.calls) == calls
        assert len(read.tools) == 1


def test_a_choice_of_no_tool_hides_the_tools_in_both_notations():
    for choice in ("none", {"type": "none"}):
        assert [*chat(tools=[ADD], tool_choice=choice).tools, *respond(tools=[FLAT], tool_choice=choice).tools] == []


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        ({"type": "json_object", "schema": TOOL}, TOOL),  # llama-cpp-python#1122, llama-cpp-python#1677
        ({"type": "json_object", "schema": None}, {"type": "object"}),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": TOOL}}, TOOL),
    ],
)
def test_a_schema_is_read_wherever_it_is_written(wanted, schema):
    assert chat(response_format=wanted).form.schema == schema


@pytest.mark.parametrize("call", [{"input": {}}, {"input": None}, {}, {"input": ""}])
def test_a_call_without_arguments_may_lack_its_input(call):
    # mastra#11376, charmbracelet/fantasy#219, voocel/litellm#8; langchain#34286: null in a key that is not known
    block = {"type": "tool_use", "id": "t1", "name": "now", "caller": None, **call}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "noon"}
    read = message({"role": "assistant", "content": [block]}, {"role": "user", "content": [result]})
    assert read.messages[1].tool_calls[0].arguments == {}


@pytest.mark.parametrize(
    ("content", "read"),
    [
        # anthropics/claude-code#30912, cli2api#152, copilot-api#162: the search for tools of Claude Code
        ([{"type": "tool_reference", "tool_name": "TaskStop"}], "Tool: TaskStop"),
        ([{"type": "text", "text": ""}, {"type": "text", "text": "two"}], "two"),  # stdapi.ai#24
        ([{"type": "text", "text": ""}], ""),
        ([], ""),
    ],
)
def test_results_of_claude_codes_tools_are_read(content, read):
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    assert message(call, {"role": "user", "content": [result]}).messages[-1].content == read


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        ("system", "tool_addition"),  # teamclaude#451
        ("assistant", "server_tool_use"),  # anthropics/claude-code#64158
        ("user", "container_upload"),
    ],
)
def test_blocks_of_features_that_the_policy_lacks_are_refused_by_name(role, kind):
    with pytest.raises(BadRequest, match=f"got '{kind}'") as refused:
        message({"role": role, "content": [{"type": kind}]}, USER)
    assert (refused.value.field, refused.value.code) == ("messages.1.content.0.type", "unsupported")


def test_items_of_several_turns_are_read_in_the_forms_of_codex_and_of_the_shorthand():
    # vllm#33089, vllm#45273, DeepSeek-v4-Flash-DSpark-2x-DGX-Spark#138
    items = [
        {"role": "system", "content": "Act."},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None, "status": None},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "3"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "three"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Done.", "logprobs": None}],
        },
    ]
    read = [(one.role, one.content, len(one.tool_calls)) for one in respond(*items).messages[1:]]
    assert read == [
        ("system", "Act.", 0),
        ("user", "hello", 0),
        ("assistant", "", 1),
        ("tool", "3", 0),
        ("assistant", "three", 0),
        ("assistant", "Done.", 0),
    ]


@pytest.mark.parametrize("output", [{}, {"output": None}, {"output": []}, {"output": ""}])
def test_a_function_that_returns_nothing_has_an_empty_output(output):
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    assert respond(call, {"type": "function_call_output", "call_id": "c1", **output}).messages[-1].content == ""


async def test_a_request_that_only_warms_the_cache_does_not_fail_the_episode(played):
    async def play(gateway, session):
        body = {"model": "p", "max_tokens": 0, "messages": [USER]}
        status, refusal = await post(gateway.url + ANTHROPIC.path, session.key, body)
        assert (status, "the engine caches prompts by itself" in refusal["error"]["message"]) == (400, True)
        assert session.refusal is None
        assert (await post(gateway.url + ANTHROPIC.path, session.key, body | {"max_tokens": 9}))[0] == 200

    await played(play, "it is so")


@pytest.mark.parametrize("answer", ["it is so", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'])
async def test_every_chunk_names_its_finish_reason_and_the_last_has_nothing_else(played, answer):
    # liteLLM-proxy#19, vllm#19662, sglang#3912, ollama#4357, vllm#36944, BerriAI/litellm#36768
    async def play(gateway, session):
        body = {"model": "p", "messages": [USER], "tools": [ADD], "stream": True}
        headers = {"Authorization": f"Bearer {session.key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(gateway.url + CHAT.path, json=body, headers=headers) as got,
        ):
            lines = [line.removeprefix("data: ") for line in (await got.text()).split("\n\n") if line]
        *chunks, done = [line if line == "[DONE]" else json.loads(line) for line in lines]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert done == "[DONE]"
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert (choices[-1]["finish_reason"], choices[-1]["delta"]) == (
            "tool_calls" if "call" in answer else "stop",
            {},
        )

    await played(play, answer)


@pytest.mark.parametrize("answer", ["it is so", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'])
@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}])
async def test_a_stream_begins_with_the_tokens_of_the_prompt(played, choice, answer):
    # CLIProxyAPI#1700, Antigravity-Manager#2028, free-claude-code#43: Claude Code shows them, and fails without them
    async def play(gateway, session):
        tool = {"name": "add", "input_schema": TOOL}
        body = {"model": "p", "max_tokens": 90, "messages": [USER], "tools": [tool], "tool_choice": choice}
        headers = {"Authorization": f"Bearer {session.key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(gateway.url + ANTHROPIC.path, json=body | {"stream": True}, headers=headers) as got,
        ):
            blocks = [
                dict(line.split(": ", 1) for line in block.splitlines()) for block in (await got.text()).split("\n\n")
            ]
        events = [json.loads(block["data"]) for block in blocks if block]
        assert [block["event"] for block in blocks if block] == [event["type"] for event in events]
        usages = [event["message"]["usage"] for event in events if event["type"] == "message_start"]
        usages += [event["usage"] for event in events if event["type"] == "message_delta"]
        begin, end = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in usages]
        assert 0 < begin == end

    answers = (
        [answer]
        if choice["type"] == "auto"
        else [answer, '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>']
    )
    await played(play, *answers, trains=False)


def test_a_result_may_follow_a_call_that_the_client_did_not_send():
    # crewAI#1620
    read = chat({"role": "tool", "tool_call_id": "1", "name": "add", "content": [{"type": "text", "text": "3"}]})
    assert read.messages[1] == Message(role="tool", content="3", tool_call_id="1", name="add")


def test_a_message_may_mix_texts_and_images():
    parts = [{"type": "input_text", "text": "Look"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    assert chat({"role": "user", "content": parts}).messages[1].content[0] == TextPart(text="Look")
