"""Exact match and F1 of answers, after the normalization of SQuAD (Rajpurkar et al., 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return a text in lower case, without punctuation and articles, with single spaces.

    A text of nothing else keeps them: otherwise an answer without words would be right if ``A`` is.

    >>> normalize("  The  Old-Man, and a sea! "), normalize("A"), normalize("")
    ('oldman and sea', 'a', '')
    """
    kept = _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
    return " ".join(kept or text.lower().split())


def exact_match(answer: str, golden: Sequence[str]) -> float:
    """Return 1 if the answer equals one of the golden answers, else 0."""
    return float(normalize(answer) in {normalize(text) for text in golden})


def contains(text: str, golden: Sequence[str]) -> bool:
    """Return True if a text contains one of the golden answers as whole words."""
    words = f" {normalize(text)} "
    return any(f" {own} " in words for own in map(normalize, golden) if own)


def f1(answer: str, golden: Sequence[str]) -> float:
    """Return the best harmonic mean of precision and recall over words, 0 to 1."""
    return max((_f1(normalize(answer).split(), normalize(text).split()) for text in golden), default=0.0)


def _f1(answer: list[str], golden: list[str]) -> float:
    if not answer or not golden:
        return float(answer == golden)
    shared = (Counter(answer) & Counter(golden)).total()
    return 2 * shared / (len(answer) + len(golden))
