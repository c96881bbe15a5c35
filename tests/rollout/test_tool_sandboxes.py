"""Tools that work in a sandbox: one for each episode, started when it is needed, closed at the end."""

import asyncio
import json

import pytest

import agentrl
from agentrl.errors import Outcome, SandboxError, UsageError
from agentrl.message import ToolCall
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.tools import tool_session
from agentrl.sandbox import Sandbox, SandboxSpec


def call(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Box(Sandbox):
    """A sandbox in which nothing runs; remembers what became of it."""

    events: list[str] = []  # noqa: RUF012
    fails_at = ""

    async def _start(self):
        self.events.append("start")
        if self.fails_at == "start":
            raise OSError("no room")

    async def exec(self, command, **_):
        if self.fails_at == "exec":
            raise SandboxError("the box is gone")
        self.events.append(f"exec {command}")

    async def close(self):
        self.events.append("close")

    async def _unused(self, *_, **__):
        raise NotImplementedError

    spawn = read = write = list = snapshot = restore = _unused


@agentrl.tool
async def work(what: str, sandbox: Sandbox) -> str:
    """Work.

    Args:
        what: Which work.
    """
    await sandbox.exec(what)
    return "done"


async def test_a_session_of_tools_has_the_sandbox_that_was_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "agentrl.rollout.tools.open_sandbox", lambda settings: asked.append(settings) or Box(SandboxSpec())
    )
    monkeypatch.setattr(Box, "events", [])
    async with tool_session(sandbox="local") as session:
        called = await session.carry_out(ToolCall(name="work", arguments={"what": "dig"}), {"work": work})
    assert (asked, called.result.text) == (["local"], "done")
    async with tool_session() as session:
        with pytest.raises(UsageError, match="needs a sandbox"):
            await session.carry_out(ToolCall(name="work", arguments={"what": "dig"}), {"work": work})


@agentrl.tool
class Worker:
    """Works, too."""

    def __init__(self, sandbox: Sandbox):
        self.sandbox = sandbox

    async def __call__(self) -> str:
        """Work on."""
        await self.sandbox.exec("on")
        return "done"


@pytest.fixture
def box(monkeypatch):
    monkeypatch.setattr(Box, "events", [])
    return Box


def in_box(kind, tools, **fields):
    return {"loop": "tool_calling", "tools": tools, "make_sandbox": lambda: kind(SandboxSpec()), **fields}


async def test_the_tools_of_an_episode_share_one_sandbox_that_is_closed(make_runner, play, worlds, box, texts):
    answers = [call("work", what="a") + call("worker"), call("work", what="b"), call("act", action="forward")]
    fields = in_box(box, [work, Worker], limits=EpisodeLimits(max_turns=3))
    trajectory = await play(make_runner(worlds.Corridor, *answers, **fields))
    assert box.events == ["start", "exec a", "exec on", "exec b", "close"]
    assert texts(trajectory)[:3] == ["done"] * 3


async def test_a_sandbox_that_nobody_needs_is_not_started(make_runner, play, worlds, box):
    answers = [call("work"), call("act", action="forward")]
    trajectory = await play(make_runner(lambda: worlds.Corridor(1), *answers, **in_box(box, [work])))
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.metrics["tool_errors"] == 1
    assert box.events == []


@pytest.mark.parametrize("where", ["start", "exec"])
async def test_a_failing_sandbox_is_retried_and_never_becomes_text_or_reward(
    make_runner, play, worlds, box, monkeypatch, where
):
    monkeypatch.setattr(Box, "fails_at", where)
    runner = make_runner(worlds.Corridor, call("work", what="a"), **in_box(box, [work], retries=2))
    trajectory = await play(runner)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SANDBOX_ERROR, None)
    assert runner.counters.outcomes == {Outcome.SANDBOX_ERROR: 3}
    assert (box.events.count("start"), box.events.count("close") >= 3) == (3, True)
    assert len(trajectory.turns) == 1


async def test_a_sandbox_is_closed_when_its_episode_is_cancelled(make_runner, play, worlds, box):
    entered = asyncio.Event()

    @agentrl.tool
    async def hang(sandbox: Sandbox) -> str:
        """Never answer."""
        entered.set()
        await asyncio.Event().wait()

    runner = make_runner(worlds.Corridor, call("hang"), **in_box(box, [hang]))
    episode = asyncio.create_task(play(runner))
    await entered.wait()
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert box.events == ["start", "close"]


async def test_a_tool_without_the_sandbox_that_it_needs_stops_the_run(make_runner, play, worlds):
    runner = make_runner(worlds.Corridor, call("work", what="a"), loop="tool_calling", tools=[work])
    with pytest.raises(UsageError, match=r"needs a sandbox, but none is configured. Set agent.sandbox"):
        await play(runner)
