"""The client of vLLM against a server that speaks its format; tests/engines has the real one."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentrl.config.engines import VLLMEngineConfig
from agentrl.engine import ServerLost, StopReason
from agentrl.errors import EngineError, UsageError
from agentrl.serving.vllm import VLLMServer
from agentrl.serving.vllm.wire import WORKER_EXTENSION

UNCUT = {
    "model_config": {"logprobs_mode": "processed_logprobs"},
    "parallel_config": {"worker_extension_cls": WORKER_EXTENSION},
}


class FakeVLLM:
    """Answers at once with tokens 1, 2, …, or holds requests until they are aborted."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.paused = False
        self.label = "default"
        self.holding = False
        self.held: dict[str, asyncio.Event] = {}
        self.arrived = asyncio.Event()
        self.healthy = True
        self.deaf_to_aborts = 0
        self.answers: dict[str, web.Response] = {}
        """Answers of routes that differ from vLLM's."""
        self.config = UNCUT
        self.logprob = -2.0

    async def handle(self, request):
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path_qs, body))
        if (answer := self.answers.get(request.path)) is not None:
            return web.Response(status=answer.status, text=answer.text)
        return await getattr(self, request.path.strip("/").replace("/", "_"))(request, body)

    async def health(self, request, body):
        return web.Response(status=200 if self.healthy else 503)

    async def version(self, request, body):
        return web.json_response({"version": "0.32.0"})

    async def v1_models(self, request, body):
        return web.json_response({"data": [{"id": "policy", "max_model_len": 64}]})

    async def server_info(self, request, body):
        return web.json_response({"vllm_config": self.config})

    async def inference_v1_generate(self, request, body):
        params, name = body["sampling_params"], body.get("request_id", "")
        count, finish = params["max_tokens"], "length"
        if self.holding:
            self.held[name] = asyncio.Event()
            self.arrived.set()
            await self.held[name].wait()
            count, finish = 3, "abort"
        choice = {
            "finish_reason": finish,
            "token_ids": list(range(1, count + 1)),
            "weight_versions": [{"version": self.label, "start": 0, "end": count}],
            "logprobs": {"content": [{"token_id": i + 1, "logprob": self.logprob} for i in range(count)]},
        }
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}})

    async def inference_v1_abort_requests(self, request, body):
        if self.deaf_to_aborts:
            self.deaf_to_aborts -= 1
        else:
            for name in body["request_ids"]:
                if event := self.held.get(name.removeprefix("generate-tokens-")):
                    event.set()
        return web.Response()

    async def pause(self, request, body):
        self.paused = True
        return web.json_response({"status": "paused"})

    async def resume(self, request, body):
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def is_paused(self, request, body):
        return web.json_response({"is_paused": self.paused})

    async def collective_rpc(self, request, body):
        return web.json_response({"results": [None]})

    async def reset_prefix_cache(self, request, body):
        return web.json_response({"success": True})

    async def update_weight_version(self, request, body):
        self.label = body["new_version"]
        return web.json_response({"success": True, "new_version": self.label})

    async def weight_info(self, request, body):
        return web.json_response({"weight_version": self.label})


@asynccontextmanager
async def serving(fake, *, connect=True, **settings):
    """The fake on a port of its own, and a client of it."""
    application = web.Application()
    application.router.add_route("*", "/{route:.*}", fake.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    server = VLLMServer(f"http://127.0.0.1:{port}/", VLLMEngineConfig(**settings), vocab_size=10)
    try:
        if connect:
            await server.connect(deadline_s=10)
            fake.calls.clear()
        yield server
    finally:
        await server.close()
        for event in fake.held.values():
            event.set()
        await runner.cleanup()


async def test_connecting_learns_the_context_and_asks_for_no_more_than_it_may(request_of):
    fake = FakeVLLM()
    async with serving(fake, max_context=20) as server:
        assert (server.capabilities.max_context, server.capabilities.vocab_size) == (20, 10)
        answer = await server.generate(request_of([1, 2], "a", max_tokens=50))
    assert (len(answer.token_ids), answer.versions[0], answer.cached_tokens) == (18, 0, 1)
    assert answer.stop_reason is StopReason.LENGTH


async def test_requests_name_the_adapter_that_was_loaded(request_of, tmp_path):
    fake = FakeVLLM()
    fake.config = {**UNCUT, "lora_config": {"max_lora_rank": 8}}
    fake.answers["/v1/load_lora_adapter"] = web.Response(text="Success: loaded")
    async with serving(fake, adapter_rank=4) as server:
        await server.generate(request_of([1, 2], "before"))
        with pytest.raises(EngineError, match="is not paused"):
            await server.load_adapter(tmp_path, 2)
        await server.pause()
        for version in (3, 4):
            await server.load_adapter(tmp_path, version)
        await server.resume()
        await server.generate(request_of([1, 2], "after"))
    named = [body.get("model") for path, body in fake.calls if path == "/inference/v1/generate"]
    assert named == [None, "policy-adapter"]
    assert [path for path, _ in fake.calls].count("/v1/load_lora_adapter") == 1


@pytest.mark.parametrize(("rank", "name"), [(4, "policy-adapter"), (None, None)])
async def test_an_adapter_that_an_earlier_run_loaded_is_used_if_adapters_are(request_of, rank, name):
    fake = FakeVLLM()
    fake.config = {**UNCUT, "lora_config": {"max_lora_rank": 8}}
    base = {"id": "base", "max_model_len": 512}
    fake.answers["/v1/models"] = web.Response(
        text=json.dumps({"data": [base, {**base, "id": "policy-adapter", "parent": "policy"}]})
    )
    async with serving(fake, adapter_rank=rank) as server:
        await server.generate(request_of([1, 2], "a"))
    assert [body.get("model") for path, body in fake.calls if path == "/inference/v1/generate"] == [name]


@pytest.mark.parametrize(
    "models", [{}, {"data": []}, {"data": [{"id": "a"}]}, {"data": [{"id": "a", "max_model_len": "?"}]}]
)
async def test_a_server_that_does_not_tell_its_context_is_refused(models):
    fake = FakeVLLM()
    fake.answers["/v1/models"] = web.json_response(models)
    async with serving(fake, connect=False) as server:
        with pytest.raises(EngineError, match="does not report its maximum context"):
            await server.connect(deadline_s=10)


@pytest.mark.parametrize(("found", "told"), [(None, "no --enable-lora"), ({"max_lora_rank": 8}, "--max-lora-rank 8")])
async def test_a_server_that_takes_no_such_adapters_is_refused(found, told):
    fake = FakeVLLM()
    fake.config = {**UNCUT, "lora_config": found}
    async with serving(fake, connect=False, adapter_rank=16) as server:
        with pytest.raises(UsageError, match=f"does not accept adapters of rank 16: got {told}"):
            await server.connect(deadline_s=10)


async def test_requests_have_names_of_their_own_at_the_server(request_of):
    fake = FakeVLLM()
    async with serving(fake) as server:
        for _ in range(2):
            await server.generate(request_of([1], "a", max_tokens=1))
    first, second = (body["request_id"] for _, body in fake.calls)
    assert first.startswith("a-")
    assert first != second


@pytest.mark.parametrize(
    ("prompt", "params"),
    [([], {}), ([10], {}), ([-1], {}), ([1] * 64, {}), ([1], {"max_tokens": 0})],
    ids=["empty", "above", "below", "too long", "no tokens"],
)
async def test_what_cannot_be_served_is_not_sent(request_of, prompt, params):
    fake = FakeVLLM()
    async with serving(fake) as server:
        with pytest.raises(UsageError):
            await server.generate(request_of(prompt, **params))
    assert fake.calls == []


async def test_a_running_request_cannot_run_again(request_of):
    fake = FakeVLLM()
    async with serving(fake) as server:
        fake.holding = True
        task = asyncio.ensure_future(server.generate(request_of([1], "a")))
        await fake.arrived.wait()
        with pytest.raises(UsageError, match="already running"):
            await server.generate(request_of([1], "a"))
        assert await server.abort("a")
        await task


async def test_an_abort_gives_what_there_is_and_is_repeated_until_it_takes(request_of):
    fake = FakeVLLM()
    async with serving(fake) as server:
        fake.holding, fake.deaf_to_aborts = True, 2
        task = asyncio.ensure_future(server.generate(request_of([1], "a", max_tokens=9)))
        await fake.arrived.wait()
        assert await server.abort("a")
        answer = await task
        assert not await server.abort("a")
        assert not await server.abort("b")
    assert (answer.token_ids, answer.stop_reason) == ([1, 2, 3], StopReason.ABORT)
    aborts = [body for path, body in fake.calls if path == "/inference/v1/abort_requests"]
    (name,) = fake.held
    assert aborts == [{"request_ids": [f"generate-tokens-{name}"]}] * 3


async def test_new_weights_are_read_while_paused_and_named_last(request_of, tmp_path):
    fake = FakeVLLM()
    async with serving(fake) as server:
        assert await server.weight_version() == 0
        with pytest.raises(EngineError, match="is not paused"):
            await server.load_weights(tmp_path, 7)
        fake.calls.clear()
        await server.pause()
        await server.load_weights(tmp_path, 7)
        await server.resume()
        assert [call for call in fake.calls if call[1] is not None or "?" in call[0] or call[0] == "/resume"] == [
            ("/pause?mode=keep&clear_cache=false", None),
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}),
            ("/reset_prefix_cache?reset_running_requests=true&reset_external=true", None),
            ("/update_weight_version", {"new_version": "7"}),
            ("/resume", None),
        ]
        assert await server.weight_version() == 7
        assert set((await server.generate(request_of([1], "a", max_tokens=3))).versions) == {7}


@pytest.mark.parametrize(
    ("route", "response", "message"),
    [
        ("/collective_rpc", web.Response(status=500, text="no such folder"), "no such folder"),
        ("/reset_prefix_cache", web.Response(text='{"success": false}'), "did not clear the cache of the old weights"),
    ],
)
async def test_a_failed_update_is_an_engine_error(route, response, message, tmp_path):
    fake = FakeVLLM()
    fake.answers[route] = response
    async with serving(fake) as server:
        await server.pause()
        with pytest.raises(EngineError, match=message):
            await server.load_weights(tmp_path, 7)


async def test_a_server_that_does_not_report_its_weight_version_is_an_engine_error():
    fake = FakeVLLM()
    fake.answers["/weight_info"] = web.Response(text="{}")
    async with serving(fake) as server:
        with pytest.raises(EngineError, match="does not report its weight version"):
            await server.weight_version()


async def test_an_error_of_a_server_that_has_failed_loses_it(request_of):
    fake = FakeVLLM()
    async with serving(fake) as server:
        fake.answers["/inference/v1/generate"] = web.Response(status=500, text="EngineCore encountered an issue")
        with pytest.raises(EngineError, match="returned an error: got 500") as found:
            await server.generate(request_of([1], "a"))
        assert not isinstance(found.value, ServerLost)
        fake.healthy = False
        with pytest.raises(ServerLost, match="has failed"):
            await server.generate(request_of([1], "a"))
        assert not await server.is_healthy(deadline_s=10)


async def test_what_the_server_finds_wrong_with_a_request_is_a_usage_error(request_of):
    fake = FakeVLLM()
    async with serving(fake) as server:
        fake.answers["/inference/v1/generate"] = web.Response(status=400, text="temperature must be in [0, 2]")
        with pytest.raises(UsageError, match="temperature must be in"):
            await server.generate(request_of([1], "a", temperature=3.0))


async def test_a_late_answer_does_not_lose_the_server(request_of):
    fake = FakeVLLM()
    async with serving(fake, timeout_s=0.1) as server:
        fake.holding = True
        with pytest.raises(EngineError, match="missed its deadline") as found:
            await server.generate(request_of([1], "a"))
        assert not isinstance(found.value, ServerLost)
        assert await server.is_healthy(deadline_s=10)


async def test_log_probabilities_that_are_not_those_promised_are_refused(request_of):
    fake = FakeVLLM()
    fake.config = {"model_config": {"logprobs_mode": "raw_logprobs"}, "parallel_config": {"worker_extension_cls": ""}}
    async with serving(fake) as server:
        await server.generate(request_of([1], "a", top_k=3))
        with pytest.raises(UsageError, match="log-probabilities at temperature 1"):
            await server.generate(request_of([1], "a", temperature=0.5))


async def test_a_worker_that_does_not_do_what_it_was_told_is_found_out(request_of):
    fake = FakeVLLM()
    fake.logprob = 0.0
    async with serving(fake) as server:
        with pytest.raises(UsageError, match="log-probabilities after truncation"):
            await server.generate(request_of([1], "a", top_k=3))
        await server.generate(request_of([1], "a", temperature=0.5))


@pytest.mark.parametrize(
    ("route", "response", "message"),
    [
        ("/inference/v1/generate", web.Response(status=403, text="disabled"), "--enable-scale-out"),
        ("/inference/v1/generate", web.Response(status=401, text="no"), "refuses the key"),
        ("/server_info", web.Response(status=404, text="Not Found"), "VLLM_SERVER_DEV_MODE=1"),
        ("/is_paused", web.Response(text='{"is_paused": true}'), r"is paused.*/resume"),
        ("/inference/v1/generate", web.Response(text='{"choices": [{}]}'), r"too old: got 0\.32\.0"),
    ],
)
async def test_a_server_that_cannot_work_says_what_to_change(route, response, message):
    fake = FakeVLLM()
    fake.answers[route] = response
    async with serving(fake, connect=False) as server:
        with pytest.raises(UsageError, match=message):
            await server.connect(deadline_s=10)


@pytest.mark.parametrize(
    ("settings", "told", "message"),
    [
        (
            {"transport": "collective"},
            {"weight_transfer_config": {"backend": "agentrl"}},
            "not accept weights by transport collective",
        ),
        (
            {"transport": "cuda_ipc"},
            {"weight_transfer_config": {"backend": "agentrl"}},
            "does not accept weights by transport cuda_ipc",
        ),
        ({"sleep": True}, {"device_config": {"device": "cpu"}}, "Start it with --enable-sleep-mode"),
    ],
)
async def test_what_the_config_asks_of_updates_is_checked_at_once(settings, told, message):
    fake = FakeVLLM()
    async with serving(fake, connect=False, **settings) as server:
        with pytest.raises(UsageError, match=message):
            await server.connect(deadline_s=10)
        fake.config = UNCUT | told
        await server.connect(deadline_s=10)


async def test_an_old_vllm_and_another_program_are_told_apart():
    fake = FakeVLLM()
    fake.answers["/server_info"] = web.Response(status=404)
    fake.answers["/version"] = web.Response(text='{"version": "0.9.2+cpu"}')
    async with serving(fake, connect=False) as server:
        with pytest.raises(UsageError, match=r"too old: got 0\.9\.2\+cpu, expected 0\.32 or newer"):
            await server.connect(deadline_s=10)
        fake.answers["/version"] = web.Response(status=404)
        with pytest.raises(UsageError, match="is not a vLLM server"):
            await server.connect(deadline_s=10)
        fake.answers["/health"] = web.Response(status=404, text="no such page")
        with pytest.raises(
            UsageError, match=r"/health is not a route of vLLM: got 404, 'no such page'.*without a path such as /v1"
        ):
            await server.connect(deadline_s=600)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "1.0.0rc1+cu129"])
async def test_a_vllm_that_is_new_enough_lacks_a_setting(version):
    fake = FakeVLLM()
    fake.answers["/server_info"] = web.Response(status=404)
    fake.answers["/version"] = web.json_response({"version": version})
    async with serving(fake, connect=False) as server:
        with pytest.raises(UsageError, match="VLLM_SERVER_DEV_MODE=1"):
            await server.connect(deadline_s=10)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_a_server_that_starts_behind_a_proxy_is_waited_for(status):
    fake = FakeVLLM()
    fake.answers["/health"] = web.Response(status=status)
    async with serving(fake, connect=False) as server:
        with pytest.raises(ServerLost, match=f"did not become ready.*{status}"):
            await server.connect(deadline_s=0.05)


async def test_a_server_that_does_not_become_ready_is_lost():
    fake = FakeVLLM()
    fake.healthy = False
    async with serving(fake, connect=False) as server:
        with pytest.raises(ServerLost, match=r"did not become ready in 0\.2 s.*503"):
            await server.connect(deadline_s=0.2)


async def test_a_client_that_is_not_connected_says_so(request_of):
    async with serving(FakeVLLM(), connect=False) as server:
        with pytest.raises(EngineError, match="is not connected"):
            await server.generate(request_of([1]))


async def test_closing_ends_what_runs(request_of):
    fake = FakeVLLM()
    async with serving(fake) as server:
        fake.holding = True
        task = asyncio.ensure_future(server.generate(request_of([1], "a")))
        await fake.arrived.wait()
        await server.close()
        with pytest.raises(EngineError, match="closed during a request"):
            await task
        await server.close()


async def test_memory_is_not_opened_by_several_workers():
    fake = FakeVLLM()
    fake.answers["/get_world_size"] = web.Response(text='{"world_size": 2}')
    async with serving(fake) as server:
        with pytest.raises(UsageError, match=r"several processes.*engine\.transport"):
            await server.open_weights([], 1)
        assert all("update" not in str(call) for call in fake.calls)
