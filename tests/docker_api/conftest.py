"""A fake Docker daemon: the requests of docker sandboxes, and their behaviour when it fails."""

import asyncio
import sys
from pathlib import Path

import pytest

from agentrl.sandbox import open_sandbox
from agentrl.sandbox.docker import sandbox as sandbox_module
from agentrl.sandbox.docker.sandbox import ContainerPool

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
async def daemon(tmp_path):
    from fake_daemon import fake_daemon

    async with fake_daemon(tmp_path) as made:
        yield made


@pytest.fixture
async def supply(monkeypatch):
    """Daemons and warm containers of one test."""
    made = ContainerPool()
    monkeypatch.setattr(sandbox_module, "SUPPLY", made)
    monkeypatch.setattr("agentrl.sandbox.docker.sandbox.atexit.register", lambda _: None)
    yield made
    await asyncio.to_thread(made.close)


@pytest.fixture
def opened(daemon, supply):
    """Makes a sandbox of the fake daemon; options and keys of the spec by name."""

    def make(*, image="known", **options):
        keys = {key: options.pop(key) for key in ("limits", "env", "network", "files") if key in options}
        return open_sandbox({"type": "docker", "image": image, "url": daemon.url, "options": options, **keys})

    return make
