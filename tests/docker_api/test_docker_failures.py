"""Refused settings, and failures of the user's code and of the infrastructure."""

import logging
import sys

import pytest

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox import SandboxFileError, open_sandbox
from agentrl.testing.sandbox_check import check_sandbox


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"colour": 1}, "no option 'colour'"),
        ({"python": ""}, "option python"),
        ({"folder": "work"}, "option folder"),
        ({"folder": "/a:b"}, "option folder"),
        ({"user": 0}, "option user"),
        ({"user": True}, "option user"),
        ({"warm": -1}, "option warm"),
        ({"warm": 1.5}, "option warm"),
        ({"life_s": 0}, "option life_s"),
        ({"life_s": "long"}, "option life_s"),
        ({"starts_per_s": 0}, "option starts_per_s"),
        ({"pull": "always"}, "option pull.*missing or never"),
        ({"readable": "/usr"}, "option readable"),
        ({"readable": ["/"]}, "option readable"),
        ({"writable": ["../x"]}, "option writable"),
        ({"runtime": 5}, "option runtime"),
    ],
)
def test_invalid_option_is_rejected(options, complaint):
    with pytest.raises(UsageError, match=complaint):
        open_sandbox({"type": "docker", "options": options})


async def test_a_readable_folder_is_not_writable(opened):
    with pytest.raises(UsageError, match="inside a writable one"):
        await opened(readable=["/work/data"]).start()


async def test_missing_extra_is_reported(monkeypatch, supply):
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(UsageError, match=r'pip install "agentrl\[docker\]"'):
        await open_sandbox("docker").start()


async def test_missing_daemon_is_reported(monkeypatch, supply, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(UsageError, match=r"no Docker or Podman daemon answers.*none\.sock.*url=unix"):
        await check_sandbox("docker")


@pytest.mark.parametrize("url", ["ssh://elsewhere", "https://elsewhere:2376", "nonsense://x"])
async def test_other_daemon_transports_are_rejected(url, supply):
    with pytest.raises(UsageError):
        await open_sandbox({"type": "docker", "url": url}).start()


async def test_image_is_pulled_once_and_progress_is_logged(opened, daemon, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "agentrl")
    monkeypatch.setattr("agentrl.sandbox.docker.daemon._PROGRESS_EVERY_S", 0.0)
    layer = {"status": "Downloading", "id": "a", "progressDetail": {"current": 10_000_000, "total": 40_000_000}}
    daemon.to_pull["new:latest"] = [{"status": "Pulling from new"}, layer, {"status": "Pull complete", "id": "a"}]
    async with opened(image="new"), opened(image="new"):
        pass
    assert daemon.asked.count("POST /images/create") == 1
    assert "pulling image new: 10 of 40 MB" in caplog.text


async def test_an_image_that_cannot_be_pulled_is_the_users_matter(opened, daemon):
    with pytest.raises(UsageError, match=r"the image does not exist.*access denied for secret:1\.2"):
        await opened(image="secret:1.2").start()
    with pytest.raises(UsageError, match=r"an image does not exist.*docker pull secret"):
        await opened(image="secret", pull="never").start()


async def test_a_pull_that_breaks_off_is_the_machinerys_failure(opened, daemon):
    daemon.to_pull["new:latest"] = [{"error": "connection reset"}]
    daemon.refusals["POST /images"] = (500, "registry is on fire")
    with pytest.raises(SandboxError, match="registry is on fire"):
        await opened(image="new").start()
    daemon.refusals.clear()
    with pytest.raises(SandboxError, match="connection reset"):
        await opened(image="new").start()


@pytest.mark.parametrize("asked", ["POST /containers/create", "POST /containers/c1/start"])
async def test_a_daemon_that_fails_is_the_machinerys_failure(opened, daemon, asked):
    daemon.refusals[asked] = (500, "no space left on device")
    with pytest.raises(SandboxError, match="no space left on device"):
        await opened().start()
    assert daemon.containers == {}


async def test_an_image_without_python_is_the_users_matter(opened, daemon):
    words = 'OCI runtime create failed: exec: "python3": executable file not found in $PATH: unknown'
    daemon.refusals["POST /containers/c1/start"] = (400, words)
    with pytest.raises(UsageError, match=r"an image has no Python.*options\.python"):
        await opened().start()
    assert daemon.containers == {}


async def test_an_old_python_is_the_users_matter(opened, daemon):
    daemon.first_words = lambda container: container.end("this Python is too old: 3.8.10")
    with pytest.raises(UsageError, match=r"too old.*3\.8\.10.*3\.10 or newer"):
        await opened().start()
    assert daemon.containers == {}


async def test_an_image_that_was_removed_is_looked_for_again(opened, daemon):
    async with opened():
        pass
    daemon.refusals["POST /containers/create"] = (404, "No such image: known")
    with pytest.raises(SandboxError, match="No such image"):
        await opened().start()
    daemon.refusals.clear()
    async with opened():
        pass
    assert daemon.asked.count("GET /images/known/json") == 2


async def test_container_that_cannot_be_removed_is_logged_only(opened, daemon, caplog):
    sandbox = opened()
    await sandbox.start()
    daemon.refusals["DELETE"] = (500, "device or resource busy")
    await sandbox.close()
    assert "a container may be left" in caplog.text
    assert "device or resource busy" in caplog.text


async def test_file_errors_are_text_for_the_model(opened):
    async with opened() as sandbox:
        with pytest.raises(SandboxFileError):
            await sandbox.read("")
