"""The client of SGLang, against a server of the test's own that speaks the recorded wire format."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentrl.config.engines import SGLangEngineConfig
from agentrl.engine import GenerateRequest, SamplingParams, ServerLost, StopReason, UpdateGroup
from agentrl.errors import EngineError, UsageError
from agentrl.serving.sglang import SGLangServer
from agentrl.serving.sglang import server as server_module
from agentrl.serving.sglang.wire import NEEDED_ROUTES

VOCAB_SIZE = 50
MAX_CONTEXT = 40
METRICS = "sglang:num_running_reqs 0.0\nsglang:num_queue_reqs 2.0\nsglang:generation_tokens_total 9.0\n"


SERVER_INFO = {"version": "0.5.23", "enable_metrics": True, "max_req_input_len": MAX_CONTEXT}


class FakeSGLang:
    """Answers each request with as many tokens as it may have; holds those of prompts that begin with 49."""

    def __init__(self):
        self.version = "default"
        self.routes = set(NEEDED_ROUTES)
        self.generated = []
        """Bodies of the requests for tokens, without those of the handshake."""
        self.calls = []
        """Paths of everything else."""
        self.held = {}
        """By wire id: set to the finish reason when a held request is to end."""
        self.arrived = asyncio.Event()
        """A request is held."""
        self.abort_arrived = asyncio.Event()
        self.ends = []
        """Reasons to end the next requests with, after two tokens each."""
        self.update_answers = []
        """Statuses and messages of the next updates; 200 when empty."""
        self.hears_aborts = True
        self.starting = 0
        self.strange = False
        self.temperatures = []
        self.workers = 1
        """How often it says that it is not ready."""

    def application(self):
        application = web.Application()
        application.router.add_post("/generate", self.generate)
        application.router.add_get("/metrics", self.metrics)
        application.router.add_route("*", "/{path:.*}", self.control)
        return application

    async def metrics(self, _):
        return web.Response(text=METRICS)

    async def control(self, request):
        path = request.path
        self.calls.append(path)
        if self.strange:
            return web.json_response({}, status=404)
        if path == "/model_info" and self.starting:
            self.starting -= 1
            return web.json_response({}, status=503)
        if path == "/update_weights_from_disk":
            return self.update(await request.json())
        if path == "/abort_request":
            self.abort_arrived.set()
        if path == "/abort_request" and self.hears_aborts:
            self.held[(await request.json())["rid"]].set_result({"type": "abort", "message": "asked"})
        bodies = {
            "/openapi.json": {"paths": {route: {} for route in self.routes}},
            "/model_info": {"is_generation": True, "weight_version": self.version},
            "/server_info": {
                "version": "0.5.23",
                "enable_metrics": True,
                "tp_size": self.workers,
                "max_req_input_len": MAX_CONTEXT,
            },
            "/v1/loads": {"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": 0.5}]},
        }
        return web.json_response(bodies.get(path, {}))

    def update(self, body):
        status, message = self.update_answers.pop(0) if self.update_answers else (200, "Succeeded.")
        if status == 200:
            self.version = body["weight_version"]
        return web.json_response({"success": status == 200, "message": message}, status=status)

    async def generate(self, request):
        body = await request.json()
        params = body["sampling_params"]
        if "logit_bias" in params:
            said = f"logit_bias must has keys in [0, {VOCAB_SIZE - 1}], got 2147483647."
            return web.json_response({"error": {"message": said}}, status=400)
        if "rid" in body:
            self.generated.append(body)
        self.temperatures.append(params["temperature"])
        count, reason = params["max_new_tokens"], {"type": "length", "length": params["max_new_tokens"]}
        if body["input_ids"][0] == 49:
            self.held[body["rid"]] = asyncio.get_running_loop().create_future()
            self.arrived.set()
            count, reason = 2, await self.held[body["rid"]]
        elif self.ends:
            count, reason = 2, self.ends.pop(0)
        return web.json_response(self.tokens(count, reason, params["temperature"]))

    def tokens(self, count, reason, temperature):
        ids = list(range(count))
        meta = {
            "finish_reason": reason,
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
            "output_token_logprobs": [[-temperature, token, None] for token in ids],
            "cached_tokens": 0,
        }
        return {"text": "", "output_ids": ids, "meta_info": meta}


@asynccontextmanager
async def serving(connect=True, vocab_size=None, **settings):
    """The fake server, and a client that is connected to it."""
    fake = FakeSGLang()
    runner = web.AppRunner(fake.application(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    client = SGLangServer(f"http://127.0.0.1:{port}/", SGLangEngineConfig(**settings), vocab_size=vocab_size)
    try:
        if connect:
            await client.connect(deadline_s=10)
            fake.calls.clear()
        yield fake, client
    finally:
        await client.close()
        await runner.cleanup()


def _request(*prompt, name="r", **params):
    settings = SamplingParams(**{"max_tokens": 3} | params)
    return GenerateRequest(prompt_ids=list(prompt), params=settings, session_id=name, request_id=name)


def _start(client, *prompt, **params):
    return asyncio.create_task(client.generate(_request(*prompt, **params)))


async def test_connecting_waits_for_the_server_and_learns_its_limits():
    async with serving(connect=False) as (fake, client):
        fake.starting = 2
        await client.connect(deadline_s=10)
        assert (client.capabilities.max_context, client.capabilities.vocab_size) == (MAX_CONTEXT, VOCAB_SIZE)
        assert not client.capabilities.seeded
        assert "/continue_generation" in fake.calls  # it may have been left paused
        assert fake.temperatures == [1.0, 0.5]


async def test_the_config_may_shorten_the_context():
    async with serving(max_context=20) as (_, client):
        assert client.capabilities.max_context == 20
        with pytest.raises(UsageError, match="does not fit"):
            await client.generate(_request(*[1] * 20))


async def test_a_version_without_a_route_and_another_vocabulary_are_refused():
    async with serving(connect=False, vocab_size=51) as (fake, client):
        with pytest.raises(UsageError, match="another vocabulary: got 50 ids, expected 51"):
            await client.connect(deadline_s=10)
        fake.routes.remove("/v1/loads")
        with pytest.raises(UsageError, match="has no /v1/loads"):
            await client.connect(deadline_s=10)


async def test_another_program_is_told_at_once():
    async with serving(connect=False) as (fake, client):
        fake.strange = True
        with pytest.raises(UsageError, match=r"/model_info is not a route of SGLang: got 404.*[Cc]heck engine.type"):
            await client.connect(deadline_s=600)


async def test_a_server_that_does_not_become_ready_is_lost():
    async with serving(connect=False) as (fake, client):
        fake.starting = 10**6
        with pytest.raises(EngineError, match="503"):
            await client.connect(deadline_s=0.1)


async def test_an_answer():
    async with serving() as (fake, client):
        answer = await client.generate(_request(5, 6, max_tokens=3, temperature=0.5))
    assert (answer.token_ids, answer.logprobs, answer.versions) == ([0, 1, 2], [-0.5] * 3, [0] * 3)
    assert answer.stop_reason is StopReason.LENGTH
    assert fake.generated[0]["input_ids"] == [5, 6]


async def test_what_would_kill_the_server_is_not_sent():
    async with serving() as (fake, client):
        with pytest.raises(UsageError, match="outside the vocabulary"):
            await client.generate(_request(VOCAB_SIZE))
    assert fake.generated == []


async def test_an_end_token_of_the_models_own_does_not_end_an_answer():
    async with serving() as (fake, client):
        fake.ends = [{"type": "stop", "matched": 1}, {"type": "stop", "matched": 1}, {"type": "stop", "matched": 7}]
        answer = await client.generate(_request(5, max_tokens=9, stop_token_ids=frozenset({7})))
        assert (answer.token_ids, answer.stop_reason) == ([0, 1] * 3, StopReason.STOP)
        sent = [(body["input_ids"], body["sampling_params"]["max_new_tokens"]) for body in fake.generated]
        assert sent == [([5], 9), ([5, 0, 1], 7), ([5, 0, 1, 0, 1], 5)]
        fake.ends = [{"type": "stop", "matched": 1}]
        answer = await client.generate(_request(5, max_tokens=2, stop_token_ids=frozenset({7})))
        assert (answer.token_ids, answer.stop_reason) == ([0, 1], StopReason.LENGTH)


async def test_an_abort_gives_the_tokens_so_far_and_waits_for_them():
    async with serving() as (fake, client):
        task = _start(client, 49)
        await fake.arrived.wait()
        assert await client.abort("r")
        answer = await task
        assert (answer.token_ids, answer.stop_reason) == ([0, 1], StopReason.ABORT)
        assert not await client.abort("r")


async def test_an_abort_between_two_parts_keeps_the_first():
    async with serving() as (fake, client):
        fake.ends = [{"type": "stop", "matched": 1}]
        task = _start(client, 49, stop_token_ids=frozenset({7}))
        await fake.arrived.wait()
        (wire_id,) = fake.held
        fake.hears_aborts = False
        abort = asyncio.create_task(client.abort("r"))
        await fake.abort_arrived.wait()
        fake.held[wire_id].set_result({"type": "stop", "matched": 1})
        assert await abort
        answer = await task
        assert (answer.token_ids, answer.stop_reason) == ([0, 1], StopReason.ABORT)
        assert len(fake.generated) == 1


async def test_an_abort_that_the_server_forgets_ends_the_request_here(monkeypatch):
    monkeypatch.setattr(server_module, "ABORT_WAITS_S", (0.01, 0.01))
    async with serving() as (fake, client):
        fake.hears_aborts = False
        task = _start(client, 49)
        await fake.arrived.wait()
        assert await client.abort("r")
        answer = await task
        assert (answer.token_ids, answer.stop_reason) == ([], StopReason.ABORT)
        assert fake.calls.count("/abort_request") == 2


async def test_names_at_the_server_are_no_beginnings_of_one_another():
    async with serving() as (fake, client):
        await asyncio.gather(*(client.generate(_request(1, name=f"r{'1' * i}")) for i in range(5)))
        names = [body["rid"] for body in fake.generated]
    assert len(set(names)) == 5
    assert len({len(name) for name in names}) == 1


async def test_an_abort_that_was_not_asked_for_is_an_error():
    async with serving() as (fake, client):
        fake.ends = [{"type": "abort", "message": "Out of memory"}]
        with pytest.raises(EngineError, match=r"without being asked to.*Out of memory"):
            await client.generate(_request(5))


async def test_cancelling_the_caller_aborts_its_request():
    async with serving() as (fake, client):
        task = _start(client, 49)
        await fake.arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (held,) = fake.held.values()
        assert (await held)["type"] == "abort"
        assert (await client.generate(_request(5))).token_ids == [0, 1, 2]  # its name is free again


async def test_what_the_config_asks_of_updates_is_checked_at_once():
    async with serving(connect=False, transport="collective") as (fake, client):
        with pytest.raises(UsageError, match="has no /init_weights_update_group"):
            await client.connect(deadline_s=10)
        fake.routes |= {"/init_weights_update_group", "/update_weights_from_distributed"}
        await client.connect(deadline_s=10)


async def test_requests_that_come_during_a_pause_wait_here():
    async with serving() as (fake, client):
        await client.pause()
        assert fake.calls == ["/pause_generation", "/server_info"]
        late, aborted = _start(client, 5, name="late"), _start(client, 6, name="aborted")
        await asyncio.sleep(0)
        assert await client.abort("aborted")
        assert (await aborted).stop_reason is StopReason.ABORT
        assert fake.generated == []
        await client.resume()
        assert (await late).token_ids == [0, 1, 2]
        assert [body["input_ids"] for body in fake.generated] == [[5]]


async def test_weights_and_their_version():
    async with serving() as (_, client):
        assert await client.weight_version() == 0
        await client.pause()
        await client.load_weights("/weights", 4)
        await client.resume()
        assert await client.weight_version() == 4
        assert (await client.generate(_request(5))).versions == [4, 4, 4]


NOT_FLUSHED = (400, "Weights were updated, but the cache was not flushed because requests are still running or queued.")


async def test_weights_that_were_taken_without_a_flush_are_given_again_after_another_pause():
    async with serving() as (fake, client):
        fake.update_answers = [NOT_FLUSHED]
        await client.load_weights("/weights", 4)
        assert [path for path in fake.calls if path != "/server_info"] == [
            "/update_weights_from_disk",
            "/pause_generation",
            "/update_weights_from_disk",
        ]
        assert await client.weight_version() == 4


@pytest.mark.parametrize("answers", [[(400, "no such folder")], [NOT_FLUSHED, NOT_FLUSHED]])
async def test_weights_that_were_not_taken_are_an_error(answers):
    async with serving() as (fake, client):
        fake.update_answers = list(answers)
        with pytest.raises(EngineError, match=answers[-1][1][:20]):
            await client.load_weights("/weights", 4)
        assert await client.weight_version() == 0


@pytest.mark.parametrize("workers", [1, 2])
async def test_memory_is_opened_by_one_worker_only(workers):
    async with serving(connect=False) as (fake, client):
        fake.workers = workers
        await client.connect(deadline_s=10)
        if workers == 1:
            await client.open_weights([], 1)
        else:
            with pytest.raises(UsageError, match=r"several processes.*engine\.transport"):
                await client.open_weights([], 1)


async def test_a_group_is_joined_and_left():
    group = UpdateGroup(name="g", address="127.0.0.1", port=1234, size=2, backend="gloo", timeout_s=30)
    async with serving() as (fake, client):
        await client.join_group(group)
        await client.leave_group(group)
        assert fake.calls == ["/init_weights_update_group", "/destroy_weights_update_group"]


async def test_the_load_while_running_and_while_paused():
    async with serving() as (_, client):
        load = await client.load()
        assert (load.running, load.waiting, load.sampled_tokens) == (1, 0, 9)
        await client.pause()
        load = await client.load()
        assert (load.running, load.waiting) == (0, 2)


async def test_closing_ends_what_runs_and_what_waits():
    async with serving() as (fake, client):
        running = _start(client, 49, name="running")
        await fake.arrived.wait()
        await client.pause()
        waiting = _start(client, 5, name="waiting")
        await asyncio.sleep(0)
        await client.close()
        for task in (running, waiting):
            with pytest.raises(EngineError, match="closed"):
                await task
        assert not client._endings
        await client.close()


async def test_a_server_that_is_gone_is_lost_and_not_healthy():
    async with serving() as (_, client):
        assert await client.is_healthy(deadline_s=10)
    gone = SGLangServer(client.url, SGLangEngineConfig())
    gone.capabilities = client.capabilities
    with pytest.raises(ServerLost):
        await gone.generate(_request(5))
    assert not await gone.is_healthy(deadline_s=10)
    await gone.close()
