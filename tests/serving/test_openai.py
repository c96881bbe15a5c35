import asyncio
import json
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from aiohttp import web

from agentrl.config.engines import OpenAIEngineConfig
from agentrl.engine import FirstToken, SamplingParams, StopReason
from agentrl.errors import EngineError, ResumableError, UsageError
from agentrl.message import ImagePart, Message, TextPart, ToolCall, system, tool_result, user
from agentrl.remote import chat
from agentrl.serving.openai import OpenAIEngine

COMPLETION = {
    "choices": [{"message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3},
}


@asynccontextmanager
async def serving(*responses, retries=3, **settings):
    """A real server that gives the responses in turn, the last one for ever, and an engine that talks to it."""
    seen = []

    async def answer(request):
        seen.append({"headers": dict(request.headers), "body": await request.json()})
        response = responses[min(len(seen), len(responses)) - 1]
        if callable(response):
            return await response(request)
        status, body, *headers = response
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=headers[0] if headers else None)

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    config = OpenAIEngineConfig(url=f"http://127.0.0.1:{port}/v1/", model="m", retries=retries, **settings)
    engine = OpenAIEngine(config, first_wait_s=0.001)
    try:
        yield engine, seen
    finally:
        await engine.close()
        await runner.cleanup()


async def _ask(engine, messages=(), tools=(), **params):
    return await engine.chat(list(messages) or [user("Hi.")], list(tools), SamplingParams(**params), "r1")


async def test_an_answer_and_what_the_service_was_sent(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    call = ToolCall(name="look", arguments={"at": "mug 1"}, id="c1")
    messages = [
        system("Be brief."),
        user((TextPart(text="See:"), ImagePart(data=b"png"))),
        Message(role="assistant", tool_calls=(call,)),
        tool_result(call, "A mug."),
    ]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    async with serving((200, COMPLETION), api_key_variable="MY_KEY") as (engine, seen):
        answer = await _ask(engine, messages, [tool], temperature=0.5, top_p=0.9, max_tokens=7, seed=3)
    assert (answer.message.text, answer.prompt_tokens, answer.answer_tokens) == ("Hello.", 9, 3)
    assert answer.stop_reason is StopReason.STOP
    assert seen[0]["headers"]["Authorization"] == "Bearer secret"
    body = seen[0]["body"]
    written = body.pop("messages")
    assert body == {"model": "m", "temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 3, "tools": [tool]}
    assert written == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "See:"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "mug 1"}'}}
            ],
        },
        {"role": "tool", "content": "A mug.", "tool_call_id": "c1"},
    ]


async def test_no_key_sends_no_authorization(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with serving((200, COMPLETION)) as (engine, seen):
        await _ask(engine)
    assert "Authorization" not in seen[0]["headers"]


async def test_tool_calls_thinking_and_malformed_arguments():
    calls = [
        {"id": "a", "function": {"name": "go", "arguments": '{"to": "desk 1"}'}},
        {"id": "b", "function": {"name": "take", "arguments": '{"what": '}},
        {"id": "c", "function": {"name": "wait", "arguments": "[1]"}},
    ]
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls}
    body = {"choices": [{"message": message, "finish_reason": "length"}]}
    async with serving((200, body)) as (engine, _):
        answer = await _ask(engine)
    assert answer.message.tool_calls == (ToolCall(name="go", arguments={"to": "desk 1"}, id="a"),)
    assert answer.message.reasoning == "hm"
    assert answer.stop_reason is StopReason.LENGTH
    assert [problem.split(":")[0] for problem in answer.problems] == [
        "the arguments of the call of take are not valid JSON",
        "the arguments of the call of wait are not a JSON object",
    ]


async def test_a_call_without_text_has_no_content():
    # vercel/ai#13466, hermes-agent#31583: Bedrock and others reject an empty text beside calls
    call = ToolCall(name="look", arguments={}, id="c1")
    history = [user("Hi."), Message(role="assistant", tool_calls=(call,)), Message(role="assistant", content="")]
    async with serving((200, COMPLETION)) as (engine, seen):
        await _ask(engine, history)
    assert [row["content"] for row in seen[0]["body"]["messages"]] == ["Hi.", None, ""]


async def _hang_up(request):
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    "trouble",
    [
        (429, {"error": {"message": "slow down"}}, {"Retry-After": "0"}),
        (408, "slow"),  # opencode#47525
        (409, "locked"),
        (500, "oops"),
        (503, "busy"),
        (200, "\n\n"),  # DeepSeek-V3#606: an overloaded service sends empty lines, and then ends the answer
        _hang_up,
    ],
    ids=["429", "408", "409", "500", "503", "empty", "disconnect"],
)
async def test_trouble_that_passes_is_retried(trouble):
    async with serving(trouble, trouble, (200, COMPLETION)) as (engine, seen):
        assert (await _ask(engine)).message.text == "Hello."
    assert len(seen) == 3


async def test_trouble_that_stays_is_an_engine_error_that_says_it():
    async with serving((503, {"error": {"message": "overloaded"}}), retries=2) as (engine, seen):
        with pytest.raises(EngineError, match=r"failed after 3 attempts.*503, 'overloaded'"):
            await _ask(engine)
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        ((401, {"error": {"message": "bad key"}}), UsageError, r"refuses the key.*bad key.*OPENAI_API_KEY"),
        ((403, {"error": {"message": "no access"}}), UsageError, r"refuses the key.*no access"),
        ((404, {"error": {"message": "no model m"}}), UsageError, r"does not know model 'm'.*no model m"),
        # langchainjs#1929: an account without credit gets 429, too, from OpenAI; 402 from others
        ((429, {"error": {"message": "quota", "code": "insufficient_quota"}}), UsageError, "no credit left.*quota"),
        ((402, {"error": {"message": "pay"}}), UsageError, "no credit left.*pay"),
        ((400, {"error": "too long"}), EngineError, r"returned an error: got 400, 'too long'"),
        ((200, "<html>Welcome</html>"), EngineError, r"not valid JSON: got '<html>Welcome"),
        ((200, {"choices": []}), EngineError, "not a chat completion"),
    ],
)
async def test_a_refusal_is_told_at_once(response, kind, message):
    async with serving(response) as (engine, seen):
        with pytest.raises(kind, match=message):
            await _ask(engine)
    assert len(seen) == 1


async def test_a_service_that_is_not_there_is_an_engine_error():
    async with serving((200, COMPLETION), retries=1) as (engine, _):
        pass
    gone = OpenAIEngine(engine.config, first_wait_s=0.001)
    with pytest.raises(EngineError, match="failed after 2 attempts"):
        await _ask(gone)
    await gone.close()


async def test_a_service_that_hangs_misses_the_deadline():
    release = asyncio.Event()

    async def hang(_):
        await release.wait()
        return web.Response()

    async with serving(hang, timeout_s=0.05) as (engine, _):
        with pytest.raises(EngineError, match="missed its deadline"):
            await _ask(engine)
        release.set()


async def test_no_more_requests_at_once_than_configured():
    running, most, full = 0, 0, asyncio.Event()

    async def count(_):
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await full.wait()
        running -= 1
        return web.json_response(COMPLETION)

    async with serving(count, max_concurrent=3) as (engine, seen):
        await asyncio.gather(*(_ask(engine) for _ in range(9)))
    assert (len(seen), most) == (9, 3)


@pytest.mark.parametrize(
    "setting",
    [
        {"top_k": 5},
        {"min_p": 0.1},
        {"stop_token_ids": frozenset({3})},
        {"first_token": FirstToken(temperature=30.0, top_k=16)},
    ],
)
async def test_settings_that_services_do_not_have_are_usage_errors(setting):
    async with serving((200, COMPLETION)) as (engine, seen):
        with pytest.raises(UsageError, match=f"does not support {next(iter(setting))}"):
            await _ask(engine, **setting)
    assert not seen


async def test_a_closed_engine_says_so():
    async with serving((200, COMPLETION)) as (engine, _):
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await _ask(engine)


def answered(finish="stop", **message):
    return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]}


def called(*calls):
    rows = [{"type": "function", "function": {"name": "add", "arguments": given}, **more} for given, more in calls]
    return answered("tool_calls", content=None, tool_calls=rows)


THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "It is easy."}]}


@pytest.mark.parametrize(
    ("body", "text", "reasoning"),
    [
        # agent-framework#6978, hermes-agent#4748: reasoning models of Mistral answer in parts
        (
            answered(content=[THINKING, {"type": "text", "text": "4"}, {"type": "text", "text": "2"}]),
            "42",
            "It is easy.",
        ),
        (answered(content=[{"type": "thinking", "thinking": "Hm."}]), "", "Hm."),
        (answered(content=None, refusal="I cannot."), "I cannot.", None),
    ],
)
async def test_an_answer_in_parts_is_read(body, text, reasoning):
    async with serving((200, body)) as (engine, _):
        message = (await _ask(engine)).message
    assert (message.content, message.reasoning) == (text, reasoning)


async def test_calls_of_services_that_deviate_are_read():
    # mlx-lm#1904: arguments as an object; brainlid/langchain#620: calls without an id, or with the same one
    body = called(({"a": 1}, {"id": "x"}), ('{"a": 2}', {"id": ""}), ('{"a": 3}', {}), ('{"a": 4}', {"id": "x"}))
    async with serving((200, body)) as (engine, _):
        answers = [await engine.chat([user("Hi.")], [], SamplingParams(), name) for name in ("r1", "r2", "r1")]
    calls = [answer.message.tool_calls for answer in answers]
    assert [call.arguments for call in calls[0]] == [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}]
    assert len({call.id for call in (*calls[0], *calls[1][1:])}) == 7
    assert calls[0][0].id == "x"
    assert calls[0] == calls[2]


FAILED = {"error": {"message": "Provider returned error", "code": 502}}


@pytest.mark.parametrize(
    "body",
    [
        FAILED,  # saturn#43: status 200 with an error instead of choices
        answered("error", content='{"title": "par'),  # bifrost#5425, pi#9002: half an answer
        {"choices": [{**answered("error", content="")["choices"][0], **FAILED}]},
    ],
)
async def test_a_failure_behind_status_200_is_tried_again(body):
    async with serving((200, body), (200, COMPLETION)) as (engine, seen):
        assert (await _ask(engine)).message.text == "Hello."
    assert len(seen) == 2
    async with serving((200, body), retries=1) as (engine, seen):
        with pytest.raises(EngineError, match=r"Provider returned error|finish_reason error"):
            await _ask(engine)
    assert len(seen) == 2


async def test_a_permanent_error_behind_status_200_is_not_tried_again():
    async with serving((200, {"error": {"message": "no such model", "code": 404}})) as (engine, seen):
        with pytest.raises(EngineError, match="no such model"):
            await _ask(engine)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "3"}, 3),
        ({"Retry-After": "0.5"}, 0.5),
        ({"Retry-After": "60"}, 60),  # compound-cli#19, jp#1080: windows of a minute
        ({"Retry-After-Ms": "250", "Retry-After": "3"}, 0.25),
        ({"Retry-After": "Sat, 28 Nov 2026 12:00:07 GMT"}, 7),
        ({"Retry-After": "Sat, 28 Nov 2026 11:00:00 GMT"}, 0.001),
        ({"Retry-After": "soon"}, 0.001),
        ({}, 0.001),
    ],
)
async def test_a_service_says_how_long_to_wait(headers, seconds, monkeypatch):
    waits = []

    async def sleep(wait_s):
        waits.append(wait_s)

    monkeypatch.setattr(chat.time, "time", lambda: datetime(2026, 11, 28, 12, tzinfo=UTC).timestamp())
    async with serving((429, "slow down", headers), (200, COMPLETION)) as (engine, _):
        with monkeypatch.context() as patched:
            patched.setattr(chat.asyncio, "sleep", sleep)
            await _ask(engine)
    (waited,) = waits
    assert seconds <= waited <= 1.25 * seconds, "not all requests at the same moment"


async def test_a_wait_beyond_the_deadline_ends_the_request_at_once_and_says_why():
    # veryfront-code#3960: a timeout that hides the reason of all attempts
    limited = (429, {"error": {"message": "tokens per day"}}, {"Retry-After": "3600"})
    async with serving(limited, timeout_s=100) as (engine, seen):
        with pytest.raises(EngineError, match=r"failed after 1 attempt, and .* deadline \(100 s\).*tokens per day"):
            await _ask(engine)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        (401, {"error": {"message": "expired"}}),
        (404, {"error": {"message": "gone"}}),
        (402, {"error": {"message": "pay"}}),
        (429, {"error": {"message": "quota", "type": "insufficient_quota"}}),
    ],
    ids=["key", "model", "payment", "quota"],
)
async def test_a_service_that_has_answered_and_then_refuses_can_be_resumed(refusal):
    async with serving((200, COMPLETION), refusal) as (engine, _):
        await _ask(engine)
        with pytest.raises(ResumableError, match=refusal[1]["error"]["message"]):
            await _ask(engine)


async def test_a_refused_question_is_not_taken_for_a_refused_key():
    # OpenRouter answers 403 to a request whose content its moderation rejects
    async with serving((200, COMPLETION), (403, {"error": {"message": "flagged"}})) as (engine, _):
        await _ask(engine)
        with pytest.raises(EngineError, match="403, 'flagged'"):
            await _ask(engine)


def refusing(*words):
    """A service's answer: 400 with the first error of `words` whose check of the body is true, else an answer."""

    async def answer(request):
        body = await request.json()
        for is_wrong, error in words:
            if is_wrong(body):
                return web.json_response({"error": {"message": error, "type": "invalid_request_error"}}, status=400)
        return web.json_response(COMPLETION)

    return answer


LIMIT = (
    lambda body: "max_tokens" in body,
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
)
TOP_P = (lambda body: "top_p" in body, "Unsupported parameter: 'top_p' is not supported with this model.")
TEMPERATURE = (
    lambda body: body.get("temperature", 1) != 1,
    "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported.",
)
BOTH = (
    lambda body: "temperature" in body and "top_p" in body,
    "`temperature` and `top_p` cannot both be specified for this model. Please use only one.",
)
DEPRECATED = (lambda body: "temperature" in body, "`temperature` is deprecated for this model.")
SEED = (lambda body: "seed" in body, '{"detail":[{"type":"extra_forbidden","loc":["body","seed"]}]}')


@pytest.mark.parametrize(
    ("refusals", "params", "sent"),
    [
        # ComfyUI-Griptape#312, opencode#37964: OpenAI's reasoning models
        ([LIMIT, TOP_P, TEMPERATURE], {"temperature": 1.0}, {"temperature": 1.0, "max_completion_tokens": 7}),
        # open-webui/pipelines#546, ChatterUI#564: Anthropic's models
        ([BOTH], {"temperature": 0.0}, {"temperature": 0.0, "max_tokens": 7}),
        ([BOTH], {"temperature": 1.0, "top_p": 0.9}, {"top_p": 0.9, "max_tokens": 7}),
        ([BOTH, DEPRECATED], {"temperature": 1.0}, {"max_tokens": 7}),
        ([SEED], {"temperature": 0.5, "seed": 3}, {"temperature": 0.5, "top_p": 1.0, "max_tokens": 7}),
    ],
    ids=["reasoning", "both", "both-top_p", "neither", "seed"],
)
async def test_a_request_is_sent_again_without_what_has_no_effect(refusals, params, sent, caplog):
    async with serving(refusing(*refusals)) as (engine, seen):
        await _ask(engine, max_tokens=7, **params)
        tries = len(seen)
        await _ask(engine, max_tokens=7, **params)
    assert tries > 1
    assert len(seen) == tries + 1, "the form is learned once"
    for request in seen[-2:]:
        del request["body"]["messages"], request["body"]["model"]
        assert request["body"] == sent
    assert caplog.text.count("does not accept a seed") == ("seed" in params)


@pytest.mark.parametrize(
    ("refusals", "params", "named"),
    [
        ([TEMPERATURE], {"temperature": 0.0}, "temperature 0 "),
        ([BOTH], {"temperature": 0.5, "top_p": 0.9}, r"top_p 0\.9 "),
        ([DEPRECATED], {"temperature": 0.5}, r"temperature 0\.5 "),
    ],
)
async def test_a_setting_with_an_effect_is_the_users_to_change(refusals, params, named):
    async with serving(refusing(*refusals)) as (engine, seen):
        with pytest.raises(UsageError, match=f"does not accept {named}for model 'm': got 400.*Set this"):
            await _ask(engine, **params)
    assert len(seen) == 1


async def test_thinking_is_returned_to_services_that_require_it():
    # GitNexus#43, openclaude#1052 (DeepSeek); mastra#12592, crush#2696 (Kimi, which rejects an empty text)
    error = "Missing `reasoning_content` field in the assistant message at message index 1."

    def lacks_thinking(body):
        answers = [row for row in body["messages"] if row["role"] == "assistant"]
        return any(not row.get("reasoning_content") for row in answers)

    history = [user("Hi."), Message(role="assistant", content="a", reasoning="hm"), user("And?")]
    history += [Message(role="assistant", content="b"), user("So?")]
    async with serving(refusing((lacks_thinking, error))) as (engine, seen):
        await _ask(engine)
        await _ask(engine, history)
    assert [row.get("reasoning_content") for row in seen[-1]["body"]["messages"]] == [None, "hm", None, " ", None]
    assert len(seen) == 3


@pytest.mark.parametrize(
    "error",
    [
        "messages.1: all messages must have non-empty content except for the optional final assistant message",
        "message at position 1 with role 'assistant' must not be empty",
        "Assistant message must have either content or tool_calls, but not none.",
    ],
)
async def test_empty_messages_have_a_text_for_services_that_require_one(error):
    history = [user("Hi."), Message(role="assistant", content=""), user("")]
    empty = (lambda body: any(not row["content"] for row in body["messages"]), error)
    async with serving(refusing(empty)) as (engine, seen):
        await _ask(engine, history)
        await _ask(engine, history)
    texts = [[row["content"] for row in request["body"]["messages"]] for request in seen]
    assert texts == [["Hi.", "", ""], ["Hi.", "(empty)", "(empty)"], ["Hi.", "(empty)", "(empty)"]]


SEEN = ImagePart(data=b"png")
CALLS = tuple(ToolCall(name="screen.look", arguments={"n": n}, id=f"c{n}") for n in (1, 2))


def user_images_only(body):
    """OpenAI's rule, with the parts of its message."""
    return any(row["role"] == "tool" and not isinstance(row["content"], str) for row in body["messages"])


async def test_images_of_results_follow_in_a_users_message_where_results_are_text():
    # OpenHands#7700, kimi-code#626, agenthub#209
    error = "Image URLs are only allowed for messages with role 'user', but this message with role 'tool' contains one."
    history = [
        user("Hi."),
        Message(role="assistant", tool_calls=CALLS),
        tool_result(CALLS[0], (TextPart(text="one"), SEEN)),
        tool_result(CALLS[1], (SEEN,)),
        user("And?"),
    ]
    async with serving(refusing((user_images_only, error))) as (engine, seen):
        await _ask(engine, history)
        await _ask(engine, history[:-1])
    assert len(seen) == 3
    image = {"type": "image_url", "image_url": {"url": SEEN.data_url}}
    follow = "The images follow in the next message."
    rows = [(row["role"], row["content"]) for row in seen[1]["body"]["messages"][2:]]
    assert rows == [("tool", f"one\n{follow}"), ("tool", follow), ("user", [image, image]), ("user", "And?")]
    assert [(row["role"], row["content"]) for row in seen[2]["body"]["messages"][2:]] == rows[:-1]


async def test_names_of_tools_are_plain_where_they_must_be_and_come_back_as_they_are():
    # csharp-sdk#679, codex#8174: names of MCP tools with dots
    def wrong(body):
        names = [tool["function"]["name"] for tool in body["tools"]]
        names += [call["function"]["name"] for row in body["messages"] for call in row.get("tool_calls", ())]
        return any("." in name for name in names)

    async def answer(request):
        body = await request.json()
        if wrong(body):
            error = "Invalid 'tools[0].function.name': string does not match pattern '^[a-zA-Z0-9_-]+$'."
            return web.json_response({"error": {"message": error}}, status=400)
        call = {"name": body["tools"][0]["function"]["name"], "arguments": '{"n": 3}'}
        return web.json_response(answered("tool_calls", tool_calls=[{"id": "c3", "function": call}]))

    tool = {"type": "function", "function": {"name": "screen.look", "parameters": {"type": "object"}}}
    history = [user("Hi."), Message(role="assistant", tool_calls=CALLS[:1]), tool_result(CALLS[0], "one")]
    async with serving(answer) as (engine, seen):
        message = (await _ask(engine, history, [tool])).message
    assert message.tool_calls == (ToolCall(name="screen.look", arguments={"n": 3}, id="c3"),)
    assert tool["function"]["name"] == "screen.look"
    # spring-ai#4776, langchain-mcp-adapters#137: OpenAI rejects an object without properties
    assert seen[0]["body"]["tools"][0]["function"]["parameters"] == {"type": "object", "properties": {}}


async def test_another_refusal_is_not_tried_again():
    async with serving(refusing((lambda _: True, "the prompt about temperature is too long"))) as (engine, seen):
        with pytest.raises(EngineError, match="400, 'the prompt about temperature is too long'"):
            await _ask(engine, temperature=0.5)
    assert len(seen) == 1


@pytest.mark.parametrize("finish", ["length", "model_length", "MAX_TOKENS", "max_tokens"])
async def test_an_answer_that_is_cut_off_is_known_by_each_vendors_word(finish):
    # litellm#25825, aisuite#333: Mistral, Cohere and Google have other words than OpenAI
    async with serving((200, answered(finish, content="It is"))) as (engine, _):
        assert (await _ask(engine)).stop_reason is StopReason.LENGTH


async def test_waiting_for_a_place_does_not_count_as_the_services_time():
    # verifiers#831: a burst of requests must not time out because it waits for itself
    async with serving((200, COMPLETION), max_concurrent=1, timeout_s=0.05) as (engine, _):
        async with engine._slots:
            asked = asyncio.ensure_future(_ask(engine))
            done, _ = await asyncio.wait([asked], timeout=0.1)
        assert not done
        assert (await asked).message.text == "Hello."


async def test_requests_go_through_the_proxy_of_the_environment(monkeypatch):
    # litellm#11389: companies' machines reach services only through a proxy
    async with serving((200, COMPLETION)) as (proxy, seen):
        for name in ("http_proxy", "https_proxy", "no_proxy", "HTTPS_PROXY", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HTTP_PROXY", proxy.settings.url.removesuffix("/v1/").removeprefix("http://"))
        config = proxy.config.model_copy(update={"url": "http://service.invalid/v1"})
        there = OpenAIEngine(config, first_wait_s=0.001)
        assert (await _ask(there)).message.text == "Hello."
        await there.close()
        assert seen[0]["headers"]["Host"] == "service.invalid"
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        assert (await _ask(proxy)).message.text == "Hello.", "a service on this machine needs no proxy"
    monkeypatch.setenv("NO_PROXY", ".invalid")
    assert chat._proxy_of("http://service.invalid/v1") is None
