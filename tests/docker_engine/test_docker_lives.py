"""Containers on a real daemon: start and cleanup."""

import asyncio
import json
import signal
import sys
import time

import docker
import pytest
from engine import IMAGE

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox import Limits, open_sandbox
from agentrl.sandbox.docker.container_plan import OWNER, UNTIL, this_owner
from agentrl.sandbox.docker.daemon import Daemon
from agentrl.sandbox.docker.sandbox import SUPPLY

OWNING = """
import asyncio, json, sys
from agentrl.sandbox import open_sandbox
async def main():
    sandbox = open_sandbox(json.loads(sys.argv[1]))
    await sandbox.start()
    await sandbox.spawn("sleep 987")
    print("ready", flush=True)
    await asyncio.sleep(float(sys.argv[2]))
asyncio.run(main())
"""


def listed(url, *, with_ended=True):
    client = docker.APIClient(base_url=url, version="1.40")
    try:
        return [(one["Id"], one["Status"]) for one in client.containers(all=with_ended, filters={"ancestor": IMAGE})]
    finally:
        client.close()


async def until_gone(url, *, with_ended=True):
    for _ in range(600):
        left = await asyncio.to_thread(listed, url, with_ended=with_ended)
        if not left:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"containers are left: {left}")


async def owning(spec, seconds):
    """A process with a sandbox and a warm container."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNING, json.dumps(spec), str(seconds), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def test_containers_end_when_their_process_is_killed(spec, url):
    spec["options"]["warm"] = 1
    process = await owning(spec, 60)
    assert await asyncio.to_thread(listed, url)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await until_gone(url, with_ended=False)
    await asyncio.to_thread(lambda: Daemon(url).sweep())  # one that was made, and not started any more
    await until_gone(url)


async def test_containers_end_with_a_process_that_forgets_them(spec, url):
    spec["options"]["warm"] = 1
    process = await owning(spec, 0)
    assert await process.wait() == 0
    await until_gone(url)


async def test_a_container_ends_itself_when_its_time_is_over(spec, url):
    spec["options"]["life_s"] = 1.0
    sandbox = open_sandbox(spec)
    await sandbox.start()
    with pytest.raises(SandboxError, match=r"its lifetime of 1 s is over"):
        await sandbox.exec("sleep 50")
    await until_gone(url)
    await sandbox.close()


async def test_containers_of_dead_processes_are_removed(spec, url):
    machine, pid, started = this_owner().split("/")
    told = {OWNER: f"{machine}/{pid}/{int(started) - 1}", UNTIL: f"{time.time() + 900:.0f}"}
    config = {"Image": spec["image"], "Cmd": ["/usr/bin/sleep", "600"], "Labels": told}
    config["HostConfig"] = {"Binds": ["/usr:/usr:ro"], "NetworkMode": "none"}
    client = docker.APIClient(base_url=url, version="1.40")
    client.start(client.create_container_from_config(config)["Id"])
    client.close()
    assert await asyncio.to_thread(lambda: Daemon(url).sweep()) == 1
    await until_gone(url)


async def test_a_warm_container_is_quick_and_like_any_other(spec, url):
    spec["options"]["warm"] = 2
    async with open_sandbox(spec) as first:
        await first.write("mine", b"x")
        await SUPPLY.settle()
        containers = await asyncio.to_thread(listed, url)
        assert len(containers) == 3
        async with open_sandbox(spec) as second:
            assert [entry.name for entry in await second.list()] == ["kept", "link"]
            assert (await second.exec("id -u")).stdout != (await first.exec("id -u")).stdout
    await SUPPLY.settle()
    await asyncio.to_thread(SUPPLY.drain)
    await until_gone(url)


async def test_working_folder_has_the_images_content(spec):
    async with open_sandbox(spec) as sandbox:
        assert sandbox.folder == "/app"
        assert await sandbox.read("link") == b"image"
        await sandbox.write("kept/file", b"changed")
        assert (await sandbox.exec("cat /app/link; echo; stat -c %a kept/file")).stdout == b"changed\n755\n"
    async with open_sandbox(spec) as sandbox:
        assert await sandbox.read("kept/file") == b"image"


async def test_too_large_folder_is_rejected(spec):
    spec["limits"] = {"file_bytes": 2}
    with pytest.raises(UsageError, match=r"the image's content of /app does not fit.*options.folder=/work"):
        await open_sandbox(spec).start()


async def test_image_without_python_is_rejected(spec):
    spec["options"]["python"] = "/usr/bin/no-python"
    with pytest.raises(UsageError, match=r"an image has no Python.*no-python"):
        await open_sandbox(spec).start()


async def test_memory_exhaustion_is_reported(spec):
    spec["limits"] = {"memory_bytes": 2**27, "disk_bytes": 2**24}
    async with open_sandbox(spec) as sandbox:
        bomb = await sandbox.exec(["python3", "-c", "x = [b'x' * 2**20 for _ in range(1000)]"])
        assert (bomb.out_of_memory, bomb.is_success) == (True, False)
        filled = await sandbox.exec("for d in . /tmp /dev/shm; do cat /dev/zero > $d/z; done", limits=Limits(seconds=9))
        assert not filled.out_of_memory
        assert (await sandbox.exec("echo here")).stdout == b"here\n"


async def test_further_folders_can_be_written(spec):
    spec["options"]["writable"] = ["/tests", "/logs"]
    async with open_sandbox(spec) as sandbox:
        await sandbox.write("/tests/a/b", b"x")
        assert (await sandbox.exec("touch /logs/c && ls -d /tests/a/b /logs/c")).stdout == b"/logs/c\n/tests/a/b\n"
