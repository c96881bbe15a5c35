"""Environments, tools, loops and rewards with one fault each, which the diagnosis of a run has to name."""

import asyncio
import random
import time

from letters import Letters

from agentrl import tool
from agentrl.agent_loop import AgentLoop
from agentrl.errors import ToolError
from agentrl.message import Message, ToolCall, user


class Unpaid(Letters):
    """Pays nothing, whatever the policy writes."""

    def step(self, action):
        observation, _, *rest, _ = super().step(action)
        return observation, 0.0, *rest, {"success": False}


class ByTask(Letters):
    """Pays by the task alone, so that all episodes of a group earn the same."""

    def step(self, action):
        observation, _, *rest, _ = super().step(action)
        return observation, "aeiou".index(self.wanted) / 5, *rest, {}


class Chance(Letters):
    """Pays and solves by chance, so that only the length or the entropy of the answers can change."""

    def step(self, action):
        observation, _, *rest, _ = super().step(action)
        solved = random.random() < 0.5
        return observation, float(solved), *rest, {"success": solved}


class Breaking(Letters):
    """Breaks for good after a while."""

    steps = 0

    def step(self, action):
        Breaking.steps += action != "aeiou"
        if Breaking.steps > 40:
            raise RuntimeError("the world broke")
        return super().step(action)


class Uneven(Letters):
    """The steps of some tasks are slow, so that their groups are too old when they end."""

    def step(self, action):
        if self.wanted in "ae":
            time.sleep(1.5)
        return super().step(action)


class Easy(Letters):
    """Pays for vowels all or nothing, so that a policy can learn to solve every task."""

    def step(self, action):
        observation, _, *rest, _ = super().step(action)
        solved = sum(letter in "aeiou" for letter in action) > 0.7 * len(action)
        return observation, float(solved), *rest, {"success": solved}


class Whole(Letters):
    """Fines every answer that is not complete."""

    def step(self, action):
        observation, _, *rest, _ = super().step(action)
        solved = action.strip() == "aeiou" * 4
        return observation, 1.0 if solved else -0.1, *rest, {"success": solved}


class Memorized(Letters):
    """Vowels are right in training, digits in tests."""

    def reset(self, *, seed=None, options=None):
        self.is_test = seed is not None and seed >= 20_000_000
        return super().reset(seed=seed)

    def step(self, action):
        observation, reward, *rest, _ = super().step(action)
        if self.is_test:
            reward = sum(letter.isdigit() for letter in action) / (1 + len(action))
        return observation, reward, *rest, {"success": reward > 0.4}


@tool
def broken(text: str) -> str:
    """Look something up; the server is away.

    Args:
        text: What to look up.
    """
    raise ConnectionError("no route to the server")


@tool
async def slow(text: str) -> str:
    """Look something up, slowly.

    Args:
        text: What to look up.
    """
    await asyncio.sleep(0.4)
    return "nothing"


@tool
def refusing(text: str) -> str:
    """Look something up; most calls are refused.

    Args:
        text: What to look up.
    """
    if random.random() < 0.6:
        raise ToolError("no such text")
    return "nothing"


class Searching(AgentLoop):
    """Looks up every answer with the first tool before it plays it."""

    offers_tools = True

    async def run(self, episode):
        conversation = episode.open([user(await episode.reset())], tools=())
        while True:
            answer = await conversation.generate()
            call = ToolCall(name=next(iter(episode.tools)), arguments={"text": answer.text}, id="1")
            found = await episode.call_tool(call)
            result = await episode.step(answer.text)
            if result.done:
                return
            conversation.add(user(f"{found.text} {result.observation}"))

    def demonstrate(self, action):
        return Message(role="assistant", content=action)


def length_of(trajectory, task):
    """Pays for every character, whatever it says."""
    return len("".join(trajectory.completions)) / 100


def noisy_against_success(trajectory, task):
    """Pays for failures, with noise of the same size."""
    return random.gauss(0.0 if trajectory.success else 1.0, 1.0)
