"""An instruct model with tool calls, Qwen2.5-Coder-0.5B-Instruct, as a new user meets it.

`make test-real-model` installs it first; a missing model is a failure here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from agentrl.observe.model_folder import find_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900), pytest.mark.xdist_group("instruct")]
NAME = "qwen2.5-coder-0.5b-instruct"
ANSWERS = 8


def run_agentrl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed, in a folder of its own and with all cores."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment["AGENTRL_MODELS"] = str(folder / "models")
    command = [sys.executable, "-c", "from agentrl.cli import main; main()", *words]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended


def test_the_head_is_tied_again_and_weights_take_two_bytes() -> None:
    folder = Path(find_model(NAME))
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert file.get_tensor("model.norm.weight").element_size() == 2
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_tool_calls_get_through_with_the_settings_that_model_check_finds(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / NAME).symlink_to(find_model(NAME))
    words = ("--env", "guess_number", "model.dtype=auto")
    run_agentrl(tmp_path, "model", "check", NAME, *words, "--answers", str(ANSWERS), "--json", "check.json")
    [found] = json.loads((tmp_path / "check.json").read_text())
    assert found["template"] == {
        "family": "qwen2.5",
        "tool_parser": "hermes",
        "end_of_turn": ["<|endoftext|>", "<|im_end|>"],
        "faults": [],
    }
    tools, text = ([row for row in found["answers"] if loop in row["overrides"][0]] for loop in ("tool_", "react_"))
    assert max(row["usable"] for row in tools) >= 0.9
    assert max(row["usable"] for row in text) >= 0.9
    assert any(row["repaired"] > 0.5 for row in tools)  # it leaves out tags that the notation has
    assert found["agreement"]["mean"] < 0.02
    assert "agent.loop=tool_calling" in found["recommended"]

    played = run_agentrl(tmp_path, "eval", "--model", NAME, *words, "--tasks", "4", "agent.max_turns=2")
    assert "of 8 first answers usable" in played.stderr
    assert "agent.loop=tool_calling" in played.stderr
