"""Weight sync with servers that have real weights and faults on command."""

import asyncio
import time

import pytest
import torch

from agentrl.errors import ServersLost, TrainingError


def differ(first, second):
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


async def test_the_first_verification_sends_the_weights_and_proves_the_path(world_of):
    world = await world_of()
    assert await world.sync.verify() < 1e-5
    written = list(world.transport.path.iterdir())
    assert [folder.name for folder in written] == ["version-0.1"]
    await world.sync.verify()
    assert list(world.transport.path.iterdir()) == written
    world.trainer.learn()
    with pytest.raises(TrainingError, match="server local://0 does not serve the trainer's weights of version 0"):
        await world.sync.verify()


@pytest.mark.parametrize("tied", [True, False])
async def test_every_server_gets_every_tensor_and_the_report_has_the_durations(world_of, tied):
    world = await world_of(tied=tied)
    began = time.perf_counter()
    report = await world.next_version()
    assert report.transport_s + report.verify_s <= time.perf_counter() - began
    state = world.trainer.model.state_dict()
    assert [differ(server.model.state_dict(), state) for server in world.servers] == [[], []]
    assert (report.version, report.servers, world.pool.version) == (1, 2, 1)
    assert report.bytes == sum(tensor.nbytes for tensor in state.values())
    assert min(report.prepare_s, report.load_s, report.verify_s) > 0
    assert report.prepare_s + report.load_s <= report.transport_s
    assert report.probe_difference < 1e-5


async def test_weights_are_loaded_while_requests_are_held_and_published_before_they_go_on(world_of, monkeypatch):
    world = await world_of()
    calls = []

    def record(owner, name):
        real = getattr(owner, name)

        def recorded(*args, **options):
            label = getattr(owner, "url", "group")
            calls.append((name, label))
            return real(*args, **options)

        monkeypatch.setattr(owner, name, recorded)

    for server in world.servers:
        for name in ("pause", "load_weights", "resume", "generate"):
            record(server, name)
    record(world.pool.group, "publish")
    prepare = world.transport.prepare

    async def prepared(*args):
        assert not world.pool.group.is_paused, "requests go on while weights are prepared"
        return await prepare(*args)

    monkeypatch.setattr(world.transport, "prepare", prepared)
    await world.next_version()
    on_each = {
        server.url: [name for name, owner in calls if owner in (server.url, "group")][:4] for server in world.servers
    }
    assert set(map(tuple, on_each.values())) == {("pause", "load_weights", "publish", "resume")}
    assert [name for name, owner in calls if owner == "local://1"][3:] == ["generate"] * len(world.probe.prompts)


@pytest.mark.parametrize("tied", [True, False])
async def test_five_syncs_with_requests_in_flight_are_exact(world_of, until, tied):
    world = await world_of(tied=tied)
    async with world.asked_meanwhile() as answers:
        for _ in range(5):
            await world.next_version()
            before = len(answers)
            await until(lambda before=before: len(answers) > before)
    assert max(world.trainer.largest_difference(prompt, answer) for prompt, answer in answers) < 1e-4
    assert all(len(answer.token_ids) == 40 and answer.resubmissions == 0 for _, answer in answers)
    spans = [answer for _, answer in answers if len(set(answer.versions)) > 1]
    assert len(spans) >= 3
    assert all(answer.versions == sorted(answer.versions) for answer in spans)
    assert {version for _, answer in answers for version in answer.versions} - {0} == set(range(1, 6))


async def test_a_skipped_tensor_is_caught_and_named_with_its_server(world_of):
    world = await world_of()
    world.servers[1].faults.skips.add("model.layers.1.self_attn.v_proj.weight")
    with pytest.raises(
        TrainingError, match="server local://1 does not serve the trainer's weights of version 1"
    ) as told:
        await world.next_version()
    assert told.value.hint == "tensors that differ by checksum: model.layers.1.self_attn.v_proj.weight"


async def test_the_search_for_wrong_tensors_is_not_under_the_deadline_of_the_probe(world_of, monkeypatch):
    world = await world_of(count=1)
    server = world.servers[0]
    server.faults.skips.add("model.norm.weight")
    tasks, real = [], server.checksums

    async def checksums():
        tasks.append(asyncio.current_task().get_name())
        return await real()

    monkeypatch.setattr(server, "checksums", checksums)
    asyncio.current_task().set_name("the sync itself")
    with pytest.raises(TrainingError, match="does not serve"):
        await world.next_version()
    assert tasks == ["the sync itself"]


async def test_stale_head_of_a_tied_model_is_detected(world_of):
    world = await world_of(count=1, tied=True)
    world.servers[0].faults.skips.add("lm_head.weight")
    with pytest.raises(TrainingError, match="server local://0 does not serve"):
        await world.next_version()


async def test_a_server_that_only_claims_the_update_is_caught(world_of):
    world = await world_of()
    world.servers[0].faults.ignores = True
    with pytest.raises(TrainingError, match="server local://0 does not serve"):
        await world.next_version()


@pytest.mark.parametrize("fault", ["refuses", "keeps_version"])
async def test_server_that_fails_to_update_is_removed_and_returns_updated(world_of, until, fault):
    world = await world_of()
    setattr(world.servers[0].faults, fault, True)
    report = await world.next_version()
    assert report.servers == 1
    await until(lambda: len(world.pool.servers) == 2)
    assert world.pool.servers == [world.restarted[0], world.servers[1]]
    assert differ(world.restarted[0].model.state_dict(), world.trainer.past[1]) == []
    assert await world.restarted[0].weight_version() == 1


async def test_attached_server_that_rejects_weights_never_serves_stale_weights(world_of, until):
    world = await world_of(restartable=False)
    world.servers[0].faults.refuses = True
    await world.next_version()
    await until(lambda: world.pool.group.members[0].state.value == "removed")
    answers = await asyncio.gather(*(world.pool.generate(world.request(f"r{i}", max_tokens=5)) for i in range(6)))
    assert {version for answer in answers for version in answer.versions} == {1}
    assert world.pool.servers == [world.servers[1]]
    assert (await world.next_version()).servers == 1


async def test_a_server_that_is_started_again_has_the_current_weights_before_it_serves(world_of, until):
    world = await world_of()
    await world.next_version()
    await world.next_version()
    world.trainer.learn()  # the trainer is already ahead when the server comes back
    requests = [world.request(f"r{i}", prompt=[i, 5], max_tokens=200) for i in range(1, 7)]
    tasks = [asyncio.create_task(world.pool.generate(request)) for request in requests]
    await until(lambda: all(server._engine.metrics().sampled_tokens > 40 for server in world.servers))
    world.servers[0].kill()
    await until(lambda: world.restarted and world.restarted[0] in world.pool.servers)
    assert differ(world.restarted[0].model.state_dict(), world.trainer.past[2]) == []
    later = [world.request(f"l{i}", prompt=[i, 6], max_tokens=20) for i in range(6)]
    tasks += [asyncio.create_task(world.pool.generate(request)) for request in later]
    answers = await asyncio.gather(*tasks)
    assert {version for answer in answers for version in answer.versions} == {2}
    assert sum(answer.resubmissions for answer in answers) == 3
    assert max(map(world.trainer.largest_difference, [r.prompt_ids for r in requests + later], answers)) < 1e-4
    assert world.restarted[0]._engine.metrics().sampled_tokens > 0


async def test_when_all_servers_die_in_mid_step_nothing_is_lost_and_the_next_sync_has_them_all(world_of, until):
    world = await world_of()
    await world.next_version()
    requests = [world.request(f"r{i}", prompt=[i, 5], max_tokens=200) for i in range(1, 7)]
    tasks = [asyncio.create_task(world.pool.generate(request)) for request in requests]
    await until(lambda: all(server._engine.metrics().sampled_tokens > 40 for server in world.servers))
    for server in world.servers:
        server.kill()
    answers = await asyncio.gather(*tasks)
    assert [answer.versions for answer in answers] == [[1] * 200] * 6
    assert max(map(world.trainer.largest_difference, [r.prompt_ids for r in requests], answers)) < 1e-4
    await until(lambda: len(world.pool.servers) == 2)
    assert (await world.next_version()).servers == 2


async def test_hanging_server_is_lost_in_a_sync_and_returns_updated(world_of, until):
    world = await world_of(restartable=False)
    await world.next_version()
    task = asyncio.create_task(world.pool.generate(world.request("r", max_tokens=300)))
    await until(lambda: world.servers[0]._engine.metrics().sampled_tokens > 40)
    world.servers[0].hang()
    report = await world.next_version()
    assert report.servers == 1
    answer = await task
    assert (len(answer.token_ids), answer.resubmissions) == (300, 1)
    world.servers[0].wake()
    await until(lambda: len(world.pool.servers) == 2)
    assert differ(world.servers[0].model.state_dict(), world.trainer.past[2]) == []


async def test_a_sync_waits_for_servers_that_died_and_they_start_with_its_weights(world_of):
    world = await world_of()
    for server in world.servers:
        server.kill()
    report = await world.next_version()
    assert report.servers >= 1
    assert report.probe_difference < 1e-4
    assert differ(world.pool.servers[0].model.state_dict(), world.trainer.past[1]) == []


async def test_a_returning_server_with_a_wrong_tensor_stops_training(world_of, until):
    world = await world_of(restartable=False)
    await world.next_version()
    await world.next_version()
    world.trainer.learn()  # the server is compared with the weights that were sent
    world.servers[0].hang()
    await until(lambda: len(world.pool.servers) == 1)
    world.servers[0].faults.skips.add("model.embed_tokens.weight")
    with torch.no_grad():
        world.servers[0].model.get_input_embeddings().weight.add_(0.5)
    world.servers[0].wake()
    await until(lambda: world.pool.group.members[0].state.value == "removed")
    with pytest.raises(
        TrainingError, match="server local://0 does not serve the trainer's weights of version 2"
    ) as told:
        await world.pool.generate(world.request("r"))
    assert told.value.hint == "tensors that differ by checksum: model.embed_tokens.weight"


async def test_no_room_for_the_weights_leaves_the_servers_alone(world_of, monkeypatch):
    world = await world_of()
    await world.next_version()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agentrl.weights.folder.write_tensors", full)
    with pytest.raises(TrainingError, match="cannot write the weights of version 2: got OSError"):
        await world.next_version()
    assert world.pool.version == 1
    assert (await world.pool.generate(world.request("r", max_tokens=4))).versions == [1] * 4


async def test_no_server_left_ends_the_sync(world_of, until):
    world = await world_of(count=1, restartable=False)
    world.servers[0].faults.refuses = True
    with pytest.raises(ServersLost, match="no server is left: got local://0"):
        await world.next_version()


async def test_updates_through_the_engine_keep_a_pause(world_of):
    world = await world_of()
    await world.pool.pause()
    world.trainer.learn()
    await world.pool.update_weights(None, 1)
    assert world.pool.group.is_paused
    await world.pool.resume()
    assert (await world.pool.generate(world.request("r", max_tokens=3))).versions == [1] * 3
