"""An environment, a loop, a tool and a reward with which every metric of an episode is written."""

from letters import Letters

import agentrl
from agentrl.agent_loop import AgentLoop
from agentrl.message import ToolCall, user


@agentrl.tool(pure=True, max_tokens=4)
def spell(word: str) -> agentrl.ToolResult:
    """Spells a word.

    Args:
        word: The word; the tool cannot spell "no".
    """
    if word == "no":
        raise agentrl.ToolError("this word cannot be spelled")
    return agentrl.ToolResult(" ".join(word * 9), reward=0.1, metrics={"letters": len(word)})


class Doubtful(Letters):
    """Understands no action."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, "valid": False}


class Spelling(AgentLoop):
    """Calls the tool before each turn: twice with the same word, and once with one that fails."""

    offers_tools = True

    async def run(self, episode):
        observation = await episode.reset()
        conversation = episode.open([user(observation)], tools=list(episode.tools.values()))
        while True:
            answer = await conversation.generate()
            calls = [ToolCall(name="spell", arguments={"word": word}) for word in ("yes", "yes", "no")]
            results = await episode.call_tools(calls)
            episode.count_invalid("write only letters")
            result = await episode.step(answer.text)
            if result.done:
                return
            conversation.add(*results, user(result.observation))


def long(trajectory, task):
    return len(trajectory.final_text) / 10
