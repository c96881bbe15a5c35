"""An agent with OpenAI's Agents SDK that acts through a tool. It needs `pip install openai-agents requests`.

agent:
  loop: external
  options: {command: "python examples/agents/openai_agents.py", answer: none}
"""

import json
import os

import requests
from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)  # traces would go to OpenAI


@function_tool
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
    agent = Agent(name="Player", instructions=task["instructions"], model="policy", tools=[act])
    result = Runner.run_sync(agent, task["prompt"], max_turns=50)
    print(result.final_output)


if __name__ == "__main__":
    main()
