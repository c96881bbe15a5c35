"""Claude Code from `claude-agent-sdk` works in a folder with a shell; a check gives the reward.

It needs `pip install claude-agent-sdk`.

agent:
  loop: external
  options: {command: "python examples/agents/claude_code.py", reward_file: reward.json}

The policy's shell has your rights, and a process that it leaves running can overwrite reward.json. If the policy may
try to cheat, run its commands in a container or as a separate user.
"""

import asyncio
import json
import sys
from pathlib import Path

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query

QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1", "CLAUDE_CODE_MAX_RETRIES": "2"}


async def work(folder, home, prompt):
    options = ClaudeAgentOptions(
        cwd=folder,
        model="policy",
        tools=["Bash", "Read", "Edit", "Write"],
        allowed_tools=["Bash", "Read", "Edit", "Write"],
        max_turns=30,
        setting_sources=[],
        env={**QUIET, "HOME": str(home)},
    )
    async for message in query(prompt=prompt, options=options):
        if isinstance(message, ResultMessage):
            print(message.result)


def main():
    folder, home = Path("work").absolute(), Path("home").absolute()
    folder.mkdir()
    home.mkdir()
    asyncio.run(work(folder, home, sys.stdin.read()))
    answer = folder / "answer.txt"
    right = answer.is_file() and answer.read_text().strip() == "42"
    Path("reward.json").write_text(json.dumps({"reward": float(right), "success": right}))


if __name__ == "__main__":
    main()
