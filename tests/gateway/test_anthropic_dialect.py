"""Anthropic's own client in front of the gateway, and what the dialect refuses."""

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.gateway.anthropic_messages import AnthropicMessages
from agentrl.gateway.dialect import BadRequest
from agentrl.message import Message, TextPart

ADD = {
    "name": "add",
    "description": "Add.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
DIALECT = AnthropicMessages()
PIXEL = "iVBORw0KGgo="


def client_of(gateway, session):
    return anthropic.AsyncAnthropic(base_url=gateway.url_of(session), api_key=session.key, max_retries=0)


def asked(**fields):
    return {"model": "policy", "max_tokens": 64, "messages": [{"role": "user", "content": "one"}], **fields}


async def test_a_tool_runner_goes_on_with_whole_histories_where_no_thread_is_held(played):
    @anthropic.beta_async_tool
    async def add(a: int) -> str:
        """Add."""
        return "3"

    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            last = await client.beta.messages.tool_runner(**asked(tools=[add])).until_done()
        assert last.content[0].text == "three"
        assert session.refusal is None

    trajectory, script = await played(play, CALL, "three")
    assert len(trajectory.sequences) == 1
    script.check(trajectory)


async def test_a_thread_that_cannot_do_without_is_refused_by_name(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            with pytest.raises(anthropic.BadRequestError, match="thread: histories are not stored here"):
                await client.beta.messages.create(**asked(thread={"type": "create"}, betas=["any"]))
            await client.messages.create(**asked())

    await played(play, "one")


async def test_tools_are_called_and_their_results_come_back(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            first = await client.messages.create(**asked(tools=[ADD], system="Add."))
            assert (first.stop_reason, first.content[-1].type, first.content[-1].input) == (
                "tool_use",
                "tool_use",
                {"a": 1},
            )
            assert first.usage.input_tokens + first.usage.cache_read_input_tokens > 0
            assert first.usage.output_tokens > 0
            result = {
                "type": "tool_result",
                "tool_use_id": first.content[-1].id,
                "content": [{"type": "text", "text": "3"}],
            }
            messages = [
                *asked()["messages"],
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
            ]
            second = await client.messages.create(**asked(tools=[ADD], system="Add.", messages=messages))
            assert (second.stop_reason, second.content[0].text) == ("end_turn", "three")

    trajectory, script = await played(play, CALL, "three")
    assert len(trajectory.sequences) == 1
    script.check(trajectory)


async def test_thinking_goes_out_as_a_block_and_comes_back_with_or_without_it(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            messages = asked()["messages"]
            for content in (lambda m: m.content, lambda m: m.content[1:], lambda m: m.content[1].text):
                reply = await client.messages.create(**asked(messages=messages))
                assert [block.type for block in reply.content] == ["thinking", "text"]
                assert reply.content[0].thinking == "hm"
                messages = [
                    *messages,
                    {"role": "assistant", "content": content(reply)},
                    {"role": "user", "content": "go on"},
                ]

    trajectory, script = await played(play, "<think>hm</think>it is so")
    assert len(trajectory.sequences) == 1
    script.check(trajectory)


async def test_a_stream_is_put_together_by_the_vendors_client(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            async with client.messages.stream(**asked(tools=[ADD])) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert text == "first"
            assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
            assert final.content[0].signature
            assert final.content[-1].input == {"a": 1}
            assert final.usage.output_tokens > 0

    trajectory, script = await played(play, f"<think>hm</think>first\n{CALL}")
    script.check(trajectory)


async def test_a_stop_sequence_is_named(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            reply = await client.messages.create(**asked(stop_sequences=["so", "is"]))
            assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == ("stop_sequence", "is", "it ")

    trajectory, script = await played(play, "it is so")
    script.check(trajectory)


async def test_tokens_are_counted_as_the_engine_gets_them(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            body = asked(tools=[ADD], system="Add.")
            del body["max_tokens"]
            counted = await client.messages.count_tokens(**body)
            await client.messages.create(**asked(tools=[ADD], system="Add."))
            found.append(counted.input_tokens)

    found = []
    _, script = await played(play, "it is so")
    assert found == [len(script.requests[0].prompt_ids)]


async def test_errors_are_of_the_vendors_types(played):
    async def play(gateway, session):
        async with client_of(gateway, session) as client:
            with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
                await client.messages.create(**asked(tools=[ADD], tool_choice={"type": "any"}))
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="sk-other", max_retries=0) as other:
            with pytest.raises(anthropic.AuthenticationError):
                await other.messages.create(**asked())

    await played(play, "it is so")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "The"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
            "messages.0.content.0.source.type",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "subtract"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": "much"}, "thinking"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"stop_sequences": [3]}, "stop_sequences"),
        ({"temperature": 1.5}, "temperature"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"guided": True}, "guided"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields, named):
    with pytest.raises(BadRequest) as refused:
        DIALECT.read(asked(**fields), {})
    assert refused.value.field == named


NOTES = {"type": "text", "media_type": "text/plain", "data": "The fern is on shelf 3."}
BLOCKS = [{"type": "text", "text": "The fern"}, {"type": "text", "text": "is on shelf 3."}]


def read_blocks(*blocks):
    """Read the content of one user turn."""
    (message,) = DIALECT.read(asked(messages=[{"role": "user", "content": list(blocks)}]), {}).messages
    return message.content


@pytest.mark.parametrize(
    ("block", "read"),
    [
        ({"source": NOTES}, "The fern is on shelf 3."),
        ({"source": NOTES, "title": None, "citations": {"enabled": False}}, "The fern is on shelf 3."),
        ({"source": NOTES, "title": "Shelves", "context": "Of May."}, "Shelves\nOf May.\nThe fern is on shelf 3."),
        ({"source": {"type": "content", "content": BLOCKS}}, "The fern\nis on shelf 3."),
        ({"source": {"type": "content", "content": "The fern"}, "title": "Shelves"}, "Shelves\nThe fern"),
    ],
)
@pytest.mark.parametrize("place", ["turn", "result"])
def test_documents_that_are_text_are_read_as_text(block, read, place):
    document, question = {"type": "document", **block}, {"type": "text", "text": "Where is it?"}
    if place == "turn":
        assert read_blocks(document, question) == f"{read}\nWhere is it?"
        return
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "read", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [document]}
    turns = [*asked()["messages"], call, {"role": "user", "content": [result, question]}]
    assert [message.content for message in DIALECT.read(asked(messages=turns), {}).messages[2:]] == [
        read,
        "Where is it?",
    ]


def test_a_document_may_contain_images():
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    label, text, image = read_blocks(
        {"type": "document", "title": "Shelves", "source": {"type": "content", "content": [BLOCKS[0], picture]}}
    )
    assert (label.text, text.text, image.media_type) == ("Shelves", "The fern", "image/png")


def test_search_results_are_read_as_text():
    found = {"type": "search_result", "title": "Shelves", "source": "https://example.org/shelves", "content": BLOCKS}
    assert read_blocks(found) == "Shelves\nhttps://example.org/shelves\nThe fern\nis on shelf 3."


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}


@pytest.mark.parametrize(
    ("block", "field", "why"),
    [
        ({"source": PDF}, "source.type", "the policy cannot read 'application/pdf': send the document's text"),
        ({"source": {"type": "url", "url": "https://example.org/a.pdf"}}, "source.type", "URLs are not fetched"),
        ({"source": {"type": "file", "file_id": "f"}}, "source.type", "files are not stored here"),
        ({"source": {"type": "scroll"}}, "source.type", "got 'scroll'"),
        ({"source": {"type": "content", "content": [{"type": "audio"}]}}, "source.content.0.type", "got 'audio'"),
        ({"source": {"type": "text"}}, "source.data", "it is missing"),
        ({}, "source", "it is missing"),
        ({"source": NOTES, "citations": {"enabled": True}}, "citations", "the policy does not cite"),
    ],
)
def test_other_documents_are_refused_with_the_reason(block, field, why):
    with pytest.raises(BadRequest, match=why) as refused:
        read_blocks({"type": "document", **block})
    assert refused.value.field == f"messages.0.content.0.{field}"


def test_turns_become_messages():
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image", "source": source}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "no"},
            ],
        },
    ]
    look, call, result, question = DIALECT.read(asked(messages=turns), {}).messages
    assert look.content[0] == TextPart(text="Look")
    assert look.content[1].media_type == "image/png"
    assert (call.tool_calls[0].name, call.tool_calls[0].arguments, call.reasoning) == ("add", {"a": 1}, None)
    assert result == Message(role="tool", content="Error: no", tool_call_id="t1", name="add")
    assert question == Message(role="user", content="and?")


EMPTY = {"type": "text", "text": ""}
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}


def test_a_failed_call_is_named_an_error_even_with_an_image():
    turns = [
        asked()["messages"][0],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [IMAGE_BLOCK]}],
        },
    ]
    result = DIALECT.read(asked(messages=turns), {}).messages[-1]
    assert result.content[0] == TextPart(text="Error:")
    assert result.content[1].media_type == "image/png"


def test_what_claude_code_sends_to_other_servers_is_read():
    # claude-code#23390: empty blocks; vllm#44000: system turns; llm-scaler#341: thinking without a signature
    turns = [
        {"role": "user", "content": [EMPTY, {"type": "text", "text": "one"}]},
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, EMPTY]},
        {"role": "user", "content": "two"},
    ]
    fields = {"system": [{"type": "text", "text": "Act.", "cache_control": {"type": "ephemeral"}}, EMPTY]}
    tools = [{**ADD, "defer_loading": True, "cache_control": {"type": "ephemeral"}}]
    assert DIALECT.read(asked(messages=turns, tools=tools, **fields), {}).messages == [
        Message(role="system", content="Act."),
        Message(role="user", content="one"),
        Message(role="system", content="Be brief."),
        Message(role="assistant", content="", reasoning="hm"),
        Message(role="user", content="two"),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ("model", "messages", "max_tokens", "system", "tools", "tool_choice", "stop_sequences", "stream", "top_k")


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_json_is_read_or_refused(body):
    status = 200
    try:
        DIALECT.read({**asked(), **body}, {})
    except BadRequest as refused:
        status = refused.status
    assert status in (200, 400, 404)
