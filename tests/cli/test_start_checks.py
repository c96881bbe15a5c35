"""Templates, tools and roles that are refused at the start: the dry run refuses them too, and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tokenizers import build_tokenizer, build_with_other_template
from transformers import LlamaConfig, PreTrainedTokenizerFast

Cli = Callable[..., Any]

GUESS = ("--env", "guess_number")
SCRATCH = (*GUESS, "--model", "scratch")
TOOLS = "agent.loop=tool_calling"
BROKEN = """
import gymnasium


class NoExpert(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        return "Say something.", {}

    def step(self, action):
        return "", 1.0, True, False, {}
"""
CHAT = {
    "messages": [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": '{"where": "hall"}'}}],
        },
        {"role": "tool", "content": "dark", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is dark."},
    ]
}


def save(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a folder that looks like a model until its weights are loaded."""
    tokenizer.save_pretrained(folder)
    LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1).save_pretrained(
        folder
    )


@pytest.fixture
def place(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models, an environment without an expert, and conversations with a tool call."""
    monkeypatch.syspath_prepend(workplace)
    save(workplace / "llama3", build_with_other_template("llama3_first"))
    save(workplace / "qwen3", build_tokenizer("qwen3"))
    (workplace / "silent_world.py").write_text(BROKEN)
    (workplace / "chats.jsonl").write_text(json.dumps(CHAT))
    return workplace


CASES = {
    "template without tools": ((*GUESS, "--model", "llama3", TOOLS), "does not show tools"),
    "template that drops thinking": (
        (*GUESS, "--model", "qwen3", "agent={loop: react_text, enable_thinking: true, rewritten_history: refuse}"),
        "rewrites history",
    ),
    "unknown tool": ((*SCRATCH, TOOLS, "agent.tools=[calculater]"), "Did you mean 'calculator'?"),
    "tool of the action's name": (
        (*SCRATCH, TOOLS, "agent.tools=[calculator]", "agent.options={action_name: calculator}"),
        "has the name of the tool that takes actions",
    ),
    "role that the loop does not have": (
        (*SCRATCH, "agent.loop=react_text", "agent.roles={judge: {system_prompt: Judge.}}"),
        "agent.roles.judge: the agent loop react_text has no such role",
    ),
    "role that can call itself": (
        (*SCRATCH, TOOLS, "agent.roles={clerk: {as_tool: {description: Ask it.}, tools: [clerk]}}"),
        "the role clerk can call itself",
    ),
    "options that the environment does not take": ((*SCRATCH, "environment.options={colour: red}"), "colour"),
}


def refused(agentrl: Cli, place: Path, *words: str) -> str:
    """Run a command that has to end without a trace, and return its error on one line."""
    before = sorted(str(path) for path in place.rglob("*") if "__pycache__" not in str(path))
    ended = agentrl(*words)
    assert ended.code != 0
    assert "Traceback" not in ended.err
    assert sorted(str(path) for path in place.rglob("*") if "__pycache__" not in str(path)) == before
    return " ".join(ended.err.split())


@pytest.mark.parametrize("command", [("train",), ("train", "--dry-run"), ("sft",), ("sft", "--dry-run"), ("eval",)])
@pytest.mark.parametrize("case", CASES)
def test_start_and_dry_run_refuse_the_same(agentrl: Cli, place: Path, case: str, command: tuple[str, ...]) -> None:
    words, message = CASES[case]
    if command == ("eval",) and "scratch" in words:
        words = tuple("qwen3" if word == "scratch" else word for word in words)
    assert message in refused(agentrl, place, command[0], *words, *command[1:])


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_file_whose_texts_the_template_leaves_out_is_refused(agentrl: Cli, place: Path, dry: tuple[str, ...]) -> None:
    save(place / "llama31", build_tokenizer("llama3"))
    rows = [dict(row) for row in CHAT["messages"]]
    rows[1]["content"] = "I look at it."
    (place / "chats.jsonl").write_text(json.dumps({**CHAT, "messages": rows}))
    told = refused(agentrl, place, "sft", "--model", "llama31", "sft.data=chats.jsonl", *dry)
    assert "leaves out the text of an answer next to tool calls" in told
    assert "got 1 of 1 answers with thinking or text next to calls, the first in chats.jsonl line 1, message 2" in told


@pytest.mark.parametrize("last", [2, 4])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_file_whose_calls_the_template_leaves_out_is_refused(
    agentrl: Cli, place: Path, dry: tuple[str, ...], last: int
) -> None:
    (place / "chats.jsonl").write_text(json.dumps({"messages": CHAT["messages"][:last]}))
    said = refused(agentrl, place, "sft", "--data", "chats.jsonl", "--model", "llama3", *dry)
    assert "the chat template does not show the call of look_around" in said


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_an_expert_that_is_not_there_is_refused(agentrl: Cli, place: Path, dry: tuple[str, ...]) -> None:
    words = ("--env", "silent_world:NoExpert", "--model", "scratch", "algorithm={expert: {members: 1}, loss: luffy}")
    assert "has no expert to demonstrate" in refused(agentrl, place, "train", *words, *dry)


def test_a_dry_run_asks_for_no_model_that_is_not_here(agentrl: Cli, place: Path) -> None:
    ended = agentrl("train", *GUESS, "--model", "example/model-of-another-machine", "--dry-run", "--show-config")
    assert ended.code == 0
    assert "example/model-of-another-machine" in ended.out
