"""Templates that rewrite history are found before a run starts."""

from __future__ import annotations

import pytest
from support.tokenizers import build_tokenizer

from agentrl.errors import TemplateError
from agentrl.message import Role
from agentrl.render import trial
from agentrl.render.renderer import Renderer
from agentrl.render.template_check import check_template
from agentrl.render.trial import EndlessTemplate

TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("family", "roles"),
    [
        *((family, ("user",)) for family in ("qwen2.5", "qwen3_coder", "llama3", "gemma")),
        *((family, ("tool", "user")) for family in ("qwen2.5", "qwen3_coder")),
    ],
)
def test_families_that_only_append_or_trim_white_space_pass(renderer_of, family: str, roles: tuple[Role, ...]) -> None:
    tools = [TOOL] if "tool" in roles else []
    check_template(renderer_of(family), roles=roles, tools=tools)


def test_dropped_thinking_is_refused_with_both_renderings(renderer_of) -> None:
    with pytest.raises(TemplateError) as caught:
        check_template(renderer_of("qwen3", enable_thinking=True))
    message = str(caught.value)
    assert "rewrites history (it changes answers with thinking)" in message
    assert r"assistant\n' → 'go north<|im_end|>" in message
    assert r"assistant\n' → '<think>\nit is cold here\n</think>" in message
    assert "agent.enable_thinking to false" in message
    assert "step_independent" in message


def test_thinking_between_tool_results_is_kept(renderer_of) -> None:
    check_template(renderer_of("qwen3", enable_thinking=True), roles=("tool",), tools=[TOOL])


def test_thinking_is_dropped_once_a_user_speaks_again(renderer_of) -> None:
    with pytest.raises(TemplateError, match="answers with thinking"):
        check_template(renderer_of("qwen3", enable_thinking=True), roles=("tool", "user"), tools=[TOOL])


def test_a_block_that_the_template_wrote_itself_may_be_dropped(renderer_of) -> None:
    check_template(renderer_of("qwen3"))


def test_results_of_tools_need_a_template_that_shows_calls(renderer_of) -> None:
    with pytest.raises(TemplateError, match=r"does not show the call.*model.chat_template=gemma; or.*react_text"):
        check_template(renderer_of("gemma"), roles=("tool",))


MOVES_TOOLS = """{%- for m in messages -%}
{%- if loop.last and tools -%}<|im_start|>tools{{ tools | tojson }}<|im_end|>
{% endif -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NUMBERS_MESSAGES = """{%- for m in messages -%}
<|im_start|>{{ m.role }} {{ loop.revindex }}
{{ m.content }}<|im_end|>
{% endfor -%}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SHOUTS = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content | upper if m.role == 'assistant' and m.content != '@@STAND-IN@@' else m.content }}<|im_end|>
{% endfor -%}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize(
    ("template", "tools", "shown"),
    [
        (MOVES_TOOLS, [TOOL], "'tools["),
        (NUMBERS_MESSAGES, [], "→ '4"),
        (SHOUTS, [], "→ 'GO NORTH"),
    ],
)
def test_other_rewriting_is_refused(template: str, tools: list, shown: str) -> None:
    tokenizer = build_tokenizer("qwen2.5")
    tokenizer.chat_template = template
    renderer = Renderer(tokenizer, tool_parser="hermes")
    with pytest.raises(TemplateError, match="rewrites history") as caught:
        check_template(renderer, tools=tools)
    assert shown in str(caught.value)


_RESULTS = "messages | selectattr('role', 'equalto', 'tool') | list"


@pytest.mark.parametrize("condition", ["true", _RESULTS, f"{_RESULTS} | length > 1"])
def test_a_template_that_never_ends_is_named_before_the_run(monkeypatch, renderer_of, condition: str) -> None:
    monkeypatch.setattr(trial, "RENDERING_S", 0.2)
    tokenizer = build_tokenizer("qwen2.5")
    seconds = "{% for a in range(2000) %}{% for b in range(5000) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template += f"{{% if {condition} %}}{seconds}{{% endif %}}"
    with pytest.raises(EndlessTemplate, match=r"the chat template does not end: got messages .* not rendered in 0.2 s"):
        check_template(Renderer(tokenizer), roles=("tool",), tools=[TOOL])
