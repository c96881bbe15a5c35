"""A smolagents CodeAgent, which thinks in Python, answers a question. It needs `pip install "smolagents[openai]"`.

agent:
  loop: external
  options: {command: "python examples/agents/smolagents_code.py"}

The policy's Python runs in smolagents' own interpreter, which is not a sandbox.
"""

import os
import sys

from smolagents import CodeAgent, OpenAIModel
from smolagents.monitoring import LogLevel


def main():
    model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = CodeAgent(tools=[], model=model, max_steps=6, verbosity_level=LogLevel.OFF)
    print(agent.run(sys.stdin.read()))


if __name__ == "__main__":
    main()
