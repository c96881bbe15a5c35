"""A small new model is trained two steps on what the agents of the examples do."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.cli import main

pytestmark = [pytest.mark.agents, pytest.mark.timeout(120)]

SMALL = (
    "agent.max_turns=2",
    "agent.max_answer_tokens=12",
    "agent.max_tokens=16000",
    "algorithm.group_size=2",
    "trainer.tasks_per_step=1",
    "trainer.steps=2",
    "trainer.learning_rate=0.01",
    "trackers=[]",
    "model.scratch.hidden_size=32",
    "model.scratch.layers=1",
    "model.scratch.max_context=16000",
)
REWARD = "def brief(trajectory, task):\n    return -len(''.join(trajectory.completions)) / 100\n"
TRAINED = (
    *("openai_tools", "anthropic_tools", "openai_agents", "pydantic_ai_agent", "langgraph_agent"),
    *("smolagents_code", "smolagents_tools", "dspy_question", "mini_swe_agent"),
)
"""Not the command-line agents: their prompts are too long for a model that is trained in a second."""


@pytest.mark.parametrize("name", TRAINED)
def test_a_model_is_trained_two_steps(options_of, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("rewards.py").write_text(REWARD)
    environment = "guess_number" if options_of(name)["answer"] == "none" else "math_problems"
    words = ["--env", environment, "--model", "scratch", "--reward", "rewards:brief", "agent.loop=external", *SMALL]
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, f"agent.options={json.dumps(options_of(name))}"])
    assert not ended.value.code
    run = (tmp_path / "runs" / "latest").resolve()
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "train/loss" in step] == [1, 2]
    for step in steps:
        assert math.isfinite(step["train/loss"])
        assert step["trajectories/infrastructure"] == 0
        assert step["mismatch/prob_abs_max"] < 1e-3, "the trainer saw other tokens than the engine"
    before = load_file(run / "model" / "model.safetensors")
    after = load_file(run / "checkpoints" / "step-000002" / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)
