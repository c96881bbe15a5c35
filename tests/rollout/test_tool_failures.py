"""What goes wrong in a call of a tool: the policy's mistakes and the tool's own are text, and stop nothing else."""

import json

import pytest

import agentrl
from agentrl.chat_service.wire import decode_answer
from agentrl.errors import Outcome
from agentrl.message import ToolCall
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.tool_session import tool_session
from agentrl.tool import Tool


@agentrl.tool(pure=True)
def count(items: list) -> str:
    """Count items.

    Args:
        items: What to count.
    """
    return str(len(items))


async def carry_out(tool, /, timeout_s=30.0, **arguments):
    async with tool_session(timeout_s=timeout_s) as session:
        return await session.carry_out(ToolCall(name=tool.name, arguments=arguments), {tool.name: tool})


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("items", ["[" * 1000, "[" * 300 + "]" * 300, '{"a":' * 5000, nested(3000), nested(300)])
async def test_arguments_that_are_nested_too_deeply_are_the_policys_mistake(items):
    called = await carry_out(count, items=items)
    assert called.failed
    assert "items is nested too deeply, expected at most 64" in called.result.text


async def test_arguments_may_be_nested():
    assert (await carry_out(count, items=json.dumps(nested(64)))).result.text == "1"


@pytest.mark.parametrize("depth", [300, 800, 3000])
async def test_a_deep_call_ends_no_episode(make_runner, play, worlds, depth):
    text = '<tool_call>\n{"name": "count", "arguments": {"items": %s}}\n</tool_call>' % ("[" * depth + "]" * depth)
    limits = EpisodeLimits(max_turns=2)
    runner = make_runner(worlds.Corridor, text, loop="tool_calling", tools=[count], limits=limits)
    assert (await play(runner)).outcome in (Outcome.TRUNCATED_TURNS, Outcome.POLICY_ERROR)


def test_a_services_deep_call_is_a_problem_of_the_answer():
    function = {"name": "count", "arguments": '{"items": ' + "[" * 5000}
    body = {"choices": [{"message": {"content": "", "tool_calls": [{"function": function}]}}]}
    answer = decode_answer(json.dumps(body))
    assert answer.problems == ("the arguments of the call of count are nested too deeply",)


async def test_a_check_that_fails_is_the_tools_failure():
    class Odd(Tool):
        def validate(self, arguments):
            raise KeyError("nobody")

    called = await carry_out(Odd(count.target), items=[])
    assert called.result.text == "Error: count cannot check its arguments (KeyError)"
