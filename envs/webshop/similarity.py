"""Similarity of two texts: the ratio of the package thefuzz (0.19), which WebShop's reward uses.

Texts are normalized first. The result is a whole percentage: twice the length of the longest common subsequence,
divided by the length of both texts. The tests compare it with values of thefuzz.
"""

from __future__ import annotations

import functools
import re

_NO_WORD = re.compile(r"\W")
_LATIN_1 = dict.fromkeys(range(128, 256))


def token_set_ratio(one: str, other: str) -> int:
    """Return the similarity of two sets of words in percent: 100 if one set contains the other.

    >>> token_set_ratio("6.76 fl oz", "('size', '6.76 fl oz')"), token_set_ratio("natural", "nature")
    (100, 77)
    """
    return _set_ratio(clean(one), clean(other))


@functools.lru_cache(maxsize=16384)
def clean(text: str) -> str:
    """Normalize a text: lower case, spaces for all but letters, digits and underscores, no characters 128 to 255.

    >>> clean(" Café-Crème: 6.76 FL_OZ ")
    'caf crme  6 76 fl_oz'
    """
    return _NO_WORD.sub(" ", text.translate(_LATIN_1)).lower().strip()


@functools.lru_cache(maxsize=65536)
def _set_ratio(one: str, other: str) -> int:
    words, others = set(one.split()), set(other.split())
    if not words or not others:
        return 0
    common = " ".join(sorted(words & others))
    first, second = (f"{common} {' '.join(sorted(rest))}".strip() for rest in (words - others, others - words))
    return max(ratio(common, first), ratio(common, second), ratio(first, second))


def ratio(one: str, other: str) -> int:
    """Return the similarity of two texts in percent; 0 if one is empty.

    >>> ratio("this is a test", "this is a test!")
    97
    """
    if not one or not other:
        return 0
    length = len(one) + len(other)
    return round(100 * (2 * _common_subsequence(one, other) / length))


def _common_subsequence(one: str, other: str) -> int:
    """Return the length of the longest common subsequence, with table rows as bits of a number (Hyyrö, 2004)."""
    places: dict[str, int] = {}
    for position, character in enumerate(one):
        places[character] = places.get(character, 0) | 1 << position
    full = (1 << len(one)) - 1
    row = full
    for character in other:
        matches = row & places.get(character, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(one) - row.bit_count()
