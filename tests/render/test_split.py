"""Splitting of texts into parts of bounded length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import build_tokenizer

from agentrl.render.chat_template import TextEncoder
from agentrl.rollout.policies import split_characters


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder(build_tokenizer("qwen2.5"))


@given(text=st.text(max_size=200), most=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_parts_are_the_text_and_none_is_too_long(encoder, text, most):
    parts = encoder.split(text, most)
    assert "".join(parts) == text
    assert all(len(encoder.encode(part)) <= most or len(part) == 1 for part in parts)
    assert "".join(split_characters(text, most)) == text
    assert all(len(part) <= 4 * most for part in split_characters(text, most))


def test_a_text_is_split_between_words(encoder):
    text = "one two three four five six seven eight nine ten\n" * 20
    parts = encoder.split(text, 30)
    assert len(parts) > 3
    assert all(part[-1] in " \n" for part in parts)
    assert encoder.split("short", 30) == ["short"]
