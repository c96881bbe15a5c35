"""Updates of weights at SGLang: with sessions, as from 0.5.21 on, and without, as before."""

from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentrl.engine import TensorLayout, UpdateGroup
from agentrl.errors import EngineError
from agentrl.serving.http import HttpSession, ServerStatusError
from agentrl.serving.sglang.server import SGLangUpdates

LAYOUTS = [
    TensorLayout(names=["a", "b"], dtype="float32", shapes=[[2, 3], [4]]),
    TensorLayout(names=["c"], dtype="bfloat16", shapes=[[]]),
]
GROUP = UpdateGroup(name="g", address="127.0.0.1", port=1234, size=3, backend="gloo", timeout_s=5)
CHANGES = ("/update_weights_from_tensor", "/update_weights_from_distributed")


class FakeUpdates:
    """Takes updates as SGLang does: inside a session where it has them, and not two sessions at once."""

    def __init__(self, has_sessions):
        self.has_sessions = has_sessions
        self.is_open = False
        self.calls = []
        self.refusals = []
        """Messages of refusals of the next changes; accepted when empty, and for ``None``."""

    async def handle(self, request):
        body = await request.json()
        self.calls.append((request.path, body))
        answer, status = self.answer(request.path)
        return web.json_response(answer, status=status)

    def answer(self, path):
        if path in ("/begin_weight_update", "/end_weight_update"):
            begins = path.startswith("/begin")
            if not self.has_sessions or self.is_open is begins:
                return {"success": False, "message": "no"}, 400 if self.has_sessions else 404
            self.is_open = begins
        elif path in CHANGES and self.has_sessions and not self.is_open:
            return {"success": False, "message": "must run between begin and end"}, 400
        elif path in CHANGES and self.refusals and (message := self.refusals.pop(0)) is not None:
            return {"success": False, "message": message}, 400
        elif path == "/weights_checker":
            return {"success": True, "ranks": [{"checksums": {"a": "0123"}}]}, 200
        return {"success": True, "message": ""}, 200


@asynccontextmanager
async def updating(has_sessions, workers=1):
    fake = FakeUpdates(has_sessions)
    application = web.Application(client_max_size=1 << 20)
    application.router.add_post("/{path:.*}", fake.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    http = HttpSession(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
    try:
        yield fake, SGLangUpdates(http, timeout_s=10, has_sessions=has_sessions, workers=workers)
    finally:
        await http.close()
        await runner.cleanup()


async def first():
    return "Zmlyc3Q="


async def second():
    return "c2Vjb25k"


def inside(has_sessions, changes):
    return [("/begin_weight_update", {}), *changes, ("/end_weight_update", {})] if has_sessions else changes


@pytest.mark.parametrize("has_sessions", [True, False])
async def test_tensors_are_sent_part_by_part_and_the_last_one_publishes(has_sessions):
    async with updating(has_sessions, workers=2) as (fake, updates):
        await updates.from_tensors([first, second], 7)
    parts = [
        {"serialized_named_tensors": ["Zmlyc3Q="] * 2, "flush_cache": False},
        {"serialized_named_tensors": ["c2Vjb25k"] * 2, "flush_cache": True, "weight_version": "7"},
    ]
    assert fake.calls == inside(has_sessions, [("/update_weights_from_tensor", part) for part in parts])


@pytest.mark.parametrize("has_sessions", [True, False])
async def test_a_broadcast_is_announced_run_by_run(has_sessions):
    sent = []

    async def broadcast(number):
        sent.append(number)

    async with updating(has_sessions) as (fake, updates):
        await updates.from_broadcast(LAYOUTS, GROUP, broadcast, 8)
    runs = [
        {
            "names": ["a", "b"],
            "dtypes": ["float32", "float32"],
            "shapes": [[2, 3], [4]],
            "group_name": "g",
            "load_format": "flattened_bucket",
            "flush_cache": False,
        },
        {
            "names": ["c"],
            "dtypes": ["bfloat16"],
            "shapes": [[]],
            "group_name": "g",
            "load_format": "flattened_bucket",
            "flush_cache": True,
            "weight_version": "8",
        },
    ]
    assert sent == [0, 1]
    assert fake.calls == inside(has_sessions, [("/update_weights_from_distributed", run) for run in runs])


async def test_a_failure_leaves_no_session_behind():
    async with updating(True) as (fake, updates):
        fake.refusals = [None, "Failed to update parameter online"]
        with pytest.raises(ServerStatusError, match="Failed to update"):
            await updates.from_tensors([first, second], 7)
        assert not fake.is_open
        await updates.from_tensors([first], 8)


async def test_a_session_that_a_dead_trainer_left_is_ended():
    async with updating(True) as (fake, updates):
        fake.is_open = True
        await updates.from_tensors([first], 8)
        assert not fake.is_open
    paths = [path.removesuffix("_weight_update") for path, _ in fake.calls]
    assert paths == ["/begin", "/end", "/begin", "/update_weights_from_tensor", "/end"]


async def test_a_broadcast_that_breaks_off_ends_the_update():
    async def broadcast(number):
        raise EngineError("a broadcast of weights broke off")

    async with updating(True) as (fake, updates):
        with pytest.raises(EngineError, match="broke off"):
            await updates.from_broadcast(LAYOUTS, GROUP, broadcast, 8)
        assert not fake.is_open


async def test_joining_sleeping_and_checksums():
    async with updating(True) as (fake, updates):
        await updates.join_group(GROUP)
        await updates.sleep()
        await updates.wake_up()
        assert await updates.checksums() == {"a": "0123"}
    assert fake.calls == [
        (
            "/init_weights_update_group",
            {
                "master_address": "127.0.0.1",
                "master_port": 1234,
                "rank_offset": 1,
                "world_size": 3,
                "group_name": "g",
                "backend": "gloo",
            },
        ),
        ("/release_memory_occupation", {}),
        ("/resume_memory_occupation", {}),
        ("/weights_checker", {"action": "checksum"}),
    ]


async def test_leaving_a_group():
    async with updating(True) as (fake, updates):
        await updates.leave_group(GROUP)
    assert fake.calls == [("/destroy_weights_update_group", {"group_name": "g"})]


async def test_checksums_of_parts_of_tensors_are_not_told():
    async with updating(True, workers=2) as (_, updates):
        assert await updates.checksums() == {}
