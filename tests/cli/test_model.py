"""Model names of this machine, and replacement chat templates."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.models.matrix_products import FLOAT32_HEAD
from agentrl.observe.model_folder import find_model
from agentrl.observe.trajectory_store import read_trajectories

Cli = Callable[..., Any]

FORGETS = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ '(forgotten)' if message.role == 'assistant' and loop.revindex > 2 else message.content }}<|im_end|>
{% endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"""


@pytest.fixture
def added(agentrl: Cli, trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model that was added."""
    monkeypatch.setenv("AGENTRL_MODELS", str(tmp_path / "models"))
    ended = agentrl("model", "add", str(trained_run), "small")
    assert ended.code == 0, ended.err
    assert "model.path=small" in ended.err
    return "small"


def test_an_added_model_is_found_by_its_name(agentrl: Cli, workplace: Path, added: str) -> None:
    listed = agentrl("model", "list").out
    assert added in listed
    assert "MB" in listed
    words = ("eval", "--env", "guess_number", "--model", added, "--tasks", "2", "agent.loop=react_text")
    ended = agentrl(*words, "agent.max_turns=2", "agent.max_answer_tokens=8")
    assert ended.code == 0, ended.err


def test_what_cannot_be_added_is_named(agentrl: Cli, workplace: Path, trained_run: Path, added: str) -> None:
    folder = workplace / "notes.gguf"
    folder.write_text("no model")
    for words, message in (
        ((str(trained_run), added), "model small already exists"),
        ((str(trained_run), "a/b"), "this is not a valid name for a model: got 'a/b'"),
        (("nothing-here", "new"), "no model found in nothing-here"),
        (("notes.gguf", "new"), "notes.gguf is not a GGUF file"),
        (("absent.gguf", "new"), "file not found"),
    ):
        ended = agentrl("model", "add", *words)
        assert ended.code == 2
        assert message in ended.err
    assert agentrl("model", "add", str(trained_run), added, "--replace").code == 0
    assert [path.name for path in Path(workplace.parent).rglob("*.partial-*")] == []


def test_before_a_model_is_added_the_list_says_how(
    agentrl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_MODELS", str(tmp_path / "none"))
    assert "agentrl model add PATH NAME" in agentrl("model", "list").out


@pytest.mark.slow
def test_another_chat_template_is_rendered_served_and_exported(
    agentrl: Cli, workplace: Path, small: tuple[str, ...], added: str
) -> None:
    (workplace / "loud.jinja").write_text(
        "{%- for message in messages -%}\n<|im_start|>{{ message.role | upper }}\n{{ message.content }}<|im_end|>\n"
        "{% endfor -%}\n{{ '<|im_start|>ASSISTANT\n' if add_generation_prompt else '' }}"
    )
    words = ("train", "--env", "guess_number", *small, f"model.path={added}", "model.chat_template=loud.jinja")
    ended = agentrl(*words, "trainer.steps=1", "run.name=loud")
    assert ended.code == 0, ended.err
    run = workplace / "runs" / "loud"
    assert "upper" in (run / "model" / "chat_template.jinja").read_text()
    [checkpoint] = (run / "checkpoints").glob("step-*")
    assert "upper" in (checkpoint / "model" / "chat_template.jinja").read_text()
    shown = agentrl("view", "runs/loud", "--terminal").out
    assert "ASSISTANT" in shown
    assert "<|im_start|>assistant" not in shown


@pytest.mark.slow
def test_a_template_that_forgets_is_trained_in_forks_with_a_warning(
    agentrl: Cli, workplace: Path, small: tuple[str, ...], added: str
) -> None:
    (workplace / "forgets.jinja").write_text(FORGETS)
    words = ("train", "--env", "guess_number", *small, f"model.path={added}", "model.chat_template=forgets.jinja")
    refused = agentrl(*words, "agent.rewritten_history=refuse", "trainer.steps=1")
    assert refused.code == 2
    assert "rewrites history" in refused.err
    ended = agentrl(*words, "agent.options.format=plain", "trainer.steps=2", "run.name=forks")
    assert ended.code == 0, ended.err
    assert "conversations fork at these turns" in ended.err
    run = workplace / "runs" / "forks"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(step["mismatch/prob_abs_mean"] < 1e-4 for step in steps)
    episodes = [stored.trajectory for stored in read_trajectories(run / "trajectories")]
    turns = [[len(sequence.turns) for sequence in episode.sequences] for episode in episodes]
    assert [2, 1] in turns  # the third prompt forgets the first answer; one with special tokens changes at once
    assert all(sum(found) == 3 and found[-1] == 1 for found in turns)


def test_a_chat_template_for_a_model_from_nothing_is_refused(agentrl: Cli, workplace: Path) -> None:
    ended = agentrl("train", "quickstart", "model.chat_template=chatml", "--dry-run")
    assert ended.code == 2
    assert "model.chat_template" in ended.err


PLAIN = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"""


@pytest.mark.slow
def test_a_model_that_cannot_call_tools_plays_in_text_where_nobody_chose_a_loop(
    agentrl: Cli, workplace: Path, small: tuple[str, ...], added: str, caplog: pytest.LogCaptureFixture
) -> None:
    (workplace / "plain.jinja").write_text(PLAIN)
    words = ("--env", "guess_number", "--model", added, "model.chat_template=plain.jinja")
    short = ("agent.max_turns=2", "agent.max_answer_tokens=8")
    ended = agentrl("eval", *words, *short, "--tasks", "2")
    assert ended.code == 0, ended.err
    assert "has no tool calls, so its actions are text: agent.loop=react_text" in caplog.text
    caplog.clear()
    options = ("agent.loop=react_text", 'agent.options={format: action_tag, prefill: "<action>", stop: "</action>"}')
    same = agentrl("eval", *words, *short, "--tasks", "2", *options)
    assert "2/2 episodes" in same.err
    assert "reused episodes" in same.err  # of the same settings
    assert "has no tool calls" not in caplog.text
    unset = [word for word in small if not word.startswith(("agent.loop", "model.scratch"))]
    dry = agentrl("train", *words, *unset, "--dry-run")
    assert re.search(r"^agent loop +react_text ", dry.out, re.MULTILINE)
    trained = agentrl("train", *words, *unset, "trainer.steps=1", "run.name=text")
    assert trained.code == 0, trained.err
    assert "loop: react_text" in (workplace / "runs" / "text" / "config.yaml").read_text()
    assert "assistant\n<action>" in agentrl("view", "runs/text", "--terminal").out.replace("\n[forced]", "")


def test_a_chatml_model_without_tools_gets_a_template_that_shows_them_where_tools_are_asked_for(
    agentrl: Cli, workplace: Path, added: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = workplace / "plain-model"
    shutil.copytree(find_model(added), folder)
    (folder / "chat_template.jinja").write_text(PLAIN)
    words = ("eval", "--env", "guess_number", "--model", str(folder), "--tasks", "2", "agent.max_turns=1")
    ended = agentrl(*words, "agent.tools=[calculator]", "agent.max_answer_tokens=8")
    assert ended.code == 0, ended.err
    assert "using model.chat_template=chatml instead" in caplog.text
    stored = next((workplace / "runs" / "evaluations").glob("*/model/chat_template.jinja"))
    assert "tools" in stored.read_text()


@pytest.mark.parametrize("asked", ["agent.loop=tool_calling", "agent.tools=[calculator]"])
def test_a_model_that_cannot_call_tools_is_refused_where_tools_are_asked_for(
    agentrl: Cli, workplace: Path, added: str, asked: str
) -> None:
    (workplace / "plain.jinja").write_text(PLAIN)
    words = ("--env", "guess_number", "--model", added, "model.chat_template=plain.jinja", "--tasks", "2")
    ended = agentrl("eval", *words, asked)
    assert ended.code == 2
    assert "no known notation of tool calls" in ended.err


@pytest.mark.slow
def test_logits_in_float32_are_asked_of_servers_and_of_checkpoints(
    agentrl: Cli, workplace: Path, small: tuple[str, ...], trained_run: Path
) -> None:
    words = ("train", "--env", "guess_number", *small, f"model.path={trained_run}", "model.head_dtype=float32")
    ended = agentrl(*words, "trainer.steps=1", "run.name=exact")
    assert ended.code == 0, ended.err
    run = workplace / "runs" / "exact"
    [checkpoint] = (run / "checkpoints").glob("step-*")
    for model in (run / "model", checkpoint / "model"):
        assert FLOAT32_HEAD.items() <= json.loads((model / "config.json").read_text()).items()


@pytest.mark.slow
def test_model_check_measures_recommends_and_keeps_settings(
    agentrl: Cli, workplace: Path, added: str, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("--env", "guess_number", "--answers", "4", "--json", "check.json", "agent.max_answer_tokens=8")
    ended = agentrl("model", "check", added, *words, "--temperature", "0.5", "--loop", "react_text")
    assert ended.code == 0, ended.err
    [found] = json.loads((workplace / "check.json").read_text())
    assert "settings 1 of at most 6: agent.loop=react_text\n" in ended.err
    assert re.search(r"settings 1 of at most 6: \d+% of 4 first answers usable \(\d+ s\)", ended.err)
    assert found["template"]["faults"] == []
    assert found["template"]["tool_parser"] == "hermes"
    assert {row["overrides"][0] for row in found["answers"]} == {"agent.loop=react_text"}
    for row in found["answers"]:
        assert row["answers"] == 4
        assert 0 <= row["accepted"] <= row["usable"] <= 1
        assert row["usable"] == 1 - sum(entry["count"] for entry in row["unusable"]) / 4 or row["usable"] < 0.25
        assert row["repaired"] == 0
    assert found["agreement"]["tokens"] > 0
    assert found["agreement"]["mean"] < 0.05
    best = max(row["usable"] for row in found["answers"])
    assert (found["recommended"] is not None) == (best > 0)
    assert "engine and trainer: mean |pi - mu|" in ended.out
    if best > 0:
        assert "sampling.temperature=0.5" in ended.out
        assert f"{best:.0%} usable" in ended.out
        assert agentrl("eval", "--env", "guess_number", "--model", added, "--tasks", "1").code == 0
        assert "of 4 first answers usable" in caplog.text


def test_a_model_without_tool_calls_is_checked_in_text(agentrl: Cli, workplace: Path, added: str) -> None:
    (workplace / "plain.jinja").write_text(PLAIN)
    words = ("--answers", "4", "--json", "check.json", "agent.max_answer_tokens=8", "model.chat_template=plain.jinja")
    ended = agentrl("model", "check", added, *words, "agent.loop=react_text")
    assert ended.code == 0, ended.err
    [found] = json.loads((workplace / "check.json").read_text())
    assert found["template"]["tool_parser"] is None
    assert {row["overrides"][0] for row in found["answers"]} == {"agent.loop=react_text"}
    assert ended.out.count("agent.loop=react_text agent.loop") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--loop", "react"), "model check does not try this loop: got react"),
        (("--engine", "scripted"), "model check needs an engine that samples tokens: got engine=scripted"),
        (("--env", "gues_number"), "guess_number"),
    ],
)
def test_what_model_check_cannot_do_is_said(agentrl: Cli, added: str, words: tuple[str, ...], message: str) -> None:
    ended = agentrl("model", "check", added, *words)
    assert ended.code == 2
    assert message in ended.err


def test_env_prompt_and_model_check_read_another_template(agentrl: Cli, workplace: Path, added: str) -> None:
    (workplace / "loud.jinja").write_text(PLAIN.replace("message.role", "message.role | upper"))
    words = (
        "env",
        "prompt",
        "guess_number",
        "--model",
        added,
        "model.chat_template=loud.jinja",
        "agent.loop=react_text",
    )
    ended = agentrl(*words)
    assert ended.code == 0, ended.err
    assert "<|im_start|>SYSTEM" in ended.out
