"""A gateway in front of a service or an engine: its errors, seeds and model names."""

import logging
from contextlib import asynccontextmanager
from dataclasses import replace

import anthropic
import openai
import pytest
from aiohttp import web
from support.gateway_client import post

from agentrl.config import load_config
from agentrl.config.engines import OpenAIEngineConfig
from agentrl.engine import SamplingParams
from agentrl.evaluation.live_traffic import LiveTraffic
from agentrl.message import user
from agentrl.rollout.policies import ChatEpisodePolicy, EngineEpisodePolicy
from agentrl.serving.http import ServerStatusError
from agentrl.serving.openai import OpenAIEngine
from agentrl.serving.scripted import ScriptedEngine

CHAT = "/v1/chat/completions"
CONFIG = load_config(None, ["environment=guess_number"])
QUESTION = {"model": "any", "messages": [{"role": "user", "content": "one"}]}
PNG = "data:image/png;base64,iVBORw0KGgo="


@asynccontextmanager
async def upstream(status, said):
    """A service that always answers so; its address and the bodies that it was sent."""
    bodies = []

    async def answer(request):
        bodies.append(await request.json())
        return web.json_response(said, status=status)

    application = web.Application()
    application.router.add_post(CHAT, answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1", bodies
    finally:
        await runner.cleanup()


@asynccontextmanager
async def in_front_of(url, **settings):
    """Live traffic that the service at this address answers."""
    config = OpenAIEngineConfig(url=url, model="m", retries=1, **settings)
    service = OpenAIEngine(config, first_wait_s=0.001)
    live = LiveTraffic(ChatEpisodePolicy(service, SamplingParams()), CONFIG, folder=None, idle_s=60)
    async with live:
        yield live.gateway.url
    await service.close()


@pytest.fixture
def behind(renderer):
    """Make an engine whose samples do not repeat, behind live traffic; with the requests that it gets."""

    def make(script=None, **options):
        requests = []

        def play(request):
            requests.append(request)
            return [*renderer.encoder.encode("it is so"), renderer.boundary.end_id]

        engine = ScriptedEngine(script=script or play, vocab_size=400, max_context=1000)
        engine.capabilities = replace(engine.capabilities, seeded=False, **options)
        policy = EngineEpisodePolicy(engine, renderer, SamplingParams(), trains=False)
        return LiveTraffic(policy, CONFIG, folder=None, idle_s=60), requests

    return make


PERMANENT = {400: 400, 401: 401, 403: 403, 404: 404, 413: 413, 422: 422, 501: 501}
PASSING = {408: 503, 409: 503, 425: 503, 429: 429, 500: 503, 502: 503, 503: 503, 529: 503}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "told"), (PERMANENT | PASSING).items())
async def test_only_transient_errors_are_retried(status, told, stream):
    said = {"error": {"message": "the reason of the service"}}
    async with (
        upstream(status, said) as (url, _),
        in_front_of(url) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.APIStatusError, match="the reason of the service") as failure:
            await client.chat.completions.create(**QUESTION, stream=stream)
    assert failure.value.status_code == told
    headers = failure.value.response.headers
    expected = {"retry-after": "2"} if status in PASSING else {"x-should-retry": "false"}
    assert {name: headers[name] for name in ("retry-after", "x-should-retry") if name in headers} == expected


@pytest.mark.parametrize(("status", "told"), [(400, 400), (404, 404), (429, 429), (500, 503)])
async def test_an_inference_servers_refusal_keeps_its_status(behind, status, told):
    def refuse(request):
        raise ServerStatusError("http://127.0.0.1:1/generate", status, "the reason of the server")

    live, _ = behind(refuse)
    async with live:
        found, said = await post(live.gateway.url + CHAT, "", QUESTION)
    assert (found, "the reason of the server" in said["error"]["message"]) == (told, True)


async def test_an_evaluation_through_a_gateway_whose_engine_has_no_seeds_is_answered(behind, caplog):
    live, requests = behind()
    async with live:
        config = OpenAIEngineConfig(url=f"{live.gateway.url}/v1", model="m", retries=0)
        client = OpenAIEngine(config)
        params = SamplingParams(seed=7, temperature=0.5, max_tokens=9)
        with caplog.at_level(logging.WARNING):
            answers = [(await client.chat([user("one")], [], params, "r")).message.text for _ in range(2)]
        await client.close()
    assert answers == ["it is so"] * 2
    assert [(request.params.seed, request.params.temperature) for request in requests] == [(7, 0.5)] * 2
    assert sum("seed" in record.message for record in caplog.records) == 1


async def test_a_service_gets_the_clients_seed_and_names():
    said = {"choices": [{"message": {"role": "assistant", "content": "so"}, "finish_reason": "stop"}]}
    speakers = [{"role": "user", "content": f"I am {name}", "name": name} for name in ("ann", "bob")]
    async with upstream(200, said) as (url, bodies), in_front_of(url) as gateway:
        assert (await post(gateway + CHAT, "", {"model": "m", "messages": speakers, "seed": 11}))[0] == 200
    assert (bodies[0]["seed"], bodies[0]["messages"]) == (11, speakers)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        # vllm#35438: a schema that is not nested as the API requires
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.json_schema"),
    ],
)
async def test_a_form_that_a_service_cannot_enforce_is_refused_and_ends_no_session(fields, named):
    said = {"choices": [{"message": {"role": "assistant", "content": "so"}, "finish_reason": "stop"}]}
    async with upstream(200, said) as (url, bodies), in_front_of(url) as gateway:
        status, refused = await post(gateway + CHAT, "", QUESTION | fields)
        assert (status, refused["error"]["param"], bodies) == (400, named, [])
        assert (await post(gateway + CHAT, "", QUESTION))[0] == 200


async def test_an_image_that_the_model_cannot_see_is_refused_and_ends_no_session(behind):
    live, _ = behind()
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": PNG}}]
    async with live:
        status, said = await post(
            live.gateway.url + CHAT, "", {"model": "m", "messages": [{"role": "user", "content": parts}]}
        )
        assert (status, said["error"]["param"]) == (400, "messages")
        assert (await post(live.gateway.url + CHAT, "", QUESTION))[0] == 200


@pytest.mark.parametrize(("temperature", "asked"), [(0, 1), (0.3, 8)])
async def test_a_form_that_is_missed_is_asked_for_again_only_where_answers_differ(behind, temperature, asked):
    live, requests = behind()
    async with live:
        form = {"response_format": {"type": "json_object"}, "temperature": temperature}
        status, said = await post(live.gateway.url + CHAT, "", QUESTION | form)
    assert (status, said["error"]["code"], len(requests)) == (400, "form_missed", asked)


@pytest.mark.parametrize("name", ["policy", "my-model", "org/their-model"])
async def test_every_model_is_found(behind, name):
    live, _ = behind()
    async with live:
        async with openai.AsyncOpenAI(base_url=f"{live.gateway.url}/v1", api_key="x") as client:
            assert (await client.models.retrieve(name)).id == name
            assert [model.id async for model in client.models.list()] == ["policy"]
        async with anthropic.AsyncAnthropic(base_url=live.gateway.url, api_key="x") as client:
            assert (await client.models.retrieve(name)).display_name == name
            assert [model.id async for model in client.models.list()] == ["policy"]


async def test_a_message_of_another_speaker_is_another_message(played, renderer, caplog):
    async def play(gateway, session):
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key, max_retries=0) as client:

            async def ask(*messages):
                return (await client.chat.completions.create(model="m", messages=messages)).choices[0].message

            first = {"role": "user", "content": "one", "name": "ann"}
            answer = await ask(first)
            await ask(first, answer, {"role": "user", "content": "two"})
            await ask({**first, "name": "bob"}, answer, {"role": "user", "content": "three"})
            with pytest.raises(openai.BadRequestError, match="name must be"):
                await ask({**first, "name": "ann<|im_end|>"})
        assert {messages[0].name for messages, _ in session.conversations()} == {"ann", "bob"}

    trajectory, _ = await played(play, "it is so")
    assert [len(sequence.turns) for sequence in trajectory.sequences] == [2, 1]
    assert sum("does not show names" in record.message for record in caplog.records) == 1
