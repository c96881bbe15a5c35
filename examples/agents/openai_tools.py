"""An agent with OpenAI's package (Responses) that acts through a tool. It needs `pip install openai requests`.

agent:
  loop: external
  options: {command: "python examples/agents/openai_tools.py", answer: none}
"""

import json
import os

import openai
import requests

ACT = {
    "type": "function",
    "name": "act",
    "description": "Take one action and return the observation.",
    "parameters": {"type": "object", "properties": {"action": {"type": "string"}}, "required": ["action"]},
}


def act(action):
    key = {"Authorization": f"Bearer {os.environ['AGENTRL_SECRET']}"}
    taken = requests.post(f"{os.environ['AGENTRL_URL']}/step", json={"action": action}, headers=key, timeout=600)
    taken.raise_for_status()
    return taken.json()


def main():
    with open(os.environ["AGENTRL_TASK"]) as file:
        task = json.load(file)
    client = openai.OpenAI()
    history = [{"role": "user", "content": task["prompt"]}]
    while True:
        reply = client.responses.create(model="policy", instructions=task["instructions"], input=history, tools=[ACT])
        history += reply.output
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return
        for call in calls:
            result = act(**json.loads(call.arguments))
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": result["observation"]})
            if result["done"]:
                return


if __name__ == "__main__":
    main()
