"""A smolagents ToolCallingAgent that acts through a tool. It needs `pip install "smolagents[openai]" requests`.

agent:
  loop: external
  options: {command: "python examples/agents/smolagents_tools.py", answer: none, forms: free}

The agent forces a tool call in every answer. With `forms: free`, the policy's answers are not constrained, and it has
to learn to call tools; otherwise, training rejects such requests, and evaluations resample until an answer calls one.
"""

import json
import os

import requests
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel

with open(os.environ["AGENTRL_TASK"]) as file:
    TASK = json.load(file)


@tool
def act(action: str) -> str:
    """Take one action and return the observation.

    Args:
        action: The action, in the form that the environment describes.
    """
    key = {"Authorization": f"Bearer {os.environ['AGENTRL_SECRET']}"}
    taken = requests.post(f"{os.environ['AGENTRL_URL']}/step", json={"action": action}, headers=key, timeout=600)
    return taken.json()["observation"] if taken.ok else "It is over: give your final answer."


def main():
    model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = ToolCallingAgent(
        tools=[act], model=model, instructions=TASK["instructions"], max_steps=20, verbosity_level=LogLevel.OFF
    )
    print(agent.run(TASK["prompt"]))


if __name__ == "__main__":
    main()
