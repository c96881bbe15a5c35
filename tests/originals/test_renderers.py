"""Our prompts, turns and parsed answers equal those of Prime Intellect's package `renderers`, family by family.

It writes the tokens of a family by its own code, without a chat template; ours come from the family's template. The
templates of these tests have short tool instructions, so prompts with tools are compared from the first user's text on.
docs/concepts/model-families.md lists the differences that these tests found.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import pytest
import renderers
from support.tokenizers import TOKENIZER_FAMILIES, build_tokenizer, build_with_other_template

from agentrl.message import Message, ToolCall, system, user
from agentrl.render.renderer import Renderer

pytestmark = [pytest.mark.originals, pytest.mark.timeout(600)]
FAMILIES = {
    "qwen3": "qwen3",
    "llama3": "llama-3",
    "glm": "glm-4.5",
    "deepseek_v3": "deepseek-v3",
    "deepseek_r1": "deepseek-r1",
    "kimi_k2": "kimi-k2",
    "minimax_m2": "minimax-m2",
}
"""Our name of a family, and the package's."""
THINKING, SWITCHED = ("qwen3", "glm", "minimax_m2"), ("qwen3", "glm")
"""Families whose histories show thinking, and those whose thinking can be switched off."""
NO_CALLS = ("deepseek_r1",)
"""Families whose published template shows no calls of a message with text, even an empty one."""
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
QUESTION, NEXT = "What is 2 plus 3?", "And 4 plus 4?"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def tokenizer_of(family: str) -> Any:
    """Return a small tokenizer of a family."""
    return build_tokenizer(family) if family in TOKENIZER_FAMILIES else build_with_other_template(family)


@functools.cache
def ours(family: str, thinks: bool = True) -> Renderer:
    """Return our renderer of a family."""
    return Renderer(tokenizer_of(family), enable_thinking=thinks)


@functools.cache
def theirs(family: str, thinks: bool = True) -> Any:
    """Return the package's renderer of the same tokenizer."""
    options = {"enable_thinking": thinks} if family in SWITCHED else {}
    return renderers.create_renderer(
        tokenizer_of(family), renderers.config_from_name(FAMILIES[family]), chat_template_kwargs=options
    )


def conversation(family: str, kind: str) -> list[Message]:
    """Return a conversation whose end the policy is to answer."""
    beginning = [system("Be brief."), user(QUESTION)]
    thought = Message(role="assistant", content="It is 5.", reasoning="2 and 3 make 5." if family in THINKING else None)
    identity = ours(family).call_id("add", 0)
    call = ToolCall(name="add", arguments={"a": 2, "b": 3}, id=identity)
    results = [
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content="5", tool_call_id=identity, name="add"),
    ]
    return {
        "question": beginning,
        "turns": [*beginning, thought, user(NEXT)],
        "spaces": [system(" Be\n\nbrief. "), user(f"  {QUESTION}\n")],
        "call": [*beginning, *results],
        "later call": [*beginning, thought, user(NEXT), *results],
    }[kind]


def as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as the package reads them."""
    written = []
    for message in messages:
        given: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.reasoning:
            given["reasoning_content"] = message.reasoning
        if message.tool_calls:
            given["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in message.tool_calls
            ]
        if message.role == "tool":
            given |= {"tool_call_id": message.tool_call_id, "name": message.name}
        written.append(given)
    return written


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("kind", ["question", "turns", "spaces", "call", "later call"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_equal(family: str, kind: str, thinks: bool) -> None:
    if "call" in kind and family in NO_CALLS:
        return
    messages, tools = conversation(family, kind), [TOOL] if "call" in kind else []
    mine = ours(family, thinks).prompt(messages, tools).ids
    other = theirs(family, thinks).render_ids(as_dicts(messages), tools=tools or None, add_generation_prompt=True)
    if tools:
        decode = ours(family, thinks).encoder.decode
        text = decode(other).partition(QUESTION)[2]
        if not thinks and family == "qwen3":
            # it keeps the empty thought of the prompt in a history, which the published template drops
            text = text.replace(f"{EMPTY_THOUGHT}<tool_call>", "<tool_call>")
        assert decode(mine).partition(QUESTION)[2] == text
    else:
        assert mine == other


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("kind", ["turns", "call"])
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_are_appended_alike(family: str, kind: str, is_cut: bool) -> None:
    if kind == "call" and family in NO_CALLS:
        return
    renderer, messages = ours(family, thinks=False), conversation(family, kind)
    prompt = renderer.prompt(messages[:2], [TOOL]).ids
    answer = renderer.encoder.encode(renderer.answer_text(messages[2]) if kind == "call" else plain_text_of(renderer))
    if not is_cut:
        answer.append(renderer.boundary.end_id)
    mine = [*prompt, *answer, *renderer.suffix(messages[3:], last_id=answer[-1]).ids]
    if is_cut and family == "glm":
        answer.append(renderer.encoder.encode("<|endoftext|>")[0])  # it ends a cut answer by the end of text
        mine[len(prompt) : len(prompt) + len(answer) - 1] = answer
        answer.pop()
    bridged = theirs(family, thinks=False).bridge_to_next_turn(prompt, answer, as_dicts(messages[3:]), tools=[TOOL])
    if kind == "turns" and renderer.thinks:
        # their answer to a template that drops earlier thoughts is to render the history again; ours keeps the tokens
        assert bridged is None
        return
    assert bridged is not None
    assert renderer.encoder.decode(mine) == renderer.encoder.decode(bridged.token_ids)
    assert mine == bridged.token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_read_alike(family: str) -> None:
    renderer, messages = ours(family, thinks=False), conversation(family, "call")
    texts = [plain_text_of(renderer)] + ([] if family in NO_CALLS else [renderer.answer_text(messages[2])])
    prompt = renderer.prompt(messages[:2]).ids
    for text in texts:
        ids = [*renderer.encoder.encode(text), renderer.boundary.end_id]
        mine = renderer.read(ids, tools=[TOOL])
        other = theirs(family, thinks=False).parse_response(ids, tools=[TOOL], prompt_ids=prompt)
        assert mine.text.strip() == other.content.strip()
        assert (mine.message.reasoning or "").strip() == (other.reasoning_content or "").strip()
        assert [(found.name, dict(found.arguments)) for found in mine.tool_calls] == [
            (found.name, found.arguments if isinstance(found.arguments, dict) else json.loads(found.arguments))
            for found in other.tool_calls
        ]


def plain_text_of(renderer: Renderer) -> str:
    """Return an answer's text, after a thought if the prompt has opened one."""
    return renderer.plain_answer("It is 5.", thought="Hm." if renderer.thinks else None)
