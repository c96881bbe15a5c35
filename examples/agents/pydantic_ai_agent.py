"""A Pydantic AI agent that acts through a tool. It needs `pip install "pydantic-ai-slim[openai]" requests`.

agent:
  loop: external
  options: {command: "python examples/agents/pydantic_ai_agent.py", answer: none}

Its `output_type` is text: typed outputs force a tool call, which in training needs the option `forms: free`.
"""

import json
import os

import requests
from pydantic_ai import Agent

with open(os.environ["AGENTRL_TASK"]) as file:
    TASK = json.load(file)
agent = Agent("openai-chat:policy", instructions=TASK["instructions"])


@agent.tool_plain
def act(action: str) -> str:
    """Take one action and return the observation.

    Args:
        action: The action, in the form that the environment describes.
    """
    key = {"Authorization": f"Bearer {os.environ['AGENTRL_SECRET']}"}
    taken = requests.post(f"{os.environ['AGENTRL_URL']}/step", json={"action": action}, headers=key, timeout=600)
    return taken.json()["observation"] if taken.ok else "It is over: say goodbye."


if __name__ == "__main__":
    print(agent.run_sync(TASK["prompt"]).output)
