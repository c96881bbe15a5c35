"""What goes wrong in a call of a tool: the policy's mistakes and the tool's own are text, and stop nothing else."""

import asyncio
import json
import sys

import pytest

import agentrl
from agentrl.agent_loop import AgentLoop
from agentrl.errors import Outcome, ToolError, UsageError, foreign
from agentrl.message import ToolCall, user
from agentrl.remote.chat import decode_answer
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.env_workers import call_own_tool
from agentrl.rollout.tools import tool_session
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


@pytest.mark.parametrize(
    "items",
    ["[" * 1000 + "]" * 1000, "[" * 300 + "]" * 300, '{"a":' * 5000 + "1" + "}" * 5000, nested(3000), nested(300)],
)
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
    function = {"name": "count", "arguments": '{"items": ' + "[" * 200_000}
    body = {"choices": [{"message": {"content": "", "tool_calls": [{"function": function}]}}]}
    (problem,) = decode_answer(json.dumps(body)).problems
    assert "nested too deeply" in problem


async def test_a_check_that_fails_is_the_tools_failure():
    class Odd(Tool):
        def validate(self, arguments):
            raise KeyError("nobody")

    called = await carry_out(Odd(count.target), items=[])
    assert called.result.text == "Error: count cannot check its arguments (KeyError)"


async def test_an_error_without_a_text_says_which_tool_failed():
    async def wait() -> str:
        """Wait."""
        try:
            raise TimeoutError
        except TimeoutError as error:
            raise ToolError(str(error)) from error

    called = await carry_out(Tool(wait))
    assert (called.result.text, called.failed) == ("Error: wait failed, without a reason", True)


async def leave():
    """Leave."""
    sys.exit(3)


def leave_thread():
    """Leave."""
    sys.exit(3)


def interrupt():
    """Interrupt."""
    raise KeyboardInterrupt


def run_out():
    """Take from nothing."""
    return next(iter([]))


async def give_up():
    """Say that one is cancelled."""
    raise asyncio.CancelledError


async def cancel():
    """Cancel the task in which one runs."""
    asyncio.current_task().cancel()
    await asyncio.Event().wait()


class Leaver:
    """Leaves as soon as it is made."""

    def __init__(self):
        sys.exit(3)

    def __call__(self):
        """Never get here."""


@pytest.mark.parametrize(
    ("tool", "kind"),
    [
        (Tool(leave), SystemExit),
        (Tool(leave_thread), SystemExit),
        (Tool(leave_thread, inline=True), SystemExit),
        (Tool(Leaver), SystemExit),
        (Tool(interrupt), KeyboardInterrupt),
        (Tool(run_out), StopIteration),
        (Tool(run_out, inline=True), StopIteration),
        (Tool(give_up), asyncio.CancelledError),
        (Tool(cancel), asyncio.CancelledError),
    ],
    ids=lambda value: getattr(value, "name", None),
)
async def test_what_a_tool_raises_stops_only_its_call(tool, kind):
    called = await carry_out(tool)
    assert called.result.text == f"Error: {tool.name} failed ({kind.__name__})"
    assert isinstance(called.cause, kind)
    assert not asyncio.current_task().cancelling()


@pytest.mark.parametrize("function", [leave, run_out, give_up])
async def test_a_tool_beside_its_environment_stops_only_its_call(function):
    with pytest.raises(ToolError, match=f"{function.__name__} failed"):
        await call_own_tool(Tool(function), {})


async def test_a_call_whose_episode_is_cancelled_is_cancelled():
    entered, left = asyncio.Event(), []

    @agentrl.tool
    async def hang() -> str:
        """Hang."""
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.append("hang")

    calling = asyncio.create_task(carry_out(hang))
    await entered.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert left == ["hang"]


async def test_an_answer_after_the_deadline_does_not_count():
    @agentrl.tool
    async def linger() -> str:
        """Answer too late."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "late"

    called = await carry_out(linger, timeout_s=0.01)
    assert called.result.text == "Error: linger did not answer in 0.01 s"


async def test_a_call_that_never_ends_is_left_behind(monkeypatch):
    monkeypatch.setattr(foreign, "CALL_GRACE_S", 0.01)
    released, ended = asyncio.Event(), asyncio.Event()

    @agentrl.tool
    async def stay() -> str:
        """Stay, whatever is said."""
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        ended.set()
        raise ValueError("nobody hears this")

    called = await carry_out(stay, timeout_s=0.01)
    assert called.result.text == "Error: stay did not answer in 0.01 s"
    released.set()
    await ended.wait()


class Forgetful(AgentLoop):
    """Opens its conversation as loops without tools do, unless told otherwise."""

    offers_tools = True

    def __init__(self, **opened):
        self.opened = opened

    async def run(self, episode):
        await episode.reset()
        await episode.open([user("Go.")], **self.opened).generate()


async def test_a_loop_that_offers_tools_must_not_leave_them_out_of_the_prompt(make_runner, play, worlds):
    runner = make_runner(worlds.Corridor, "x", tools=[count])
    runner.loop = Forgetful()
    with pytest.raises(UsageError, match=r"agent loop Forgetful offers tools.*count.*tools=list\(episode.tools.values"):
        await play(runner)


@pytest.mark.parametrize(("opened", "tools"), [({"tools": ()}, [count]), ({}, [])])
async def test_a_conversation_may_have_no_tools_on_purpose(make_runner, play, worlds, opened, tools):
    runner = make_runner(worlds.Corridor, "x", tools=tools)
    runner.loop = Forgetful(**opened)
    assert (await play(runner)).outcome is Outcome.FINISHED


@agentrl.tool
def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: What to look up.
    """
    if word == "unknown":
        raise ToolError("there is no such word")
    return {"a": "first letter"}[word]


@pytest.mark.parametrize(
    ("arguments", "failures"), [({"word": "b"}, 3), ({"word": "a"}, 0), ({"word": "unknown"}, 0), ({"wrong": "a"}, 0)]
)
async def test_calls_that_a_tool_fails_are_counted_with_its_line(make_runner, play, worlds, arguments, failures):
    """Errors that a tool raises for the model to read, and wrong arguments, are not its failures."""
    text = f'<tool_call>\n{{"name": "lookup", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    runner = make_runner(
        worlds.Corridor,
        text,
        loop="tool_calling",
        tools=[lookup],
        limits=EpisodeLimits(max_turns=3, max_parse_failures=9),
    )
    await play(runner)
    incidents = runner.counters.incidents
    assert incidents.calls["lookup"] == 3
    assert sum(one.count for one in incidents.worst()) == failures
    for one in incidents.worst():
        line = lookup.target.__code__.co_firstlineno + 9
        assert (one.kind, one.subject, one.file, one.line) == ("tool", "lookup", __file__, line)
        assert one.cause == "KeyError: 'b'"
