"""The Responses dialect against the vendor's own client and types."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.gateway_client import events_of
from support.responses_items import (
    CALLS,
    DIALECT,
    PARAMETERS,
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

from agentrl.gateway.dialect import BadRequest, ChatRequest, ReplyAnswer
from agentrl.message import ImagePart, Message, TextPart, ToolCall, system, user

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ANSWERS = {
    "text": TEXT,
    "thinking": ReplyAnswer(text="Rain.", finish="stop", reasoning="Clouds,\n\nthen rain.", tokens=9),
    "calls": ReplyAnswer(text="", finish="tool_calls", calls=CALLS, tokens=12),
    "all": ReplyAnswer(text="I look.", finish="tool_calls", calls=CALLS, reasoning="Where?", tokens=20),
    "cut": ReplyAnswer(text="It rai", finish="length", tokens=3),
    "cut thinking": ReplyAnswer(text="", finish="length", reasoning="Clou", tokens=3),
    "empty": ReplyAnswer(text="", finish="stop", tokens=1),
}
COMPLETE = [name for name, answer in ANSWERS.items() if answer.finish != "length"]
every_answer = pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())


def history(*items: Any) -> list[Message]:
    return list(read(input=list(items)).messages)


def as_message(answer: ReplyAnswer) -> Message:
    return Message(
        role="assistant", content=answer.text, tool_calls=tuple(answer.calls), reasoning=answer.reasoning or None
    )


class Gateway:
    """Answers the vendor's client out of a list of answers, and keeps what was read."""

    def __init__(self, *answers: ReplyAnswer) -> None:
        self.asked: list[ChatRequest] = []
        self.stored: dict[str, Sequence[Message]] = {}
        self.answers = list(answers)
        self._http = httpx2.Client(transport=httpx2.MockTransport(self._serve))
        self.client = openai.OpenAI(api_key="key", base_url="http://gateway/v1", http_client=self._http, max_retries=0)

    def _serve(self, request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == DIALECT.path
        try:
            asked = DIALECT.read(json.loads(request.content), self.stored)
        except BadRequest as error:
            body = DIALECT.error(error.status, error.message, field=error.field, code=error.code)
            return httpx2.Response(error.status, json=body)
        self.asked.append(asked)
        written = reply(self.answers.pop(0), f"r{len(self.asked)}")
        if asked.extra["store"]:
            history = [*asked.extra["history"], as_message(written.answer)]
            self.stored[DIALECT.reply_id(written)] = history
        if not asked.stream:
            return httpx2.Response(200, json=DIALECT.write(asked, written))
        lines = (f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events_of(DIALECT, asked, written))
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, text="".join(lines))


@pytest.fixture(scope="module")
def client_of() -> Any:
    """One client serves all tests, since its start takes time; it forgets between them."""
    gateway = Gateway()

    def start(*answers: ReplyAnswer) -> Gateway:
        gateway.asked.clear()
        gateway.stored.clear()
        gateway.answers = list(answers)
        return gateway

    yield start
    gateway.client.close()


# Requests


def test_text_is_a_message_of_the_user() -> None:
    asked = read(input="Hi", instructions="Be kind.", stream=True, max_output_tokens=64, temperature=0.5, top_p=1)
    assert asked.messages == [system("Be kind."), user("Hi")]
    assert (asked.model, asked.stream, asked.max_tokens, asked.count) == ("policy", True, 64, 1)
    assert asked.settings == {"temperature": 0.5, "top_p": 1.0}


def test_what_is_not_asked_for_is_left_to_the_run() -> None:
    asked = read()
    assert (asked.stream, asked.max_tokens, asked.tools, asked.stop, asked.settings) == (False, None, [], (), {})
    assert asked.extra["store"] is True


def test_messages_have_roles_and_parts() -> None:
    parts = [{"type": "input_text", "text": "Two "}, {"type": "input_text", "text": "parts."}]
    assert history(
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "And kind."}]},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ) == [
        system("Be brief."),
        system("And kind."),
        user("Two parts."),
        Message(role="assistant", content="No."),
    ]


def test_images_come_in_the_request() -> None:
    url = "data:image/png;base64," + base64.b64encode(b"pixels").decode()
    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    [message] = history({"role": "user", "content": [{"type": "input_text", "text": "What?"}, image]})
    assert message.content == (TextPart(text="What?"), ImagePart(data=b"pixels"))
    # lmstudio-bug-tracker#2200: Codex sends a picture as the result of a call
    assert history(call_item("a"), result_item("a", [image]))[1].content == (ImagePart(data=b"pixels"),)


def call(call_id: str) -> ToolCall:
    return ToolCall(name="weather", arguments={"city": "Rome"}, id=call_id)


def result(call_id: str, text: str = "rain") -> Message:
    return Message(role="tool", content=text, tool_call_id=call_id, name="weather")


def test_the_items_of_an_answer_are_one_message() -> None:
    items = [thought("Where?"), said("I look."), call_item("a"), call_item("b")]
    outputs = [result_item("b", [{"type": "input_text", "text": "sun"}]), result_item("a")]
    assert history(*items, *outputs, said("Rain.")) == [
        assistant("I look.", call("a"), call("b"), reasoning="Where?"),
        result("b", "sun"),
        result("a"),
        assistant("Rain."),
    ]


def test_what_follows_a_call_without_its_result_is_of_the_same_answer() -> None:
    items = [call_item("a"), thought("Wait."), said("I look."), call_item("b"), result_item("a")]
    assert history(*items) == [assistant("I look.", call("a"), call("b"), reasoning="Wait."), result("a")]


def test_what_follows_a_text_is_another_answer() -> None:
    assert history(said("One."), said("Two."), thought("Three?"), said("Three.")) == [
        assistant("One."),
        assistant("Two."),
        assistant("Three.", reasoning="Three?"),
    ]


def test_thinking_of_which_there_is_only_a_summary_is_the_summary() -> None:
    parts = [{"type": "summary_text", "text": text} for text in ("First.", "Then.")]
    items = [{"type": "reasoning", "id": "rs_1", "summary": parts, "encrypted_content": "gAAA"}, said("Done.")]
    assert history(*items) == [assistant("Done.", reasoning="First.\n\nThen.")]


def test_thinking_that_is_encrypted_is_none() -> None:
    items = [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}]
    assert history(user_item := {"role": "user", "content": "Hi"}, *items, said("Done."), user_item) == [
        user("Hi"),
        assistant("Done."),
        user("Hi"),
    ]


def test_tools_are_as_chat_templates_read_them() -> None:
    bare = {"type": "function", "name": "look", "parameters": None, "strict": None}
    described = {"name": "weather", "description": "Say it.", "parameters": PARAMETERS}
    empty = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert read(tools=[WEATHER, bare], tool_choice="auto").tools == [
        {"type": "function", "function": described},
        {"type": "function", "function": empty},
    ]


def test_tools_that_may_not_be_called_are_not_offered() -> None:
    asked = read(tools=[WEATHER], tool_choice="none", parallel_tool_calls=False)
    assert asked.tools == []
    written = Response.model_validate(DIALECT.write(asked, reply(TEXT)))
    assert (written.tool_choice, written.parallel_tool_calls, len(written.tools)) == ("none", False, 1)


def test_fields_that_say_nothing_about_the_answer_are_taken() -> None:
    asked = read(
        text={"format": {"type": "text"}, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        metadata={"run": "3"},
        user="me",
        safety_identifier="me",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        service_tier="auto",
        truncation="disabled",
        include=["reasoning.encrypted_content"],
        stream_options={"include_obfuscation": False},
        background=False,
        parallel_tool_calls=False,
        top_logprobs=0,
        conversation=None,
    )
    assert (list(asked.messages), asked.tools) == (list(read().messages), read().tools)


# Replies


@every_answer
def test_a_reply_is_of_the_vendors_type(answer: ReplyAnswer) -> None:
    asked = read(
        instructions="Be kind.", tools=[WEATHER], metadata={"run": "3"}, temperature=0.5, reasoning={"effort": "low"}
    )
    written = Response.model_validate(DIALECT.write(asked, reply(answer)))
    assert (written.id, written.object, written.created_at, written.model) == ("resp_7f", "response", 1.7e9, "policy")
    assert written.output_text == answer.text
    assert (written.instructions, written.metadata, written.temperature) == ("Be kind.", {"run": "3"}, 0.5)
    assert [tool.name for tool in written.tools if tool.type == "function"] == ["weather"]
    assert written.error is None
    assert written.usage is not None
    assert (written.usage.input_tokens, written.usage.output_tokens) == (11, answer.tokens)
    assert written.usage.total_tokens == 11 + answer.tokens
    assert written.usage.input_tokens_details.cached_tokens == 4


def kinds(written: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(item["type"], item["status"]) for item in written["output"]]


def test_an_answer_is_thinking_then_text_then_calls() -> None:
    written = DIALECT.write(read(tools=[WEATHER]), reply(ANSWERS["all"]))
    assert [item["id"] for item in written["output"]] == ["rs_7f", "msg_7f", "fc_7f_0", "fc_7f_1"]
    assert [kind for kind, _ in kinds(written)] == ["reasoning", "message", "function_call", "function_call"]
    assert written["status"] == "completed"
    assert written["incomplete_details"] is None
    assert [json.loads(item["arguments"]) for item in written["output"][2:]] == [dict(c.arguments) for c in CALLS]
    assert [item["call_id"] for item in written["output"][2:]] == ["call_a", "call_b"]


def test_there_is_no_text_beside_calls_unless_some_was_said() -> None:
    asked = read()
    assert [kind for kind, _ in kinds(DIALECT.write(asked, reply(ANSWERS["calls"])))] == ["function_call"] * 2
    assert [kind for kind, _ in kinds(DIALECT.write(asked, reply(ANSWERS["empty"])))] == ["message"]


def test_an_answer_that_was_cut_is_incomplete() -> None:
    written = DIALECT.write(read(), reply(ANSWERS["cut thinking"]))
    assert kinds(written) == [("reasoning", "completed"), ("message", "incomplete")]
    assert (written["status"], written["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "invalid_request_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
    ],
)
def test_errors_have_the_vendors_types(status: int, kind: str) -> None:
    error = DIALECT.error(status, "No.", field="input", code="invalid")
    assert error == {"error": {"message": "No.", "type": kind, "param": "input", "code": "invalid"}}


# Streams


def events(answer: ReplyAnswer) -> list[dict[str, Any]]:
    named = events_of(DIALECT, read(stream=True), reply(answer))
    assert all(isinstance(data, dict) and data["type"] == name for name, data in named)
    return [data for _, data in named if isinstance(data, dict)]


@every_answer
def test_every_event_is_of_the_vendors_type(answer: ReplyAnswer) -> None:
    seen = [EVENT.validate_python(event) for event in events(answer)]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert [event.type for event in seen] == [event["type"] for event in events(answer)]


@every_answer
def test_the_last_event_holds_the_reply_that_is_sent_whole(answer: ReplyAnswer) -> None:
    whole = DIALECT.write(read(stream=True), reply(answer))
    first, *_, last = events(answer)
    assert last["response"] == whole
    assert last["type"] == f"response.{whole['status']}"
    assert (first["response"]["status"], first["response"]["output"]) == ("in_progress", [])
    assert [event["item"] for event in events(answer) if event["type"] == "response.output_item.done"] == whole[
        "output"
    ]


def test_events_come_in_the_vendors_order() -> None:
    answer = ReplyAnswer(text="I look.", finish="tool_calls", calls=CALLS[1:], reasoning="Where?")
    assert [event["type"].removeprefix("response.") for event in events(answer)] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_deltas_add_up_to_the_text() -> None:
    deltas = [event["delta"] for event in events(TEXT) if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == TEXT.text


# The vendor's client


def ask(gateway: Gateway, how: str, **fields: Any) -> Response:
    """Ask in one of the ways that the client has."""
    responses: Any = gateway.client.responses
    if how == "whole":
        return responses.create(model="policy", **fields)
    if how == "events":
        return list(responses.create(model="policy", stream=True, **fields))[-1].response
    with responses.stream(model="policy", **fields) as stream:
        return stream.get_final_response()


@pytest.mark.parametrize("how", ["whole", "events", "helper"])
@pytest.mark.parametrize("name", COMPLETE)
def test_an_answer_comes_back_as_it_went_out(client_of: Any, how: str, name: str) -> None:
    answer = ANSWERS[name]
    gateway = client_of(answer, TEXT)
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    first = ask(gateway, how, input=items, tools=[WEATHER])
    results = [result_item(call.id) for call in answer.calls]
    ask(gateway, "whole", input=[*items, *(item.to_dict() for item in first.output), *results])
    ends = [result(call.id) for call in answer.calls]
    assert gateway.asked[1].messages == [user("Weather?"), as_message(answer), *ends]


@pytest.mark.parametrize("name", ["cut", "cut thinking"])
def test_an_answer_that_was_cut_comes_back_as_well(client_of: Any, name: str) -> None:
    gateway = client_of(ANSWERS[name], TEXT)
    first = ask(gateway, "events", input="Weather?")
    assert first.incomplete_details is not None
    assert first.incomplete_details.reason == "max_output_tokens"
    ask(gateway, "whole", input=[*first.output, {"role": "user", "content": "Go on."}])
    assert gateway.asked[1].messages == [as_message(ANSWERS[name]), user("Go on.")]


@pytest.mark.parametrize("how", ["whole", "helper"])
def test_the_clients_own_objects_can_be_sent_back(client_of: Any, how: str) -> None:
    gateway = client_of(ANSWERS["all"], TEXT)
    first = ask(gateway, how, input="Weather?", tools=[WEATHER])
    ask(gateway, "whole", input=[*first.output, result_item("call_a"), result_item("call_b")])
    assert gateway.asked[1].messages == [as_message(ANSWERS["all"]), result("call_a"), result("call_b")]


@pytest.mark.parametrize("dumped", [{}, {"exclude_none": True}, {"mode": "json"}], ids=str)
def test_what_pydantic_dumps_can_be_sent_back(client_of: Any, dumped: dict[str, Any]) -> None:
    gateway = client_of(ANSWERS["all"])
    first = ask(gateway, "helper", input="Weather?", tools=[WEATHER])
    assert history(*(item.model_dump(**dumped) for item in first.output)) == [as_message(ANSWERS["all"])]


def test_the_client_accumulates_what_is_streamed(client_of: Any) -> None:
    gateway = client_of(ANSWERS["all"])
    with gateway.client.responses.stream(model="policy", input="Weather?", tools=[WEATHER]) as stream:
        seen = list(stream)
    texts = [event.snapshot for event in seen if event.type == "response.output_text.delta"]
    arguments = [event.snapshot for event in seen if event.type == "response.function_call_arguments.delta"]
    assert texts[-1] == "I look."
    assert [json.loads(text) for text in (arguments[-2], arguments[-1])] == [dict(CALLS[0].arguments), {}]
    assert [event.type for event in seen][-1] == "response.completed"


def test_a_stored_reply_stands_for_its_history_without_instructions(client_of: Any) -> None:
    gateway = client_of(ANSWERS["all"], TEXT, TEXT)
    first = ask(gateway, "whole", input="Weather?", instructions="Be brief.", tools=[WEATHER])
    results = [result_item(call.id) for call in CALLS]
    second = ask(gateway, "events", previous_response_id=first.id, instructions="Be kind.", input=results)
    ask(gateway, "whole", previous_response_id=second.id, input="Thanks.")
    middle = [user("Weather?"), as_message(ANSWERS["all"]), result("call_a"), result("call_b")]
    assert gateway.asked[1].messages == [system("Be kind."), *middle]
    assert gateway.asked[2].messages == [*middle, as_message(TEXT), user("Thanks.")]
    assert second.previous_response_id == first.id


def test_reading_leaves_the_stored_history_as_it_is() -> None:
    stored = {"resp_1": [user("Hi"), assistant("Hello.")]}
    asked = read(stored, previous_response_id="resp_1", input="More.")
    assert asked.messages == asked.extra["history"] == [user("Hi"), assistant("Hello."), user("More.")]
    assert stored == {"resp_1": [user("Hi"), assistant("Hello.")]}


def test_a_stored_answer_is_not_joined_with_items_that_follow() -> None:
    asked = read({"resp_1": [user("Hi"), assistant("Hello.")]}, previous_response_id="resp_1", input=[said("Again.")])
    assert asked.messages[1:] == [assistant("Hello."), assistant("Again.")]


def test_a_reply_that_is_not_to_be_stored_says_so(client_of: Any) -> None:
    gateway = client_of(TEXT)
    first = ask(gateway, "whole", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(gateway, "whole", input="Hi", previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_the_client_reads_which_field_was_refused(client_of: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be") as caught:
        ask(client_of(), "whole", input="Hi", temperature=7)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")


async def test_tokens_are_counted_as_the_engine_gets_them(played: Any) -> None:
    """Also after an earlier reply that the session has stored."""
    found = []

    async def play(gateway: Any, session: Any) -> None:
        async with openai.AsyncOpenAI(api_key=session.key, base_url=f"{gateway.url_of(session)}/v1") as client:
            asked: dict[str, Any] = {"input": "Hi.", "instructions": "Add.", "tools": [WEATHER]}
            found.append(await client.responses.input_tokens.count(**asked))
            first = await client.responses.create(model="m", **asked)
            more: dict[str, Any] = {**asked, "input": "And now?", "previous_response_id": first.id}
            found.append(await client.responses.input_tokens.count(model="m", **more))
            await client.responses.create(model="m", **more)

    _, script = await played(play, "it is so", "and so")
    assert [one.input_tokens for one in found] == [len(request.prompt_ids) for request in script.requests]
    assert found[0].object == "response.input_tokens"
