"""Foreign code that hangs: each site named in ``HANG`` keeps the first call that arrives there, for ever.

``HANG`` is ``WAY:SITE,SITE``; a site that is reached writes a file of its name. The ways: ``swallow`` goes on whenever
it is cancelled, ``sleep`` blocks its thread.
"""

import asyncio
import os
import time
from pathlib import Path

import gymnasium as gym

import agentrl
from agentrl.agent_loop import AgentLoop
from agentrl.message import ToolCall, user
from agentrl.reward import GroupScorer, Score, Scorer
from agentrl.tool import Toolset

SITES: set[str] = set()
WAY = ""


def read_sites():
    global WAY
    if WAY:  # each site hangs once, however many environments there are
        return
    WAY, _, names = os.environ.get("HANG", "").partition(":")
    SITES.update(filter(None, names.split(",")))


def _arrives(site):
    if site not in SITES:
        return False
    SITES.discard(site)
    Path(site).touch()
    return True


def block(site):
    """Hang in synchronous code."""
    if _arrives(site):
        _sleep_for_ever()


def _sleep_for_ever():
    while True:
        time.sleep(1000)


async def hang(site):
    """Hang in a coroutine."""
    if not _arrives(site):
        return
    while True:
        if WAY == "sleep":
            _sleep_for_ever()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            continue


class Words(agentrl.AsyncEnv):
    action_hint = "some letters"

    def __init__(self):
        read_sites()
        self.turn = 0

    async def reset(self, *, seed=None, options=None):
        await hang("reset")
        self.turn = 0
        return "Write.", {}

    async def step(self, action):
        await hang("step")
        self.turn += 1
        return "More.", float(len(action) % 7), self.turn == 2, False, {"success": len(action) % 2 == 0}

    async def close(self):
        if self.turn:  # an environment that was only made to be checked closes
            await hang("close")


class BlockingWords(gym.Env):
    observation_space = action_space = gym.spaces.Text(100)
    action_hint = "some letters"

    def __init__(self):
        read_sites()
        self.turn = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        block("reset")
        self.turn = 0
        return "Write.", {}

    def step(self, action):
        block("step")
        self.turn += 1
        return "More.", float(len(action) % 7), self.turn == 2, False, {"success": len(action) % 2 == 0}

    def close(self):
        if self.turn:
            block("close")


class Loop(AgentLoop):
    """Calls all tools before each step."""

    offers_tools = True

    async def run(self, episode):
        await hang("loop")
        observation = await episode.reset()
        conversation = episode.open([user(observation)], tools=())
        while True:
            answer = await conversation.generate()
            for name in episode.tools:
                await episode.call_tool(ToolCall(name=name, arguments={}))
            result = await episode.step(answer.text)
            if result.done:
                return
            conversation.add(user(result.observation))


@agentrl.tool
async def waiting() -> str:
    """Wait."""
    await hang("tool")
    return "done"


@agentrl.tool
def blocking() -> str:
    """Wait."""
    block("thread_tool")
    return "done"


@agentrl.tool(timeout_s=0.5)
async def alone() -> str:
    """Wait, without an environment."""
    read_sites()
    await hang("tool")
    return "done"


class Tools(Toolset):
    asked = 0

    async def tools(self):
        Tools.asked += 1
        if Tools.asked > 3:  # not while the run starts
            await hang("toolset")
        return (waiting, blocking)

    async def close(self):
        await hang("toolset_close")


class Single(Scorer):
    async def score(self, trajectory, task):
        await hang("scorer")
        return Score(reward=trajectory.environment_reward)


class Together(GroupScorer):
    async def score_group(self, trajectories, task):
        await hang("group_scorer")
        return [Score(reward=trajectory.environment_reward) for trajectory in trajectories]


async def waiting_reward(trajectory, task) -> float:
    await hang("reward")
    return trajectory.environment_reward


def blocking_reward(trajectory, task) -> float:
    block("thread_reward")
    return trajectory.environment_reward


def patch_engine(engine):
    """Let an engine hang when a session ends."""
    real = engine.end_session

    async def end_session(self, session_id):
        if "/" in session_id:  # of an episode, not of the probe before the first step
            await hang("end_session")
        await real(self, session_id)

    engine.end_session = end_session
