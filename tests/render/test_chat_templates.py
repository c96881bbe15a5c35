"""The chat templates that are shipped: they only append, and calls come back as they were said."""

from __future__ import annotations

import pytest
from support.tokenizers import build_tokenizer

from agentrl.errors import TemplateError, UsageError
from agentrl.message import Message, ToolCall, system, tool_result, user
from agentrl.render.chat_template import CHAT_TEMPLATES, find_chat_template, read_chat_template
from agentrl.render.renderer import Renderer
from agentrl.render.template_check import check_template

TOKENIZER = {"chatml": "qwen2.5", "qwen3": "qwen3", "llama3": "llama3", "gemma": "gemma"}
MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move a step.",
        "parameters": {"type": "object", "properties": {"direction": {"type": "string"}}},
    },
}


def renderer(name: str, *, enable_thinking: bool = False) -> Renderer:
    tokenizer = build_tokenizer(TOKENIZER[name])
    tokenizer.chat_template = read_chat_template(name)
    return Renderer(tokenizer, enable_thinking=enable_thinking)


@pytest.mark.parametrize(
    ("templates", "taken"),
    [
        (["default", "tool_use"], "tool_use"),
        (["default", "rag"], "default"),
        (["tool_use"], "tool_use"),
        (["default", "tool_use without tools refused"], "default"),
    ],
)
def test_one_of_several_named_templates_is_taken(templates, taken, tmp_path, caplog):
    plain, refused = "{{- messages | length }}", "{{- raise_exception('no tools') }}"
    with_tools = read_chat_template("chatml")
    text = {"tool_use": with_tools, "default": with_tools, "rag": plain}
    if taken == "tool_use":
        text["default"] = "Chat. " + with_tools
    named = {name.split()[0]: text.get(name, "{%- if not tools %}" + refused + "{%- endif %}") for name in templates}
    tokenizer = build_tokenizer("qwen2.5")
    tokenizer.chat_template = named
    tokenizer.save_pretrained(tmp_path)
    with caplog.at_level("INFO", logger="agentrl.render"):
        made = Renderer(type(tokenizer).from_pretrained(tmp_path))
    assert made.template.source == with_tools
    assert f"{taken} is used" in caplog.text
    assert ("differently from default" in caplog.text) == (templates == ["default", "tool_use"])
    check_template(made, roles=["tool"], tools=[MOVE])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the tokenizer has no chat template"),
        ({"rag": "x", "b": "y"}, r"templates named b, rag(.|\n)*one named tool_use or default"),
    ],
)
def test_a_tokenizer_without_a_usual_template_is_refused(template, message):
    tokenizer = build_tokenizer("qwen2.5")
    tokenizer.chat_template = template
    with pytest.raises(TemplateError, match=message):
        Renderer(tokenizer)


def test_every_shipped_template_is_tried_here() -> None:
    assert {path.stem for path in CHAT_TEMPLATES.glob("*")} == set(TOKENIZER)


@pytest.mark.parametrize("name", TOKENIZER)
@pytest.mark.parametrize("roles", [("user",), ("tool",), ("tool", "user")])
@pytest.mark.parametrize("enable_thinking", [False, True])
def test_shipped_templates_only_append(name, roles, enable_thinking):
    check_template(renderer(name, enable_thinking=enable_thinking), roles=roles, tools=[MOVE])


@pytest.mark.parametrize("name", TOKENIZER)
def test_calls_are_read_back_and_results_shown(name):
    made = renderer(name)
    calls = tuple(ToolCall(name="move", arguments={"direction": way}) for way in ('"north" \\', "é"))
    with_words = [] if name == "llama3" else [("I go.", 1)]  # Llama 3 calls with an answer that is JSON alone
    for content, count in (("", 1), *with_words, ("", 2)):
        said = Message(role="assistant", content=content, tool_calls=calls[:count])
        read = made.read(made.encoder.encode(made.answer_text(said)), tools=[MOVE]).message
        assert [(call.name, call.arguments) for call in read.tool_calls] == [
            (call.name, call.arguments) for call in said.tool_calls
        ]
        assert read.content == content
    shown = made.template.render(
        [system("You play."), user("Go."), said, *(tool_result(call, f"went {call.arguments}") for call in calls)],
        tools=[MOVE],
        generation_prompt=True,
    )
    assert shown.count("You play.") == shown.count("Move a step.") == 1
    assert all(f"went {call.arguments}" in shown for call in calls)


@pytest.mark.parametrize("name", TOKENIZER)
def test_no_system_message_and_no_tools_add_nothing(name):
    shown = renderer(name).template.render([user("Hello.")], generation_prompt=True)
    assert "system" not in shown
    assert "function" not in shown


def test_templates_are_found_by_name_and_as_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert find_chat_template("chatml") == "chatml"
    assert find_chat_template("mine.jinja") == str(tmp_path / "mine.jinja")
    with pytest.raises(UsageError, match=r"chat template not found: got model.chat_template chatlm.*chatml, gemma"):
        find_chat_template("chatlm")
    with pytest.raises(UsageError, match="chat template not found"):
        find_chat_template(str(tmp_path))


def test_a_template_that_reads_a_list_of_tools_gets_an_empty_one_without_tools():
    tokenizer = build_tokenizer("qwen2.5")
    listed = "{%- for tool in tools %}{{- tool.function.name }}\n{%- endfor %}"
    tokenizer.chat_template = listed + read_chat_template("chatml")
    made = Renderer(tokenizer)
    check_template(made, roles=["tool", "user"], tools=[MOVE])
    assert made.template.render([user("x")]).startswith("<|im_start|>")
