"""An agent that calls several tools: one from the environment, and the calculator of the catalogue.

    python examples/04_several_tools.py

Prints the messages of an episode of the environment's expert, and the metrics of a new model, which calls no tools yet.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym

import agentrl
from agentrl.message import Message, ToolCall
from agentrl.task import Task
from agentrl.tool import Tool
from agentrl.trajectory import Trajectory

PRICES = {"apple": 3, "bread": 5, "cheese": 8, "salt": 2}


class Shop(gym.Env[str, str]):
    """What do two things cost together? Only a tool knows their prices; the answer is a number."""

    observation_space = action_space = gym.spaces.Text(200)

    def __init__(self) -> None:
        self.tools = [Tool(self.price)]

    def price(self, item: str) -> int:
        """Returns the price of an item.

        Args:
            item: What to buy, such as apple.
        """
        if item not in PRICES:
            raise agentrl.ToolError("the shop does not sell this", got=item, expected=", ".join(PRICES))
        return PRICES[item]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.items = [str(item) for item in self.np_random.choice(sorted(PRICES), 2, replace=False)]
        self.plan = [*self.items, str(sum(PRICES[item] for item in self.items))]
        return f"What do {' and '.join(self.items)} cost together? Answer with a number.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        solved = agentrl.parse_int(action) == sum(PRICES[item] for item in self.items)
        return "", float(solved), True, False, {"success": solved}

    def expert(self) -> Shop:
        return self

    def act(self, observation: Any) -> str:
        """Return the expert's next action: two items, then the sum."""
        return self.plan.pop(0)

    def tool_message(self, action: str) -> Message:
        """Return the message of an expert's action: an item is a call, a number the answer."""
        calls = (ToolCall(name="price", arguments={"item": action}),) if action in PRICES else ()
        return Message(role="assistant", content="" if calls else action, tool_calls=calls)


def shown(trajectory: Trajectory, task: Task) -> float:
    """Print the messages of an episode; the reward is the environment's."""
    for message in trajectory.messages:
        print(f"{message.role:>9}:", message.content, *(f"{c.name}({dict(c.arguments)})" for c in message.tool_calls))
    return trajectory.environment_reward


def main() -> None:
    agent: Any = {"loop": "tool_calling", "tools": ["calculator"]}
    print(agentrl.evaluate(Shop, policy="expert", tasks=1, reward=shown, fresh=True, **agent))
    small = ["trainer.tasks_per_step=2", "algorithm.group_size=2", "agent.max_turns=2", "agent.max_answer_tokens=16"]
    run = agentrl.train(env=Shop, model="scratch", steps=2, overrides=small, **agent)
    print({name: value for name, value in run.metrics.items() if name.startswith("episode/")})


if __name__ == "__main__":
    main()
