"""Observations that are too long are cut visibly and fit their budget."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.render.encoding import CUT_MARK, TextEncoder
from agentrl.testing.tokenizers import assemble_tokenizer, build_tokenizer, random_bpe

ENCODERS = [
    TextEncoder(build_tokenizer("qwen2.5")),
    *(TextEncoder(assemble_tokenizer("gemma", random_bpe(seed, words=bool(seed % 2)))) for seed in range(4)),
]


@pytest.mark.parametrize("number", range(len(ENCODERS)))
@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(max_size=200), budget=st.integers(0, 120))
def test_a_cut_text_fits_and_says_what_is_missing(number: int, text: str, budget: int) -> None:
    encoder = ENCODERS[number]
    total = len(encoder.encode(text))
    cut = encoder.cut(text, budget)
    if total <= budget:
        assert cut == text
        return
    mark = re.fullmatch(r"(.*)… \[cut: (\d+) tokens left out\]", cut, re.DOTALL)
    assert mark is not None
    assert text.startswith(mark[1])
    assert 0 < int(mark[2]) <= total
    assert len(encoder.encode(cut)) <= budget or cut == CUT_MARK.format(total)


def test_a_long_observation_keeps_its_beginning() -> None:
    encoder = ENCODERS[0]
    text = "On the countertop 1, you see a mug 1. " * 50
    cut = encoder.cut(text, 100)
    assert cut.startswith("On the countertop 1, you see a mug 1. On")
    left_out = int(re.search(r"(\d+) tokens left out", cut)[1])
    kept = cut.partition("…")[0]
    assert left_out == len(encoder.encode(text)) - len(encoder.encode(kept))
