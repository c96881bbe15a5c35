"""Leases of served sandboxes: only an unused sandbox ends by itself."""

from typing import Any

import pytest

from agentrl.errors import SandboxError
from agentrl.remote.server import ServerSettings
from agentrl.remote.server.sandboxes import SandboxServer
from agentrl.sandbox import SandboxSpec, open_sandbox
from agentrl.sandbox.local import UNCONFINED

OPEN: dict[str, Any] = {"network": "all", "options": {"unconfined": UNCONFINED}}


async def test_each_call_renews_the_lease() -> None:
    now = 1_000.0
    server = SandboxServer(SandboxSpec(**OPEN), ServerSettings(lease_s=10), clock=lambda: now)
    await server.start()
    try:
        spec = SandboxSpec(type="http", url=server.url, network="all")
        async with open_sandbox(spec) as sandbox:
            for _ in range(3):
                now += 8
                server.sandboxes.expire()
                assert (await sandbox.exec("echo here")).stdout == b"here\n"
            now += 11
            server.sandboxes.expire()
            with pytest.raises(SandboxError, match=r"no sandbox .* is open"):
                await sandbox.exec("echo here")
    finally:
        await server.close()
