import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentrl.config.engines import OpenAIEngineConfig
from agentrl.engine import FirstToken, SamplingParams, StopReason
from agentrl.errors import EngineError, UsageError
from agentrl.message import ImagePart, Message, TextPart, ToolCall, system, tool_result, user
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
            "content": "",
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


async def _hang_up(request):
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    "trouble",
    [(429, {"error": {"message": "slow down"}}, {"Retry-After": "0"}), (500, "oops"), (503, "busy"), _hang_up],
    ids=["429", "500", "503", "disconnect"],
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
        ((404, {"error": {"message": "no model m"}}), UsageError, r"does not know model 'm'.*no model m"),
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
