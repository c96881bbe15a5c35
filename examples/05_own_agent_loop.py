"""Your own agent loop: the policy sees the goal again with every observation, and answers with bare actions.

    python examples/05_own_agent_loop.py

The household's expert plays through the loop, which also shows that the loop supports demonstrations (warm starts).
Prints the expert's success rate.
"""

from __future__ import annotations

import agentrl
from agentrl.agent_loop import AgentLoop, Episode
from agentrl.message import Message, system, user


class Reminding(AgentLoop):
    """A loop that repeats the line with the task after each observation.

    Args:
        marker: Words in the first observation's line with the task.
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
    print(agentrl.evaluate("household/valid_unseen", policy="expert", tasks=10, loop=Reminding))


if __name__ == "__main__":
    main()
