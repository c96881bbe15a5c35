"""Codex from `openai-codex-cli-bin` works in a folder with a shell; a check gives the reward.

It needs `pip install openai-codex-cli-bin`.

agent:
  loop: external
  options: {command: "python examples/agents/codex_exec.py", reward_file: reward.json}

The policy's shell has your rights, and a process that it leaves running can overwrite reward.json. If the policy may
try to cheat, run its commands in a container or as a separate user.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from codex_cli_bin import bundled_codex_path

CONFIG = """
model = "policy"
model_provider = "gateway"
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
analytics.enabled = false
features.multi_agent = false  # the gateway does not support the form of sub-agents' tools

[model_providers.gateway]
name = "gateway"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 1
stream_max_retries = 1
"""


def main():
    folder, home = Path("work").absolute(), Path("codex").absolute()
    folder.mkdir()
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(url=os.environ["OPENAI_BASE_URL"]))
    words = [bundled_codex_path(), "exec", "--skip-git-repo-check", "--cd", folder, sys.stdin.read()]
    ended = subprocess.run(words, env={**os.environ, "CODEX_HOME": str(home)}, stdin=subprocess.DEVNULL)
    answer = folder / "answer.txt"
    right = answer.is_file() and answer.read_text().strip() == "42"
    Path("reward.json").write_text(json.dumps({"reward": float(right), "success": right}))
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
