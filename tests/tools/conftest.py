from contextlib import asynccontextmanager

import pytest

from agentrl.builders.tools import find_tool
from agentrl.errors import UsageError
from agentrl.message import ToolCall
from agentrl.rollout.tools import tool_session
from agentrl.sandbox import open_sandbox


class Desk:
    """Calls shipped tools as one episode would."""

    def __init__(self, session):
        self.session = session
        self.found = {}

    async def call(self, entry, **arguments):
        """How a call went; `entry` is one of ``agent.tools``."""
        tool = self.found.setdefault(str(entry), find_tool(entry))
        return await self.session.carry_out(ToolCall(name=tool.name, arguments=arguments), {tool.name: tool})

    async def text(self, entry, **arguments):
        """What a call that succeeds says."""
        called = await self.call(entry, **arguments)
        assert not called.failed, called.result.text
        return called.result.text

    async def error(self, entry, **arguments):
        """What the policy reads when a call fails."""
        called = await self.call(entry, **arguments)
        assert called.failed
        assert called.cause is None or not called.result.text.endswith(f"({type(called.cause).__name__})"), called.cause
        return called.result.text


@pytest.fixture
def desk():
    """An episode's tools, without a sandbox unless it is named."""

    @asynccontextmanager
    async def opened(sandbox=None, timeout_s=30.0):
        async with tool_session(sandbox=sandbox, timeout_s=timeout_s) as session:
            yield Desk(session)

    return opened


@pytest.fixture
async def needs_local_sandbox():
    """Skips where the machine cannot confine programs."""
    try:
        async with open_sandbox("local"):
            pass
    except UsageError as error:
        pytest.skip(f"no local sandbox here: {error}")
