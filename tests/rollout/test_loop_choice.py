"""The default agent loop of a model: the result of model check, or what its template supports."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from support.models import tiny_model
from support.tokenizers import build_tokenizer

from agentrl.config import Config, load_config
from agentrl.config.derived import per_environment_configs
from agentrl.rollout.loop_choice import (
    PlaySettings,
    Recommendation,
    find_recommendation,
    save_recommendation,
    select_default_loop,
    show_tools,
)

TEXT = PlaySettings(loop="react_text", options={"format": "action_tag", "stop": "</action>"}, shots=2)
FOUND = Recommendation(settings=TEXT, usable=0.875, answers=24, date="2026-11-25")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a model whose chat template has tool calls."""
    monkeypatch.setenv("AGENTRL_MODELS", str(tmp_path / "models"))
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    build_tokenizer("qwen2.5").save_pretrained(folder)
    return folder


def config_of(model: Path, *words: str, env: str = "guess_number") -> Config:
    return load_config(None, [f"environment={env}", f"model.path={model}", *words])


def chosen(config: Config) -> tuple[Config, list[str]]:
    said: list[str] = []
    return select_default_loop(config, say=said.append), said


def test_what_model_check_found_is_taken_and_said(model: Path) -> None:
    assert find_recommendation(config_of(model)) is None
    save_recommendation(config_of(model), FOUND)
    config, said = chosen(config_of(model))
    assert (config.agent.loop, config.agent.options, config.agent.few_shot_turns) == ("react_text", TEXT.options, 2)
    [line] = said
    assert "88% of 24 first answers usable on 2026-11-25" in line
    assert "agent.loop=react_text 'agent.options={" in line


@pytest.mark.parametrize(
    "words", [["agent.loop=tool_calling"], ["agent.options={prefill: true}"], ["agent.tools=[calculator]"]]
)
def test_a_choice_of_the_user_stands(model: Path, words: list[str]) -> None:
    save_recommendation(config_of(model), FOUND)
    config = config_of(model, *words)
    assert chosen(config) == (config, [])


def test_shots_of_the_user_stand_beside_the_found_loop(model: Path) -> None:
    save_recommendation(config_of(model), FOUND)
    config, [line] = chosen(config_of(model, "agent.few_shot_turns=0"))
    assert "using these settings, except for agent.few_shot_turns, which you set" in line
    assert (config.agent.loop, config.agent.few_shot_turns) == ("react_text", 0)


def test_recommendations_are_keyed_by_model_files_template_environment_and_options(model: Path) -> None:
    save_recommendation(config_of(model), FOUND)
    assert find_recommendation(config_of(model)) == FOUND
    assert find_recommendation(config_of(model, env="countdown")) is None
    assert find_recommendation(config_of(model, "environment.options={high: 50}")) is None
    assert find_recommendation(config_of(model, "model.chat_template=chatml")) is None
    weights = model / "model.safetensors"
    status = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert find_recommendation(config_of(model)) is None


@pytest.fixture
def without_tools(model: Path) -> Path:
    """The same model with a ChatML template that shows no tools."""
    (model / "chat_template.jinja").write_text(
        "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
    )
    return model


def test_a_model_without_a_chat_template_keeps_the_loop_until_the_start_is_checked(model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = build_tokenizer("qwen2.5")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(model)
    config = config_of(model)
    assert chosen(config) == (config, [])


OWN_TOOLS = """
import gymnasium
import agentrl

class Switch(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(100)

    def __init__(self):
        self.tools = [agentrl.tool(self.press)]

    def press(self, number: int) -> str:
        \"""Press a button.

        Args:
            number: Its number.
        \"""
        return "Pressed."

    def reset(self, *, seed=None, options=None):
        return "Press a button.", {}

    def step(self, action):
        return "Call a tool.", 0.0, False, False, {}
"""


def test_an_environment_with_tools_of_its_own_is_not_played_in_text(
    without_tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "switches.py").write_text(OWN_TOOLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    config, [line] = chosen(config_of(without_tools, env="switches:Switch"))
    assert config.agent.loop == "tool_calling"
    assert config.model.chat_template == "chatml"
    assert "model.chat_template=chatml instead" in line


def test_an_option_of_text_loops_chooses_the_text_loop_of_a_model_without_tools(without_tools: Path) -> None:
    config, [line] = chosen(config_of(without_tools, "agent.options={format: plain}"))
    assert (config.agent.loop, config.agent.options) == ("react_text", {"format": "plain"})
    assert "agent.loop=react_text" in line


def test_a_result_is_of_the_model_wherever_its_files_are(model: Path) -> None:
    save_recommendation(config_of(model), FOUND)
    (model / "notes.md").write_text("Seen.")
    for file in model.iterdir():
        os.utime(file, (1, 1))
    moved = model.rename(model.parent / "moved")
    assert find_recommendation(config_of(moved)) == FOUND
    (moved / "chat_template.jinja").write_text("{{ messages }}")
    assert find_recommendation(config_of(moved)) is None


def test_a_damaged_result_is_as_none(model: Path) -> None:
    file = save_recommendation(config_of(model), FOUND)
    file.write_text('{"settings": {}}')
    assert find_recommendation(config_of(model)) is None
    assert chosen(config_of(model))[1] == []


def test_settings_are_words_for_a_shell() -> None:
    assert str(dataclasses.replace(TEXT, options={})) == "agent.loop=react_text agent.few_shot_turns=2"
    assert str(PlaySettings(loop="tool_calling", options={"prefill": True})) == (
        "agent.loop=tool_calling 'agent.options={\"prefill\": true}'"
    )


TWO = "environments={one: {name: guess_number}, two: {name: countdown}}"


def test_each_environment_of_several_gets_its_own_loop(without_tools: Path) -> None:
    save_recommendation(config_of(without_tools, env="countdown"), FOUND)
    config, said = chosen(load_config(None, [TWO, f"model.path={without_tools}"]))
    one, two = (part.config.agent for part in per_environment_configs(config))
    assert (one.loop, one.few_shot_turns) == ("react_text", 0)
    assert one.options == {"format": "action_tag", "prefill": "<action>", "stop": "</action>"}
    assert (two.loop, two.options, two.few_shot_turns) == ("react_text", TEXT.options, 2)
    assert [line.partition(":")[0] for line in said] == ["two", "one"]
    assert "set environments.one.agent.loop to choose" in said[1]


def test_a_loop_that_the_user_chose_for_one_environment_stands(without_tools: Path) -> None:
    words = [TWO, f"model.path={without_tools}", "environments.one.agent.loop=step_independent"]
    config, [line] = chosen(load_config(None, words))
    one, two = (part.config.agent for part in per_environment_configs(config))
    assert (one.loop, one.options, two.loop) == ("step_independent", {}, "react_text")
    assert line.startswith("two: ")


def test_tools_of_one_environment_choose_the_template_for_all(without_tools: Path) -> None:
    words = [TWO, f"model.path={without_tools}", "environments.two.agent.tools=[calculator]"]
    config, [line] = chosen(load_config(None, words))
    assert config.model.chat_template == "chatml"
    assert {part.config.agent.loop for part in per_environment_configs(config)} == {"tool_calling"}
    assert "model.chat_template=chatml instead" in line


def test_clients_that_may_bring_tools_get_a_template_that_shows_them(without_tools: Path) -> None:
    said: list[str] = []
    config = config_of(without_tools)
    assert show_tools(config, say=said.append).model.chat_template == "chatml"
    assert len(said) == 1
    own = config_of(without_tools, "agent.tool_parser=hermes")
    assert show_tools(own, say=said.append) is own


def test_a_model_with_tool_calls_keeps_its_template(model: Path) -> None:
    config = config_of(model)
    assert show_tools(config, say=print) is config
