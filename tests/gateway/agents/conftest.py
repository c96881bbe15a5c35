"""How the examples are run: in the Python that has their packages, with no home of anybody's."""

import os
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"
LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
MINI = {
    **LITELLM,
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
}
VARIABLES = {"dspy_question": LITELLM, "mini_swe_agent": MINI}
WITH_A_FILE = ("mini_swe_agent", "claude_code", "codex_exec")
"""They work in a folder, and leave their reward in a file."""
ANSWERING = ("smolagents_code", "dspy_question")
FORCING = ("smolagents_tools",)
"""They force a tool call in every answer."""


@pytest.fixture
def examples():
    """The folder of the examples."""
    return EXAMPLES


@pytest.fixture
def options_of(tmp_path):
    """Return the options of the external loop with which an example plays."""

    def options(name):
        told = {
            "command": [f"{os.environ['AGENTRL_AGENTS']}/bin/python", str(EXAMPLES / f"{name}.py")],
            "answer": "step" if name in (*ANSWERING, *WITH_A_FILE) else "none",
            "forms": "free" if name in FORCING else "enforce",
            "variables": {"HOME": str(tmp_path), **VARIABLES.get(name, {})},
        }
        return {**told, "reward_file": "reward.json"} if name in WITH_A_FILE else told

    return options
