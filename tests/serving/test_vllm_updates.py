"""Updates of weights at vLLM."""

from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentrl.engine import SharedTensors, TensorLayout, UpdateGroup
from agentrl.errors import EngineError
from agentrl.serving.http import HttpSession, ServerStatusError
from agentrl.serving.vllm.command import WORKER_PATH
from agentrl.serving.vllm.server import EXCHANGE, VLLMUpdates
from agentrl.serving.vllm.wire import ADAPTER, decode_checksums

LAYOUTS = [
    TensorLayout(names=["a", "b"], dtype="float32", shapes=[[2, 3], [4]]),
    TensorLayout(names=["c"], dtype="bfloat16", shapes=[[]]),
]
GROUP = UpdateGroup(name="g", address="127.0.0.1", port=1234, size=2, backend="gloo", timeout_s=5)


class FakeUpdates:
    """Takes updates as vLLM does: between a start and a finish; a failed part ends the update."""

    def __init__(self):
        self.is_open = False
        self.calls = []
        self.fails = False
        self.resets = True

    async def handle(self, request):
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path_qs, body))
        status = 200
        if request.path in ("/start_weight_update", "/finish_weight_update", "/update_weights"):
            starts = request.path.startswith("/start")
            status = 500 if self.is_open is starts or (self.fails and request.path == "/update_weights") else 200
            self.is_open = (starts or request.path == "/update_weights") if status == 200 else starts
        answers = {
            "/reset_prefix_cache": {"success": self.resets},
            "/get_world_size": {"world_size": 2},
            "/weight_checker": {"checksums": {"dp0:pp0:pcp0:tp0:a": "0123456789abcdef0000"}},
        }
        return web.json_response(answers.get(request.path, {}), status=status)


@pytest.fixture
async def updating():
    @asynccontextmanager
    async def serve():
        fake = FakeUpdates()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", fake.handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        http = HttpSession(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        try:
            yield fake, VLLMUpdates(http, timeout_s=10)
        finally:
            await http.close()
            await runner.cleanup()

    return serve


async def test_a_broadcast_is_announced_run_by_run_and_then_published(updating):
    sent = []

    async def broadcast(number):
        sent.append(number)

    async with updating() as (fake, updates):
        await updates.from_broadcast(LAYOUTS, broadcast, 8)
    runs = [
        {"names": ["a", "b"], "dtype": "float32", "shapes": [[2, 3], [4]], "handle": None},
        {"names": ["c"], "dtype": "bfloat16", "shapes": [[]], "handle": None},
    ]
    assert sent == [0, 1]
    assert fake.calls == [
        ("/start_weight_update", None),
        *(("/update_weights", {"update_info": run}) for run in runs),
        ("/finish_weight_update", {}),
        ("/reset_prefix_cache?reset_running_requests=true&reset_external=true", None),
        ("/update_weight_version", {"new_version": "8"}),
    ]


@pytest.mark.parametrize("is_first", [True, False])
async def test_an_adapter_is_named_once_and_then_exchanged(updating, is_first, tmp_path):
    async with updating() as (fake, updates):
        updates._loaded = ["other"] if is_first else ["other", ADAPTER]
        await updates.from_adapters({ADAPTER: tmp_path}, 8)
    named = [("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(tmp_path)})]
    assert fake.calls == [
        *(named if is_first else []),
        ("/collective_rpc", {"method": EXCHANGE, "kwargs": {"folder": str(tmp_path), "number": 2}}),
        ("/reset_prefix_cache?reset_running_requests=true&reset_external=true", None),
        ("/update_weight_version", {"new_version": "8"}),
    ]
    assert f"def {EXCHANGE}(self, folder" in (WORKER_PATH / "agentrl_vllm_adapter.py").read_text()


async def test_memory_is_named_run_by_run_and_then_published(updating):
    async def part():
        raise AssertionError("vLLM takes no pickles")

    shared = [SharedTensors(layout=layout, handle=lambda: {"name": "torch_1"}, part=part) for layout in LAYOUTS]
    async with updating() as (fake, updates):
        await updates.from_memory(shared, 8)
    routes, bodies = zip(*fake.calls, strict=True)
    assert routes[0] == "/start_weight_update"
    assert [body["update_info"]["handle"] for body in bodies[1:3]] == [{"name": "torch_1"}] * 2
    assert routes[3] == "/finish_weight_update"
    assert bodies[-1] == {"new_version": "8"}


async def test_a_failure_leaves_no_update_behind_and_publishes_nothing(updating):
    async def broadcast(number):
        return

    async with updating() as (fake, updates):
        fake.fails = True
        with pytest.raises(ServerStatusError):
            await updates.from_broadcast(LAYOUTS, broadcast, 8)
        fake.fails = False
        assert not any(path == "/update_weight_version" for path, _ in fake.calls)
        await updates.from_broadcast(LAYOUTS, broadcast, 8)


async def test_an_update_that_a_dead_trainer_left_is_finished(updating):
    async def broadcast(number):
        return

    async with updating() as (fake, updates):
        fake.is_open = True
        await updates.from_broadcast(LAYOUTS, broadcast, 8)
        assert fake.calls[-1] == ("/update_weight_version", {"new_version": "8"})
        assert not fake.is_open


async def test_a_broadcast_that_breaks_off_ends_the_update(updating):
    async def broadcast(number):
        raise EngineError("a broadcast of weights broke off")

    async with updating() as (fake, updates):
        with pytest.raises(EngineError, match="broke off"):
            await updates.from_broadcast(LAYOUTS, broadcast, 8)
        assert not fake.is_open


async def test_a_cache_that_stays_is_an_error(updating):
    async def broadcast(number):
        return

    async with updating() as (fake, updates):
        fake.resets = False
        with pytest.raises(EngineError, match="did not clear the cache of the old weights"):
            await updates.from_broadcast(LAYOUTS, broadcast, 8)


async def test_joining_and_checksums(updating):
    async with updating() as (fake, updates):
        assert await updates.workers() == 2
        await updates.join_group(GROUP)
        assert await updates.checksums() == {"a": "0123456789abcdef"}
    info = {"name": "g", "address": "127.0.0.1", "port": 1234, "size": 2, "backend": "gloo", "timeout_s": 5}
    assert fake.calls == [
        ("/get_world_size", None),
        ("/init_weight_transfer_engine", {"init_info": info}),
        ("/weight_checker", {"action": "checksum"}),
    ]


async def test_the_cache_which_vllm_goes_on_with_wakes_last_and_once(updating):
    async with updating() as (fake, updates):
        await updates.wake_cache()
        await updates.sleep()
        await updates.wake_up()
        assert [path for path, _ in fake.calls] == ["/sleep?level=2&mode=keep", "/wake_up?tags=weights"]
        await updates.wake_cache()
        await updates.wake_cache()
        assert [path for path, _ in fake.calls[2:]] == ["/wake_up?tags=kv_cache"]


def test_checksums_of_packed_tensors_and_of_parts_of_tensors_are_left_out():
    packed = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert decode_checksums({"checksums": {"tp0:a": "1" * 64, "tp0:b": packed}}) == {"a": "1" * 16}
    assert decode_checksums({"checksums": {"tp0:a": "1" * 64, "tp1:a": "2" * 64}}) == {}
    with pytest.raises(EngineError, match="does not report the checksums"):
        decode_checksums({"error": "no"})
