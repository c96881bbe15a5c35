"""A daemon for the whole session, or the reason why none is available."""

import sys
import time
from pathlib import Path

import pytest

from agentrl.sandbox.docker.sandbox import SUPPLY
from agentrl.sandbox.isolation import PREFIX, PYTHON

sys.path.append(str(Path(__file__).parent))

import docker
from engine import IMAGE, NoEngineError, engine

GONE_S = 10.0


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.docker)


@pytest.fixture(scope="session")
def url():
    """Its address."""
    try:
        with engine() as address:
            yield address
            SUPPLY.close()
    except NoEngineError as reason:
        pytest.skip(f"NO DOCKER HERE, its sandboxes are not tested: {reason}")


@pytest.fixture
def spec(url):
    """A sandbox whose system is this machine's; nothing of it may be left."""
    readable = ["/usr"] if PREFIX.is_relative_to("/usr") else ["/usr", str(PREFIX)]
    options = {"readable": readable, "python": str(PYTHON), "pull": "never"}
    env = {"PATH": f"{PREFIX}/bin:/usr/bin:/bin"}
    yield {"type": "docker", "image": IMAGE, "url": url, "options": options, "env": env}
    end = time.monotonic() + GONE_S
    while containers(url) and time.monotonic() < end:  # a cancelled start is undone, or kept warm
        SUPPLY.drain()
        time.sleep(0.1)
    assert containers(url) == []


def containers(url):
    client = docker.APIClient(base_url=url, version="1.40")
    try:
        return client.containers(all=True, filters={"ancestor": IMAGE})
    finally:
        client.close()
