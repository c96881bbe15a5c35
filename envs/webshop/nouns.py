"""The nouns in a product's title; the reward depends on the number of nouns that two titles share.

WebShop uses the words that spaCy's model ``en_core_web_sm`` tags as nouns or proper nouns. A rule replaces it for the
generated catalogue: nearly every word of a title is tagged as a noun, so every word counts except numbers and function
words. Adjectives and adverbs, recognized by a list and by their endings, count if they are capitalized, because spaCy
then takes them for parts of names.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import re
from collections.abc import Callable
from typing import TypeAlias

from agentrl.errors import UsageError

Tagger: TypeAlias = Callable[[str], tuple[str, ...]]
"""Function that returns the nouns of a title in lower case, in order, with repetition."""

SPACY_MODEL = "en_core_web_sm"
_WORD = re.compile(r"([^\W_]+(?:['’](?!s\b)[^\W_]+)?)(?:['’]s\b)?", re.IGNORECASE)
"""A word without a possessive ending, which is a separate word for spaCy."""
_ADJECTIVE_ENDINGS = ("able", "ible", "ful", "less", "ous", "ive", "ly", "proof", "ical", "ised", "ized")
_NEVER_NOUNS = """
    a about above after all also an and any are around as at be been before behind below best between both but by can
    compatible down each every extra for from has have her his i if in inside into is it its like make makes may more
    most my near new no non not of off on only or other our out outside over own per plus she so some such than that
    the their them these they this those through to too under until up us use used using very via was we were what when
    which while who will with within without would you your
    """
_ADJECTIVES = """
    anti big black blue bright brown casual cheap classic clean clear cold comfortable cool cute dark deep dry easy
    elegant fast fine firm flat flexible fresh full funny gentle genuine glossy good gray great green grey happy hard
    heavy high hot huge ideal large light long loose low mini modern multi natural nice old open organic perfect pink
    portable premium professional pure purple quick quiet raw red real rich rough round sharp shiny short simple slim
    small smart smooth soft solid special strong super sweet tall thick thin tight tiny traditional ultra universal warm
    wet white wide wild wireless yellow young
    """
_NEVER_NOUN_WORDS, _ADJECTIVE_WORDS = frozenset(_NEVER_NOUNS.split()), frozenset(_ADJECTIVES.split())


class NounTagger(enum.StrEnum):
    """Method to find nouns."""

    AUTO = "auto"
    """spaCy for official data, as in WebShop; the rule for the generated catalogue."""
    SPACY = "spacy"
    RULE = "rule"


@functools.lru_cache(maxsize=8192)
def nouns_by_rule(title: str) -> tuple[str, ...]:
    """Return the nouns of a title by the rule above.

    >>> nouns_by_rule("Kenzo Men's Waterproof Running Shoes, extra wide - 2 Pairs, Dark Blue")
    ('kenzo', 'men', 'waterproof', 'running', 'shoes', 'pairs', 'dark', 'blue')
    """
    return tuple(word.lower() for word in _WORD.findall(title) if _is_noun(word))


def _is_noun(word: str) -> bool:
    lower = word.lower()
    if word[0].isdigit() or lower in _NEVER_NOUN_WORDS:
        return False
    is_adjective = lower in _ADJECTIVE_WORDS or (len(word) > 4 and lower.endswith(_ADJECTIVE_ENDINGS))
    return word[0].isupper() or not is_adjective


def find_tagger(wanted: NounTagger) -> Tagger:
    """Return the tagger of a method, which must not be `NounTagger.AUTO`.

    Raises:
        UsageError: the method is spaCy, which is not installed.
    """
    if wanted is NounTagger.RULE:
        return nouns_by_rule
    if not is_spacy_installed():
        raise UsageError(
            "spaCy cannot find nouns",
            got="no package spacy, or no model",
            expected=f"spacy and its model {SPACY_MODEL}, both installed",
            hint=f"pip install 'agentrl[webshop]', then python -m spacy download {SPACY_MODEL}; or set the option nouns"
            " to rule: rewards then differ from WebShop's for some purchases whose titles decide",
        )
    return _spacy_tagger()


def is_spacy_installed() -> bool:
    """Return True if spaCy and the model that WebShop uses can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("spacy", SPACY_MODEL))


@functools.cache
def _spacy_tagger() -> Tagger:
    import spacy  # an optional package, and slow to import

    parse = spacy.load(SPACY_MODEL)

    @functools.lru_cache(maxsize=8192)
    def nouns(title: str) -> tuple[str, ...]:
        return tuple(token.text.lower() for token in parse(title) if token.pos_ in ("NOUN", "PROPN"))

    return nouns
