"""Observations that are too long are truncated visibly and fit their budget."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import assemble_tokenizer, build_tokenizer, random_bpe

from agentrl.render.chat_template import CUT_MARK, TextEncoder

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
    mark = re.fullmatch(r"(.*)… \[cut: (\d+) characters left out\]", cut, re.DOTALL)
    assert mark is not None
    assert text.startswith(mark[1])
    assert 0 < int(mark[2]) == len(text) - len(mark[1])
    assert len(encoder.encode(cut)) <= budget or cut == CUT_MARK.format(len(text))


def test_a_long_observation_keeps_its_beginning() -> None:
    encoder = ENCODERS[0]
    text = "On the countertop 1, you see a mug 1. " * 50
    cut = encoder.cut(text, 100)
    assert cut.startswith("On the countertop 1, you see a mug 1. On")
    left_out = int(re.search(r"(\d+) characters left out", cut)[1])
    assert left_out == len(text) - len(cut.partition("…")[0])


def test_one_token_is_kept_where_it_fits_beside_the_mark() -> None:
    encoder = ENCODERS[0]
    text = "On the countertop 1, you see a mug 1. " * 50
    shortened = "On" + CUT_MARK.format(len(text) - 2)
    assert encoder.cut(text, len(encoder.encode(shortened))) == shortened


class Counting:
    """A tokenizer's backend that counts the characters that it encodes."""

    def __init__(self, backend):
        self._backend = backend
        self.characters = 0

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def encode(self, text, **options):
        self.characters += len(text)
        return self._backend.encode(text, **options)


WORDS = "On the countertop 1, you see a mug 1. "


@pytest.mark.parametrize("unit", [WORDS, "a", " ", "\n", "é", "鸡", "🙂", "<|im_end|>", "ab "], ids=repr)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_cost_of_a_cut_does_not_grow_with_the_text(monkeypatch, number: int, unit: str) -> None:
    encoder, encoded = ENCODERS[number], []
    for size in (300_000, 3_000_000):
        text = unit * (size // len(unit))
        backend = Counting(encoder._backend)
        monkeypatch.setattr(encoder, "_backend", backend)
        cut = encoder.cut(text, 100)
        monkeypatch.undo()
        assert len(encoder.encode(cut)) <= 100
        assert int(re.search(r"(\d+) characters left out", cut)[1]) + len(cut.rpartition("…")[0]) == len(text)
        encoded.append(backend.characters)
    assert encoded[1] < 2 * encoded[0]  # not 10 times
    assert encoded[0] < 300_000 / 2


@pytest.mark.parametrize("budget", [10, 100, 1000])
def test_a_cut_keeps_what_the_whole_text_would_keep(budget: int) -> None:
    encoder = ENCODERS[0]
    text = "".join(f"Shelf {number} holds {number * number} jars of jam. " for number in range(20_000))
    kept = encoder.cut(text, budget).partition("…")[0]
    whole = encoder.encode(text[: 100 * budget])
    assert kept == encoder.decode(whole[: len(encoder.encode(kept))])
    assert budget - len(encoder.encode(kept)) < 40  # the mark
