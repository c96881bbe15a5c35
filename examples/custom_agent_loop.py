"""An agent loop of one's own: the policy sees the goal again with every observation, and answers with bare actions.

    python examples/custom_agent_loop.py

Lets the household's expert play through the loop, which also shows that the loop can be demonstrated (warm starts).
"""

from __future__ import annotations

import agentrl
from agentrl.agent_loop import AgentLoop, Episode
from agentrl.message import Message, system, user


class Reminding(AgentLoop):
    """Restates the first line that holds the task after each observation.

    Args:
        marker: Words by which the task is found in the first observation.
    """

    def __init__(self, marker: str = "Your task is to") -> None:
        self.marker = marker

    async def run(self, episode: Episode) -> None:
        first = str(await episode.reset())
        goal = next((line for line in first.splitlines() if self.marker in line), "")
        conversation = episode.open([system(episode.spec.instructions), user(first)])
        while True:
            answer = await conversation.generate()
            result = await episode.step(answer.text.strip())
            if result.done:
                return
            conversation.add(user(f"{result.observation}\n{goal}"))

    def demonstrate(self, action: str) -> Message:
        return Message(role="assistant", content=action)


def main() -> None:
    result = agentrl.evaluate(
        "household/valid_unseen",
        policy="expert",
        tasks=10,
        overrides=["agent.loop=custom_agent_loop:Reminding"],
    )
    print(result)


if __name__ == "__main__":
    main()
