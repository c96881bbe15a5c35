"""mini-swe-agent works in a folder with a shell; a check gives the reward.

It needs `pip install mini-swe-agent`.

agent:
  loop: external
  options:
    command: "python examples/agents/mini_swe_agent.py"
    reward_file: reward.json
    variables:
      MSWEA_SILENT_STARTUP: "1"
      MSWEA_COST_TRACKING: ignore_errors
      MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT: "1"
      LITELLM_LOCAL_MODEL_COST_MAP: "True"

By default it retries ten times, for minutes, after the episode's budget is spent; OpenAI's client retries anyway. The
policy's shell has your rights, and a process that it leaves running can overwrite reward.json. If the policy may try to
cheat, run its commands in a container (`DockerEnvironment`).
"""

import json
import sys
from pathlib import Path

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_path
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def main():
    config = yaml.safe_load(get_config_path("mini").read_text())
    config["agent"].pop("mode")  # a setting of the interactive agent
    folder = Path("work").absolute()
    folder.mkdir()
    agent = DefaultAgent(
        LitellmModel(model_name="openai/policy", **config["model"]),
        LocalEnvironment(cwd=str(folder), **config["environment"]),
        **config["agent"],
    )
    print(agent.run(sys.stdin.read()))
    answer = folder / "answer.txt"
    right = answer.is_file() and answer.read_text().strip() == "42"
    Path("reward.json").write_text(json.dumps({"reward": float(right), "success": right}))


if __name__ == "__main__":
    main()
