"""Search terms of a text, as in Lucene's default English analysis.

Words by Unicode's rules, possessive, lower case, stop words, Porter's stems. Known difference: ideographs are not
split.
"""

from __future__ import annotations

import re

from .porter import stem

_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to
    was will with
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
_WORD = re.compile(r"\w+(?:(?:(?<=[^\W\d_])[.:·'’](?=[^\W\d_])|(?<=\d)[.,;'’](?=\d))\w+)*")
"""Letters, digits and underscores; a dot, colon or apostrophe between letters, a dot or comma between digits."""


def words_of(text: str) -> list[str]:
    """Return all words of a text in lower case.

    >>> words_of("1,000 Men's non-slip T-shirts: 6.76 fl.oz, color:red")
    ['1,000', "men's", 'non', 'slip', 't', 'shirts', '6.76', 'fl.oz', 'color:red']
    """
    found: list[str] = _WORD.findall(text.lower())
    return found


def term_of(word: str) -> str | None:
    """Return the term of a word in lower case; ``None`` for a stop word.

    >>> [term_of(word) for word in ("women's", "shoes", "the", "__")]
    ['women', 'shoe', None, None]
    """
    if word.endswith(("'s", "’s")):
        word = word[:-2]
    return None if word in STOP_WORDS or not word.strip("_") else stem(word)
