"""Partial answers during sampling are beginnings of the complete answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import TOKENIZER_FAMILIES
from support.tool_notations import NOTATIONS
from support.tool_outputs import TOOLS, tool_outputs

from agentrl.render.answer_tokens import AnswerProgress

TEXTS = st.text(st.sampled_from("ab é🙂漢\n <[{|>/"), max_size=30)


def told_of(renderer, ids, tools, stop=()):
    told = []
    progress = AnswerProgress(renderer, tools, stop, 7, told.append)
    for token in ids:
        progress.take([token])
    return told


def check(renderer, ids, tools):
    """Each part that is told is the beginning of what the whole says, and longer than the one before."""
    whole = renderer.read(ids, tools=tools)
    reasoning, text = "", ""
    for so_far in told_of(renderer, ids, tools):
        assert (whole.message.reasoning or "").startswith(so_far.reasoning)
        if not whole.problems:
            assert whole.message.text.startswith(so_far.text)
        assert so_far.reasoning.startswith(reasoning)
        assert so_far.text.startswith(text)
        reasoning, text = so_far.reasoning, so_far.text
    return reasoning, text, whole


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("family", sorted(TOKENIZER_FAMILIES))
@settings(max_examples=10, deadline=None, derandomize=True)
@given(thought=TEXTS, text=TEXTS)
def test_nothing_that_is_told_changes(renderer_of, family, tools, thinks, thought, text):
    renderer = renderer_of(family, enable_thinking=thinks)
    if tools and renderer._reader._parser is None:
        tools = ()
    written = renderer.thinking.form.format(thought) + text if thinks else text
    check(renderer, renderer.encoder.encode(written), tools)


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3", "gemma"])
def test_text_is_told_up_to_its_end(renderer_of, family):
    renderer = renderer_of(family)
    _, text, whole = check(renderer, renderer.encoder.encode("So it is: 漢字, and that is all."), ())
    assert text == whole.message.text == "So it is: 漢字, and that is all."


def test_the_tokens_of_the_prompt_are_told_even_while_a_call_is_held_back(renderer_of):
    renderer = renderer_of("qwen2.5")
    ids = renderer.encoder.encode('<tool_call>\n{"name": "add"')
    told = told_of(renderer, ids, TOOLS)
    assert [(so_far.prompt_tokens, so_far.reasoning, so_far.text) for so_far in told] == [(7, "", "")]


def test_thinking_is_told_while_it_lasts(renderer_of):
    renderer = renderer_of("qwen3", enable_thinking=True)
    told = told_of(renderer, renderer.encoder.encode("<think>\nit may be so\n</think>\n\nYes."), ())
    assert any(so_far.reasoning == "it may" and not so_far.text for so_far in told)
    assert (told[-1].reasoning, told[-1].text) == ("it may be so", "Yes.")


def test_nothing_is_told_past_a_stop_text(renderer_of):
    renderer = renderer_of("qwen2.5")
    told = told_of(renderer, renderer.encoder.encode("Yes.</done> And more of it"), (), stop=["</done>"])
    assert told[-1].text.startswith("Yes.</done>")
    assert "more" not in told[-1].text


@pytest.mark.parametrize("family", sorted(TOKENIZER_FAMILIES.keys() & NOTATIONS.keys()))
def test_calls_are_held_back(renderer_of, family):
    renderer = renderer_of(family)
    outputs = tool_outputs(family)[::4]
    told = [any(check(renderer, renderer.encoder.encode(output.text), TOOLS)[:2]) for output in outputs]
    assert renderer.family.marks_answers or any(told)
