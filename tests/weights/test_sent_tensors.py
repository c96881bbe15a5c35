"""Transports that send tensors, to servers that have real weights and faults on command."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch
from support.local_worker import decode_parts

from agentrl.engine import TensorLayout
from agentrl.errors import EngineError, ServersLost, TrainingError
from agentrl.weights import CollectiveTransport, IpcTransport, TensorTransport
from agentrl.weights.collective import GroupMember, TrainerGroup, address_towards
from agentrl.weights.tensors import pack, unpack

BUCKET_BYTES = 20_000
TRANSPORTS = {
    "tensor": lambda: TensorTransport(bucket_bytes=BUCKET_BYTES),
    "cuda_ipc": lambda: IpcTransport(bucket_bytes=BUCKET_BYTES),
    "collective": lambda: CollectiveTransport(bucket_bytes=BUCKET_BYTES, timeout_s=10.0),
}


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return TRANSPORTS[request.param]()


@pytest.fixture
def collective():
    return CollectiveTransport(bucket_bytes=BUCKET_BYTES, timeout_s=1.0)


@pytest.fixture(autouse=True)
def local_addresses(monkeypatch):
    """Servers inside this process have addresses that are no hosts."""
    monkeypatch.setattr("agentrl.weights.collective.address_towards", lambda url: "127.0.0.1")


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(6, 4, generator=generator)
    return {
        "a": whole,
        "half": torch.randn(3, generator=generator).bfloat16(),
        "tied": whole,
        "part": whole[2:4],
        "turned": whole.t(),
        "count": torch.tensor(7),
    }


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10_000])
def test_buckets_hold_every_tensor_once_within_their_size(tensors, bucket_bytes):
    buckets = pack(tensors, bucket_bytes=bucket_bytes)
    found = unpack(buckets)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert all(found[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert all(bucket.run.nbytes <= bucket_bytes or len(bucket.layout.names) == 1 for bucket in buckets)
    assert len(buckets) == {1: 6, 100: 6, 10_000: 3}[bucket_bytes]


def test_a_bucket_is_never_larger_by_a_byte():
    weights = {"a": torch.zeros(1), "b": torch.zeros(1)}
    assert [len(pack(weights, bucket_bytes=size)) for size in (7, 8)] == [2, 1]


def test_buckets_do_not_change_with_the_tensors(tensors):
    [first, *_] = pack(tensors, bucket_bytes=10_000)
    before = tensors["a"].clone()
    tensors["a"].zero_()
    assert torch.equal(dict(first.tensors())["a"], before)


async def test_weights_in_a_single_bucket_are_opened(world_of):
    world = await world_of(transport=IpcTransport(bucket_bytes=1 << 30), count=1)
    assert (await world.next_version()).probe_difference < 1e-5


async def test_encoding_overhead_is_small():
    weights = {str(number): torch.randn(1000) for number in range(10)}
    [bucket] = pack(weights, bucket_bytes=1 << 20)

    async def part():
        return bucket.encode()

    assert len(await part()) < 1.5 * 40_000
    assert all(torch.equal(weights[name], tensor) for name, tensor in (await decode_parts([part])).items())


async def test_syncs_with_requests_in_flight_are_exact(world_of, until, transport):
    world = await world_of(transport=transport)
    async with world.asked_meanwhile() as answers:
        for _ in range(5):
            report = await world.next_version()
            assert (report.servers, report.bytes) == (2, sum(t.nbytes for t in world.trainer.past[0].values()))
            before = len(answers)
            await until(lambda before=before: len(answers) > before)
    assert max(world.trainer.largest_difference(prompt, answer) for prompt, answer in answers) < 1e-4
    assert any(len(set(answer.versions)) > 1 for _, answer in answers)


async def test_returning_server_gets_the_latest_weights(world_of, until, transport):
    world = await world_of(transport=transport)
    await world.next_version()
    world.trainer.learn()  # the trainer is already ahead when the server comes back
    world.servers[0].kill()
    await until(lambda: world.restarted and world.restarted[0] in world.pool.servers)
    state = world.restarted[0].model.state_dict()
    assert all(torch.equal(tensor, world.trainer.past[1][name]) for name, tensor in state.items())
    assert (await world.next_version()).servers == 2


async def test_server_that_dies_in_a_broadcast_breaks_only_its_update(world_of, until, collective):
    world = await world_of(transport=collective)
    await world.next_version()
    world.servers[0].faults.dies = True
    report = await world.next_version()
    assert report.servers == 1
    assert differ(world.servers[1].model.state_dict(), world.trainer.past[2]) == []
    await until(lambda: len(world.pool.servers) == 2)
    assert differ(world.restarted[0].model.state_dict(), world.trainer.past[2]) == []
    assert (await world.next_version()).servers == 2


@pytest.mark.parametrize("hears", [0, 2])
@pytest.mark.slow
async def test_a_server_that_stops_listening_is_given_up_and_meets_the_trainer_anew(world_of, until, collective, hears):
    world = await world_of(transport=collective, restartable=False)
    await world.next_version()
    world.servers[0].faults.hears = hears
    assert (await world.next_version()).servers == 1
    world.servers[0].faults.hears = None
    await until(lambda: len(world.pool.servers) == 2)
    assert differ(world.servers[0].model.state_dict(), world.trainer.past[2]) == []
    assert (await world.next_version()).servers == 2


async def test_a_server_that_does_not_come_to_the_meeting_is_taken_out(world_of, collective, monkeypatch):
    world = await world_of(transport=collective, count=1, restartable=False)

    async def stays_away(group):
        raise EngineError("no time")

    closed, close = [], TrainerGroup.close
    monkeypatch.setattr(TrainerGroup, "close", lambda group: closed.append(group) or close(group))
    monkeypatch.setattr(world.servers[0], "join_group", stays_away)
    with pytest.raises(ServersLost, match="no server is left"):
        await world.next_version()
    assert closed


async def test_prepare_copies_the_tensors_and_reports_the_duration(tensors, transport):
    prepared = await transport.prepare(tensors, 4)
    for tensor in tensors.values():
        tensor.zero_()
    assert (prepared.version, prepared.size) == (4, sum(tensor.nbytes for tensor in tensors.values()))
    assert 0 < prepared.seconds < 60
    assert prepared.tensors()["count"] == 7
    await transport.close()


async def test_a_skipped_tensor_is_caught(world_of, transport):
    world = await world_of(transport=transport)
    world.servers[1].faults.skips.add("model.layers.1.self_attn.v_proj.weight")
    with pytest.raises(TrainingError, match="server local://1 does not serve the trainer's weights of version 1"):
        await world.next_version()


def test_the_trainer_listens_where_the_server_reaches_it():
    assert address_towards("http://127.0.0.1:8000") == address_towards("http://127.0.0.1") == "127.0.0.1"


async def test_a_meeting_that_ends_after_the_group_was_closed_leaves_nothing_open(monkeypatch):
    group = TrainerGroup("http://127.0.0.1:1", workers=1, device=torch.device("cpu"), timeout_s=5)
    closed, aborted = threading.Event(), []

    def meet_late(info, store, *, rank):
        closed.wait()
        return SimpleNamespace(abort=lambda: aborted.append(1))

    monkeypatch.setattr("agentrl.weights.collective.make_group", meet_late)
    meeting = asyncio.create_task(group.join())
    await asyncio.sleep(0)
    group.close()
    closed.set()
    await meeting
    assert aborted == [1]


async def test_member_reports_a_failed_join_or_broadcast(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("closed by the peer")

    member = GroupMember()
    monkeypatch.setattr("agentrl.weights.collective._join_as_worker", broken)
    with pytest.raises(EngineError, match="the trainer's group was not joined: got closed by the peer"):
        await member.join(SimpleNamespace(backend="gloo"))
    member._group = SimpleNamespace(broadcast=broken)
    with pytest.raises(EngineError, match="the broadcast broke off: got closed by the peer"):
        await member.receive_bucket(TensorLayout(names=["a"], dtype="float32", shapes=[[2]]))


async def test_trainer_reports_a_failed_broadcast(monkeypatch):
    def broken(*_):
        raise RuntimeError("closed by the peer")

    group = TrainerGroup("http://127.0.0.1:1", workers=1, device=torch.device("cpu"), timeout_s=5)
    monkeypatch.setattr(group, "_send", broken)
    with pytest.raises(EngineError, match="a broadcast of weights broke off: got closed by the peer"):
        await group.broadcast(torch.zeros(2))
    group.close()


async def test_groups_are_left_with_their_servers_in_the_end(world_of, collective, monkeypatch):
    world = await world_of(transport=collective)
    await world.next_version()
    left, groups = [], list(collective._groups.values())

    async def leave(group):
        left.append(group.name)
        raise EngineError("not now")

    for server in world.servers:
        monkeypatch.setattr(server, "leave_group", leave)
    await world.sync.close()
    await world.sync.close()
    assert len(set(left)) == len(left) == 2
    assert [group._closed for group in groups] == [True, True]


async def test_lack_of_memory_for_shared_buckets_is_reported(tensors, monkeypatch):
    def full(_):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr("agentrl.weights.tensors.share", full)
    with pytest.raises(TrainingError, match="cannot be copied for the servers: got CUDA out of memory"):
        await TRANSPORTS["cuda_ipc"]().prepare(tensors, 4)


async def test_a_late_failure_leaves_a_newer_group_alone(world_of, collective, monkeypatch):
    world = await world_of(transport=collective, count=1)
    await world.next_version()
    server, newer = world.servers[0], SimpleNamespace(close=lambda: None)
    old = collective._groups[server]

    async def fails_late(*_):
        collective._groups[server] = newer
        raise EngineError("too late")

    monkeypatch.setattr(server, "receive_weights", fails_late)
    with pytest.raises(EngineError, match="too late"):
        await collective.send(torch.device("cpu"), server, [], 3)
    assert (collective._groups.pop(server), old._closed) == (newer, True)


def differ(first, second):
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
