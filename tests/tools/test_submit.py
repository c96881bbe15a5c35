"""The tool submit hands the answer to the environment."""

from __future__ import annotations

import pytest

from agentrl.builders.tools import find_tool
from agentrl.errors import UsageError


def test_it_ends_the_episode_and_takes_an_answer_alone():
    tool = find_tool("submit")
    assert tool.stop
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["answer"]


async def test_there_must_be_an_environment(desk):
    async with desk() as tools:
        with pytest.raises(UsageError, match="the tool needs an environment: got action '42'"):
            await tools.call("submit", answer="42")
