"""Servers of a teacher: what they are sent in either dialect, and what their failures become."""

import asyncio
import json
import math
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentrl.config.algorithm import TeacherConfig
from agentrl.engine import ServerLost
from agentrl.errors import EngineError, UsageError
from agentrl.serving.teacher import TeacherServers


def logp(token):
    return -0.5 * token


def vllm(body):
    rows = [None, *({str(t): {"logprob": logp(t), "rank": 3}, "11": {"logprob": -9.0}} for t in body["prompt"][1:])]
    return {"choices": [{"text": "x", "prompt_logprobs": rows}]}


def sglang(body):
    rows = [[None, body["input_ids"][0], None], *([logp(t), t, None] for t in body["input_ids"][1:])]
    return {"meta_info": {"input_token_logprobs": rows}}


@asynccontextmanager
async def server(answer, *, failures=0, status=503):
    """A server that answers, and what it was sent; it refuses the first requests."""
    seen = []

    async def models(request):
        return web.json_response({"data": [{"id": "large"}]})

    async def scored(request):
        seen.append(await request.json())
        if len(seen) <= failures:
            return web.Response(status=status, text="not now")
        return web.json_response(answer(seen[-1]))

    application = web.Application()
    application.router.add_get("/v1/models", models)
    application.router.add_post("/v1/completions", scored)
    application.router.add_post("/generate", scored)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", seen
    finally:
        await runner.cleanup()


@asynccontextmanager
async def teacher_of(*urls, **settings):
    teacher = TeacherServers(TeacherConfig(path="large", servers=list(urls), timeout_s=20.0, **settings))
    try:
        yield teacher
    finally:
        await teacher.close()


@pytest.mark.parametrize(("engine", "answer"), [("vllm", vllm), ("sglang", sglang)])
async def test_the_tokens_themselves_are_asked_about(engine, answer):
    async with server(answer) as (url, seen), teacher_of(url, engine=engine) as teacher:
        found = [word.logp for word in await teacher.score([[4, 2, 6], [5], [3, 7]])]
    assert [len(values) for values in found] == [3, 1, 2]
    assert all(math.isnan(values[0]) for values in found)
    assert found[0][1:].tolist() == [-1.0, -3.0]
    assert found[2][1:].tolist() == [-3.5]
    sent = next(body for body in seen if body.get("prompt", body.get("input_ids")) == [4, 2, 6])
    assert json.dumps(sent).count("4, 2, 6") == 1
    assert sent.get("model") == ("large" if engine == "vllm" else None)


def with_top(answer):
    """The same from a server that names the two most probable tokens, 8 and 9, beside the token itself."""

    def answered(body):
        told = answer(body)
        if "choices" in told:
            for row in told["choices"][0]["prompt_logprobs"][1:]:
                row |= {"9": {"logprob": -0.75}, "8": {"logprob": -0.25}}
            return told
        rows = [None, *([[-0.25, 8, None], [-0.75, 9, None]] for _ in body["input_ids"][1:])]
        return {"meta_info": {**told["meta_info"], "input_top_logprobs": rows}}

    return answered


@pytest.mark.parametrize(
    ("engine", "answer", "key"), [("vllm", vllm, "prompt_logprobs"), ("sglang", sglang, "top_logprobs_num")]
)
async def test_the_most_probable_tokens_are_asked_for(engine, answer, key):
    async with server(with_top(answer)) as (url, seen), teacher_of(url, engine=engine, top_k=2) as teacher:
        (word,) = await teacher.score([[4, 3, 6]])
    assert seen[0][key] == 2
    assert word.logp[1:].tolist() == [-1.5, -3.0]
    assert word.top.ids.tolist() == [[0, 0], [8, 9], [8, 9]]
    assert word.top.logp[1:].tolist() == [[-0.25, -0.75]] * 2
    assert math.isnan(word.top.logp[0, 0])
    async with server(answer) as (url, _), teacher_of(url, engine=engine, top_k=3) as teacher:
        with pytest.raises(EngineError, match=r"reported too few tokens: got 2|input_top_logprobs"):
            await teacher.score([[4, 3]])


@pytest.mark.parametrize("value", [0.5, -3.5e38, None])
async def test_a_most_probable_token_without_a_log_probability_is_an_error(value):
    def answer(body):
        told = vllm(body)
        told["choices"][0]["prompt_logprobs"][1] |= {"9": {"logprob": value}}
        return told

    async with server(answer) as (url, _), teacher_of(url, top_k=2) as teacher:
        with pytest.raises(EngineError, match=r"log-probabilities are invalid: got .* at position 1, expected a f"):
            await teacher.score([[4, 3]])


async def test_another_server_is_asked_when_one_is_lost():
    async with server(vllm, failures=99) as (down, _), server(vllm) as (up, seen), teacher_of(down, up) as teacher:
        found = [word.logp for word in await teacher.score([[4, 2], [3, 2], [5, 2]])]
    assert [values[1] for values in found] == [-1.0] * 3
    assert len(seen) == 3


async def test_a_teacher_that_is_down_is_no_number():
    async with server(vllm, failures=99) as (url, seen), teacher_of(url) as teacher:
        with pytest.raises(EngineError, match="503, 'not now'"):
            await teacher.score([[4, 2]])
    assert len(seen) == 3
    async with teacher_of("http://127.0.0.1:9") as teacher:
        with pytest.raises(ServerLost):
            await teacher.score([[4, 2]])


async def test_a_refusal_is_not_asked_again():
    async with server(vllm, failures=99, status=400) as (url, seen), teacher_of(url) as teacher:
        with pytest.raises(
            UsageError, match=r"sequence of 2 tokens: got 400, 'not now'.*a context of at least 10 tokens"
        ):
            await teacher.score([[4, 2]])
    assert len(seen) == 1


def of_token_2(value):
    return {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": value}}]}]}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": [{"text": "x"}]}, r"does not report log-probabilities.*expected choices\[0\]\.prompt_logprobs"),
        ({"choices": [{"prompt_logprobs": [None]}]}, "does not report log-probabilities"),
        ({"choices": [{"prompt_logprobs": [None, None]}]}, "invalid: got 2 for 2 tokens, 1 missing"),
        (of_token_2(0.5), r"0 missing, 0\.5, expected a finite number of at most 0"),
        (of_token_2(1e-5), "0 missing, 1e-05, "),
        (of_token_2(-3.5e38), r"0 missing, -3\.5e\+38, "),
    ],
)
async def test_an_answer_of_no_use_is_an_error(answer, message):
    async with server(lambda body: answer) as (url, _), teacher_of(url) as teacher:
        with pytest.raises(EngineError, match=message):
            await teacher.score([[4, 2]])


async def test_a_key_that_is_missing_is_named():
    async with server(vllm) as (url, _), teacher_of(url, api_key_variable="NO_SUCH_KEY") as teacher:
        with pytest.raises(UsageError, match="NO_SUCH_KEY is not set"):
            await teacher.score([[4, 2]])
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"servers": ["http://h:1"], "engine": "openai"}, "does not return log-probabilities of given tokens"),
        ({"servers": ["h:1"]}, "is not an address"),
        ({"engine": "sglang"}, r"teacher\.engine is ignored without algorithm\.teacher\.servers"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TeacherConfig(path="large", **settings)
