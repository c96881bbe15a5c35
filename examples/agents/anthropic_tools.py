"""An agent with Anthropic's package, whose runner calls the tools. It needs `pip install anthropic requests`.

agent:
  loop: external
  options: {command: "python examples/agents/anthropic_tools.py", answer: none}
"""

import json
import os

import requests
from anthropic import Anthropic, beta_tool


@beta_tool
def act(action: str) -> str:
    """Take one action and return the observation.

    Args:
        action: The action, in the form that the environment describes.
    """
    key = {"Authorization": f"Bearer {os.environ['AGENTRL_SECRET']}"}
    taken = requests.post(f"{os.environ['AGENTRL_URL']}/step", json={"action": action}, headers=key, timeout=600)
    return taken.json()["observation"] if taken.ok else "It is over: say goodbye."


def main():
    with open(os.environ["AGENTRL_TASK"]) as file:
        task = json.load(file)
    runner = Anthropic().beta.messages.tool_runner(
        model="policy",
        max_tokens=1024,
        system=task["instructions"] or "Reach the goal.",
        tools=[act],
        messages=[{"role": "user", "content": task["prompt"]}],
    )
    for message in runner:
        print(message.content)


if __name__ == "__main__":
    main()
