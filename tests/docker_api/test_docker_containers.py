"""Containers: isolation, cleanup, limits and ownership."""

import asyncio
import logging
import time

import pytest

from agentrl.errors import SandboxError
from agentrl.sandbox.docker.container_plan import (
    OWNER,
    UNTIL,
    is_left_behind,
    labels,
    this_owner,
)
from agentrl.sandbox.docker.daemon import Daemon


async def until(holds):
    for _ in range(4000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it does not come about")


async def test_a_container_is_closed_off(opened, daemon):
    async with opened(limits={"memory_bytes": 2**30, "processes": 50, "disk_bytes": 2**27}, readable=["/usr"]):
        (container,) = daemon.running
    host = container.config["HostConfig"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["CapDrop"]) == ("none", True, ["ALL"])
    assert host["CapAdd"] == ["SETUID", "SETGID", "KILL", "CHOWN"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (2**30, 2**30, 50 + 64)
    assert host["LogConfig"]["Type"] == "none"
    assert host["Binds"] == ["/usr:/usr:ro"]
    assert host["Tmpfs"]["/work"] == f"rw,exec,nosuid,nodev,size={2**27},mode=0755"
    assert host["Tmpfs"]["/tmp"].endswith("mode=1777")
    assert container.settings["user"] >= 10**9
    assert container.settings["owned"] == ["/work"]
    assert "seccomp" not in str(host["SecurityOpt"])  # the daemon's own filter stays


async def test_files_leave_room_in_the_memory(opened, daemon):
    async with opened(limits={"memory_bytes": 2**28}):
        (container,) = daemon.running
    sizes = [int(part.partition("size=")[2].split(",")[0]) for part in container.config["HostConfig"]["Tmpfs"].values()]
    assert sum(sizes) + container.config["HostConfig"]["ShmSize"] < 2**28


async def test_volumes_of_an_image_are_in_memory(opened, daemon):
    daemon.images["known"]["Config"] |= {"Volumes": {"/data": {}}, "WorkingDir": "/app/"}
    async with opened() as sandbox:
        assert sandbox.folder == "/app"
        assert set(daemon.running[0].config["HostConfig"]["Tmpfs"]) == {"/data", "/app", "/tmp"}


async def test_working_folder_has_the_images_content(opened, daemon):
    daemon.content = b"a tar file"
    async with opened(), opened():
        for container in daemon.running:
            (request,) = [one for one in container.requests if one["method"] == "start"]
            assert request["argv"] == ["/bin/tar", "-xpf", "-", "--strip-components=1"]
        assert sum(asked.endswith("/archive") for asked in daemon.asked) == 1


async def test_users_are_few_where_the_daemon_maps_them(opened, daemon):
    daemon.security = ["name=rootless"]
    async with opened():
        assert 10_000 <= daemon.running[0].settings["user"] < 60_000


async def test_podman_gets_the_settings_that_docker_has_by_default(opened, daemon):
    daemon.component = "Podman Engine"
    async with opened():
        (container,) = daemon.running
    assert all(told.split(",")[5] == "notmpcopyup" for told in container.config["HostConfig"]["Tmpfs"].values())
    assert {"Name": "nofile", "Soft": 1024, "Hard": 1024} in container.config["HostConfig"]["Ulimits"]


async def test_commands_have_the_variables_of_the_image(opened, daemon):
    async with opened(env={"COLOUR": "red"}) as sandbox:
        result = await sandbox.exec(["print", "this"], stdin=b"!")
        assert result.stdout == b"print this!"
        variables = daemon.running[0].requests[-1]["env"]
    assert (variables["PATH"], variables["COLOUR"], variables["HOME"]) == ("/opt/bin:/bin", "red", "/work")


async def test_a_closed_sandbox_has_no_container(opened, daemon):
    sandbox = opened()
    await sandbox.start()
    calls = [asyncio.create_task(sandbox.exec(["hang"])) for _ in range(2)]
    await until(lambda: len(daemon.running[0].requests) == 3)
    await sandbox.close()
    await sandbox.close()
    assert daemon.containers == {}
    for call in calls:
        with pytest.raises(SandboxError, match="closed"):
            await call


async def test_container_gets_its_lifetime(opened, daemon):
    async with opened(life_s=30):
        (container,) = daemon.running
        await until(lambda: container.requests)
    assert container.requests[0] == {"method": "live", "number": 1, "seconds": 30}
    assert time.time() + 600 < float(container.config["Labels"][UNTIL]) < time.time() + 640


async def test_ended_container_reports_the_reason(opened, daemon):
    async with opened() as sandbox:
        call = asyncio.create_task(sandbox.exec(["hang"]))
        await until(lambda: len(daemon.running[0].requests) == 2)
        daemon.running[0].end("Killed by the machine")
        with pytest.raises(SandboxError, match="Killed by the machine"):
            await call


async def test_expired_container_reports_its_lifetime(opened, daemon):
    async with opened(life_s=1e-6) as sandbox:
        daemon.running[0].end()
        with pytest.raises(SandboxError, match="its lifetime of 1e-06 s is over"):
            await sandbox.exec(["hang"])


async def test_whoever_stops_waiting_for_a_start_leaves_nothing(opened, daemon):
    async with opened():
        pass
    daemon.hold.clear()
    starting = asyncio.create_task(opened().start())
    await until(lambda: daemon.asked[-1] == "POST /containers/create")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    daemon.hold.set()
    await until(lambda: daemon.asked[-1].startswith("DELETE"))
    assert daemon.containers == {}


async def test_a_warm_container_is_taken_and_replaced(opened, daemon, supply):
    sandboxes = [opened(warm=2) for _ in range(3)]
    await sandboxes[0].start()
    await until(lambda: len(daemon.running) == 3)
    await supply.settle()
    started = len(daemon.containers)
    daemon.hold.clear()
    await sandboxes[1].start()  # while the daemon answers nobody
    daemon.hold.set()
    assert (await sandboxes[1].exec(["echo"])).stdout == b"echo"
    await until(lambda: len(daemon.containers) == started + 1)
    for sandbox in sandboxes:
        await sandbox.close()
    await until(lambda: len(daemon.running) == 2)


async def test_a_warm_container_that_ended_is_not_taken(opened, daemon, supply):
    first, second = opened(warm=1), opened(warm=1)
    await first.start()
    await until(lambda: len(daemon.running) == 2)
    await supply.settle()
    list(daemon.containers.values())[-1].end()
    (kept,) = next(iter(supply._warm.values()))
    await until(lambda: not kept.can_be_used)
    await second.start()
    assert (await second.exec(["echo"])).stdout == b"echo"
    await asyncio.gather(first.close(), second.close())
    await until(lambda: len(daemon.containers) == 1)


async def test_other_limits_are_other_warm_containers(opened, daemon):
    async with opened(warm=1):
        await until(lambda: len(daemon.running) == 2)
        async with opened(warm=1, limits={"processes": 7}):
            await until(lambda: len(daemon.running) == 4)
    assert {one.config["HostConfig"]["PidsLimit"] for one in daemon.containers.values()} == {128 + 64, 7 + 64}


async def test_containers_are_removed_at_the_end_of_the_process(opened, daemon, supply):
    sandbox = opened(warm=2)
    await sandbox.start()
    await until(lambda: len(daemon.running) == 3)
    daemon.containers["other"] = type(daemon.running[0])({"Labels": {OWNER: "another machine/1/1"}})
    await asyncio.to_thread(supply.close)
    assert list(daemon.containers) == ["other"]
    await sandbox._channel.close()


async def test_leftovers_of_dead_processes_are_removed_at_the_start(opened, daemon, caplog):
    caplog.set_level(logging.INFO, "agentrl")
    machine, pid, started = this_owner().split("/")
    ended = await asyncio.create_subprocess_exec("/bin/true")
    await ended.wait()
    kept = {"mine": this_owner(), "elsewhere": f"other boot/{ended.pid}/5"}
    left = {"dead": f"{machine}/{ended.pid}/5", "replaced": f"{machine}/{pid}/{int(started) - 1}"}
    until_when = f"{time.time() + 100:.0f}"
    async with opened():
        kind = type(daemon.running[0])
    for name, owner in {**kept, **left}.items():
        daemon.containers[name] = kind({"Labels": {OWNER: owner, UNTIL: until_when}})
    daemon.containers["foreign"] = kind({"Labels": {}})
    swept = await asyncio.to_thread(lambda: Daemon(daemon.url).sweep())
    assert (swept, set(daemon.containers)) == (2, {*kept, "foreign"})
    assert "removed 2 containers" in caplog.text


def test_whose_time_is_over_is_left_behind_wherever_its_owner_is():
    told = labels(50, now=1000)
    assert not is_left_behind(told, now=1100)
    assert is_left_behind(told, now=1111)
    assert is_left_behind({**told, OWNER: "elsewhere/1/1"}, now=1111)
    assert not is_left_behind({**told, OWNER: "elsewhere/1/1"}, now=1100)
    assert not is_left_behind({OWNER: "what"}, now=1e12)


async def test_starts_keep_to_their_rate(opened, daemon, monkeypatch):
    async with opened(starts_per_s=0.5):
        pass
    waits = []
    monkeypatch.setattr("agentrl.sandbox.docker.daemon.time.sleep", waits.append)
    async with opened(starts_per_s=0.5), opened(starts_per_s=0.5):
        pass
    first, second = sorted(waits)[-2:]
    assert first <= 2 < second <= 4
