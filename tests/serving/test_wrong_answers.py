"""Real HTTP servers whose answers are damaged: every damage is a failure of that server, and none is anything else."""

import asyncio
import copy
import dataclasses
import itertools
import json
import math
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentrl.config.engines import OpenAIEngineConfig, SGLangEngineConfig, VLLMEngineConfig
from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.errors import EngineError, ServersLost
from agentrl.message import user
from agentrl.serving.openai import OpenAIEngine
from agentrl.serving.pool import PoolSettings, ServerPool
from agentrl.serving.pool.member import BreakerState
from agentrl.serving.sglang import SGLangServer
from agentrl.serving.sglang.wire import NEEDED_ROUTES
from agentrl.serving.vllm import VLLMServer
from agentrl.serving.vllm.wire import WORKER_EXTENSION

VOCAB_SIZE = 50
TOKENS = 3
METRICS = {
    "vllm": "".join(
        f"vllm:{name}{{}} 0\n"
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "num_preemptions_total",
            "prompt_tokens_total",
            "prompt_tokens_cached_total",
            "generation_tokens_total",
            "kv_cache_usage_perc",
        )
    ),
    "sglang": "sglang:num_running_reqs 0.0\nsglang:num_queue_reqs 0.0\n",
}
SPANS = [{"version": "default", "start": 0, "end": TOKENS}]
RIGHT = {
    "vllm": {
        "choices": [
            {
                "finish_reason": "length",
                "token_ids": [4, 5, 6],
                "weight_versions": SPANS,
                "logprobs": {"content": [{"logprob": -2.0}, {"logprob": -2.0}, {"logprob": -2.0}]},
            }
        ],
        "usage": {"prompt_tokens_details": {"cached_tokens": 1}},
    },
    "sglang": {
        "output_ids": [4, 5, 6],
        "meta_info": {
            "finish_reason": {"type": "length"},
            "weight_versions": SPANS,
            "output_token_logprobs": [[-2.0], [-2.0], [-2.0]],
            "cached_tokens": 1,
            "queue_time": 0.5,
            "forward_entry_time": 1.0,
            "prefill_finished_time": 2.0,
            "request_finished_ts": 3.0,
        },
    },
}
IDS = {"vllm": ["choices", 0, "token_ids"], "sglang": ["output_ids"]}
VERSIONS = {"vllm": ["choices", 0, "weight_versions"], "sglang": ["meta_info", "weight_versions"]}
LOGPROB = {
    "vllm": ["choices", 0, "logprobs", "content", 1, "logprob"],
    "sglang": ["meta_info", "output_token_logprobs", 1, 0],
}


class DamagedServer:
    """Server of both engines' formats that answers requests for tokens with `body`, after a correct handshake."""

    def __init__(self, kind):
        self.kind = kind
        self.body = json.dumps(RIGHT[kind])

    async def handle(self, request):
        sent = await request.json() if request.can_read_body else {}
        if request.path == "/metrics":
            return web.Response(text=METRICS[self.kind])
        if sent.get("request_id") or sent.get("rid"):
            return web.Response(text=self.body, content_type="application/json")
        if "logit_bias" in sent.get("sampling_params", {}):
            said = f"logit_bias must has keys in [0, {VOCAB_SIZE - 1}], got 2147483647."
            return web.json_response({"error": {"message": said}}, status=400)
        parallel = {"worker_extension_cls": WORKER_EXTENSION}
        probe = -sent.get("sampling_params", {}).get("temperature", 1.0)
        span = {"version": "default", "start": 0, "end": 1}
        probed = {
            "choices": [{"weight_versions": [span], "logprobs": {"content": [{"logprob": -2.0}]}}],
            "meta_info": {"weight_versions": [span], "output_token_logprobs": [[probe, 1, None]]},
        }
        bodies = {
            "/v1/models": {"data": [{"id": "policy", "max_model_len": 64}]},
            "/is_paused": {"is_paused": False},
            "/weight_info": {"weight_version": "default"},
            "/openapi.json": {"paths": {route: {} for route in NEEDED_ROUTES}},
            "/model_info": {"is_generation": True, "weight_version": "default"},
            "/server_info": {
                "version": "0.5.23",
                "enable_metrics": True,
                "max_req_input_len": 63,
                "vllm_config": {
                    "model_config": {"logprobs_mode": "processed_logprobs"},
                    "parallel_config": parallel,
                },
            },
            "/v1/loads": {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.5}]},
            "/inference/v1/generate": probed,
            "/generate": probed,
        }
        return web.json_response(bodies.get(request.path, {}))


@asynccontextmanager
async def pool_of(kind, **settings):
    """Return a pool with one damaged server, and that server."""
    server = DamagedServer(kind)
    application = web.Application()
    application.router.add_route("*", "/{route:.*}", server.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    if kind == "vllm":
        client = VLLMServer(url, VLLMEngineConfig(), vocab_size=VOCAB_SIZE)
    else:
        client = SGLangServer(url, SGLangEngineConfig())
    pool = ServerPool([client], PoolSettings(**{"breaker_failures": 10_000, "resubmissions": 0, **settings}))
    try:
        await pool.start()
        yield pool, server
    finally:
        await pool.close()
        await runner.cleanup()


_names = itertools.count()


def request_of():
    name = f"r{next(_names)}"
    params = SamplingParams(max_tokens=TOKENS, stop_token_ids=frozenset({9}))
    return GenerateRequest(prompt_ids=[1, 2], params=params, session_id="s", request_id=name)


def replaced(body, path, value):
    """Return a copy of a body with another value at a path; a deleted one if the value is `DELETED`."""
    body = copy.deepcopy(body)
    *way, last = path
    inner = body
    for key in way:
        inner = inner[key]
    if value is DELETED:
        del inner[last]
    else:
        inner[last] = value
    return body


def paths_of(body, path=()):
    """Return the paths of all fields, the outer ones first."""
    if path:
        yield path
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in inner:
        yield from paths_of(value, (*path, key))


DELETED = object()
HUGE = 12345.678  # written as a number that no float holds
DAMAGES = [DELETED, None, True, "x", "nan", -1, 0.5, 50, 10**6, 2**62, HUGE, [], {}, [[]], {"a": 1}, "stop", "abort"]


def written(body):
    return json.dumps(body).replace(str(HUGE), "1e999")


@pytest.mark.parametrize("kind", RIGHT)
async def test_every_damage_of_every_field_is_an_engine_error_or_touches_nothing_that_is_stored(kind):
    right = RIGHT[kind]
    async with pool_of(kind) as (pool, server):
        refused = 0
        for path, damage in itertools.product(paths_of(right), DAMAGES):
            server.body = written(replaced(right, path, damage))
            try:
                answer = await asyncio.wait_for(pool.generate(request_of()), 60)
            except EngineError:
                refused += 1
                if not pool.servers:  # lost with weights of another version, until they are loaded again
                    await pool.group.wait_for_server(deadline_s=10)
                continue
            assert answer.token_ids == ([damage, 5, 6] if path == (*IDS[kind], 0) else [4, 5, 6])
            assert {*answer.versions} == {0}
            assert all(-math.inf < logprob <= 0 for logprob in answer.logprobs)
            assert 0 <= answer.cached_tokens <= 2
        assert refused > 150
        server.body = json.dumps(right)
        assert (await pool.generate(request_of())).token_ids == [4, 5, 6]


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize(
    ("paths", "damage", "message"),
    [
        (IDS, [4, 5, 10**6], "got token id 1000000, expected a whole number from 0 to 49"),
        (IDS, [4, -1, 6], "got token id -1, expected"),
        (IDS, [4, 5.0, 6], r"got token id 5\.0, expected"),
        (IDS, [4, 5], "cover the answer"),
        (IDS, "456", "got token id '4'"),
        (LOGPROB, 0.7, "log-probability 0.7 of token 5"),
        (LOGPROB, "nan", "log-probability nan of token 5"),
        (LOGPROB, "-inf", "log-probabilit"),
        (LOGPROB, None, "not a generation"),
        (VERSIONS, [{"version": "default", "start": 0, "end": 10**12}], "cover the answer"),
        (VERSIONS, [{"version": "main", "start": 0, "end": 3}], "unknown version"),
    ],
)
async def test_a_wrong_answer_counts_against_its_server(kind, paths, damage, message):
    async with pool_of(kind, breaker_failures=2, breaker_open_s=60) as (pool, server):
        server.body = written(replaced(RIGHT[kind], paths[kind], damage))
        for _ in range(2):
            assert pool.group.members[0].breaker.state is BreakerState.CLOSED
            with pytest.raises(EngineError, match=message):
                await pool.generate(request_of())
        assert pool.group.members[0].breaker.state is BreakerState.OPEN


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("version", ["7", "-1"])
async def test_a_server_with_weights_that_were_never_sent_is_removed_in_the_end(kind, version):
    async with pool_of(kind, attempts=2, resubmissions=9, retry_s=0.01) as (pool, server):
        spans = [{"version": version, "start": 0, "end": TOKENS}]
        server.body = written(replaced(RIGHT[kind], VERSIONS[kind], spans))
        with pytest.raises(
            ServersLost, match=rf"no server is left: .*weights of version \[{version}\], expected 0 to 0"
        ):
            await asyncio.wait_for(pool.generate(request_of()), 60)


CHAT = {
    "choices": [
        {
            "finish_reason": "stop",
            "message": {
                "content": "yes",
                "reasoning_content": "well",
                "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": "{}"}}],
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}


async def test_every_damage_of_a_chat_completion_is_an_engine_error_or_an_answer_of_the_right_types():
    body = ""

    async def answer(request):
        return web.Response(text=body, content_type="application/json")

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
    service = OpenAIEngine(OpenAIEngineConfig(url=url, model="m", retries=0))
    refused = 0
    for path, damage in itertools.product(paths_of(CHAT), DAMAGES):
        body = written(replaced(CHAT, path, damage))
        try:
            found = await service.chat([user("?")], [], SamplingParams(), "r")
        except EngineError:
            refused += 1
            continue
        assert isinstance(found.message.content, str)
        assert isinstance(found.message.reasoning, str | None)
        assert all(isinstance(part, str) for call in found.message.tool_calls for part in (call.name, call.id))
        assert all(isinstance(call.arguments, dict) for call in found.message.tool_calls)
        assert 0 <= found.prompt_tokens < 2**31
        assert 0 <= found.answer_tokens < 2**31
    await service.close()
    await runner.cleanup()
    assert refused > 50


async def test_a_failure_in_a_listener_of_streamed_tokens_is_an_engine_error():
    async with pool_of("vllm") as (pool, server):
        server.body = 'data: {"choices": [{"token_ids": [-1]}]}\n\ndata: [DONE]\n\n'

        def fail(ids):
            raise OverflowError(ids)

        with pytest.raises(EngineError, match=r"OverflowError: \[-1\]"):
            await pool.generate(dataclasses.replace(request_of(), on_tokens=fail))
