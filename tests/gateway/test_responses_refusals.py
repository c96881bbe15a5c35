"""Requests that the Responses dialect refuses, with the name of the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.responses_items import (
    CALLS,
    DIALECT,
    TEXT,
    WEATHER,
    assistant,
    call_item,
    read,
    reply,
    result_item,
    said,
    thought,
)

from agentrl.gateway.dialect import BadRequest
from agentrl.gateway.responses import READ
from agentrl.message import user


def refusal(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    return caught.value


IMAGE = {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "auto"}
INLINE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
REFUSED = [
    ("model", {"model": None}),
    ("input", {"input": None}),
    ("input", {"input": []}),
    ("input", {"input": 3}),
    ("input.0", {"input": ["Hi"]}),
    ("input.1.role", {"input": [said("a"), {"role": "tool", "content": "Hi"}]}),
    ("input.0.content", {"input": [{"role": "user"}]}),
    ("input.0.content.0", {"input": [{"role": "user", "content": ["Hi"]}]}),
    ("input.0.content.0.type", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}),
    ("input.0.content.0.text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
    ("input.0.content.0.image_url", {"input": [{"role": "user", "content": [IMAGE]}]}),
    ("input.0.content.0.image_url", {"input": [{"role": "user", "content": [{**IMAGE, "image_url": None}]}]}),
    ("input.0.content", {"input": [{"role": "assistant", "content": [INLINE]}]}),
    ("input.0.content", {"input": [{"role": "developer", "content": [INLINE]}]}),
    # vllm#55974: an item that the SDK's types allow; vllm#55495: arguments that another server cut
    ("input.0.type", {"input": [{"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "server_label": "s"}]}),
    ("input.0.arguments", {"input": [{**call_item("a"), "arguments": '{"cmd": "timeout 7'}]}),
    ("input.1.output", {"input": [call_item("a"), result_item("a", 3)]}),
    ("input.0.call_id", {"input": [result_item("lost")]}),
    ("input.0.call_id", {"input": [{**call_item("a"), "call_id": None}]}),
    ("input.0.name", {"input": [{**call_item("a"), "name": None}]}),
    ("input.0.arguments", {"input": [{**call_item("a"), "arguments": "{"}]}),
    ("input.0.arguments", {"input": [{**call_item("a"), "arguments": "[1]"}]}),
    ("input.0.summary", {"input": [{"type": "reasoning", "summary": "Hm."}]}),
    ("input.0.content.0.text", {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]}),
    ("input.0.id", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("input.0.id", {"input": [{"type": "item_reference", "id": "fc_1_0"}]}),
    ("input.0.id", {"input": [{"type": "item_reference", "id": "item"}]}),
    ("input.0.id", {"input": [{"id": "msg_1"}]}),
    ("input.0.type", {"input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]}),
    ("instructions", {"instructions": ["Be kind."]}),
    ("previous_response_id", {"previous_response_id": "resp_lost"}),
    ("conversation", {"conversation": "conv_1"}),
    ("tools", {"tools": WEATHER}),
    ("tools.1.type", {"tools": [WEATHER, {"type": "web_search"}]}),
    ("tools.0.type", {"tools": [{"name": "weather"}]}),
    ("tools.0.name", {"tools": [{**WEATHER, "name": None}]}),
    ("tools.0.parameters", {"tools": [{**WEATHER, "parameters": []}]}),
    ("tools.0.strict", {"tools": [{**WEATHER, "strict": "yes"}]}),
    ("tools.0.defer_loading", {"tools": [{**WEATHER, "defer_loading": True}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "name": "weather"}}),
    ("tool_choice.tools", {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
    ("tool_choice", {"tools": [WEATHER], "tool_choice": 3}),
    ("parallel_tool_calls", {"tools": [WEATHER], "parallel_tool_calls": "no"}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("temperature", {"temperature": 3}),
    ("top_p", {"top_p": "all"}),
    ("stream", {"stream": "yes"}),
    ("stream_options.include_usage", {"stream_options": {"include_usage": True}}),
    ("store", {"store": 1}),
    ("text.format", {"text": {"format": "json"}}),
    ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
    ("text.verbosity", {"text": {"verbosity": "loud"}}),
    ("reasoning.mode", {"reasoning": {"mode": "pro"}}),
    ("reasoning.effort", {"reasoning": {"effort": 3}}),
    ("metadata.run", {"metadata": {"run": 3}}),
    ("client_metadata", {"client_metadata": "turn"}),
    ("tools.0.type", {"tools": [{"type": "namespace", "name": "agents", "tools": [WEATHER]}]}),
    ("user", {"user": 3}),
    ("truncation", {"truncation": "auto"}),
    ("include", {"include": ["file_search_call.results"]}),
    ("background", {"background": True}),
    ("max_tool_calls", {"max_tool_calls": 1}),
    ("prompt", {"prompt": {"id": "pmpt_1"}}),
    ("top_logprobs", {"top_logprobs": 5}),
    ("stop", {"stop": ["."]}),
]


@pytest.mark.parametrize(("field", "fields"), REFUSED, ids=[f"{field}-{i}" for i, (field, _) in enumerate(REFUSED)])
def test_what_cannot_be_done_is_refused_by_its_name(field: str, fields: dict[str, Any]) -> None:
    error = refusal(**fields)
    assert error.field == field
    assert field.rpartition(".")[2] in error.message


def test_a_reply_that_is_not_known_is_not_found() -> None:
    assert refusal(previous_response_id="resp_lost").status == 404


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FULL: dict[str, Any] = {
    "model": "policy",
    "instructions": "Be kind.",
    "previous_response_id": "resp_1",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What?"}, INLINE]},
        {**thought("Where?"), "summary": [{"type": "summary_text", "text": "Where?"}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look."}, {"type": "refusal", "refusal": "No"}],
        },
        call_item("a"),
        result_item("a", [{"type": "input_text", "text": "rain"}]),
    ],
    "tools": [WEATHER],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "stream_options": {"include_obfuscation": False},
    "metadata": {"run": "3"},
}


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a value."""
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, row in rows for found in places(row, (*place, key)))]


def with_value(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    changed = value.copy()
    changed[place[0]] = with_value(value[place[0]], place[1:], new)
    return changed


def status_of(body: dict[str, Any]) -> int:
    stored = {"resp_1": [user("Hi"), assistant("", *CALLS)]}
    try:
        DIALECT.write(DIALECT.read(body, stored), reply(TEXT))
    except BadRequest as refused:
        return refused.status
    return 200


def test_a_request_can_hold_all_of_these() -> None:
    assert len(read({"resp_1": [user("Hi")]}, **FULL).messages) == 5


@settings(max_examples=200, deadline=None)
@given(place=st.sampled_from(places(FULL)[1:]), value=JSON)
def test_no_value_of_any_field_is_a_failure(place: tuple[Any, ...], value: Any) -> None:
    assert status_of(with_value(FULL, place, value)) in (200, 400, 404)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(READ) | st.text(max_size=5), JSON, max_size=3))
def test_no_object_is_a_failure(body: dict[str, Any]) -> None:
    assert status_of(body) in (200, 400, 404)
    assert status_of({"model": "policy", "input": "Hi", **body}) in (200, 400, 404)
