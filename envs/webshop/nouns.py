"""The nouns in a product's title, of which the reward compares how many two titles share.

WebShop asks spaCy's model ``en_core_web_sm`` for words tagged as nouns or proper nouns. Where that is not installed, a
rule stands in: in titles nearly every word is tagged as one of the two, so every word counts that is no number, no
function word, no common adjective or verb of titles, and has none of the endings of adjectives and adverbs.
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
"""The nouns of a title in lower case, in order, with repetition."""

SPACY_MODEL = "en_core_web_sm"
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")
_ADJECTIVE_ENDINGS = ("able", "ible", "ful", "less", "ous", "ive", "ly", "proof", "ical", "ised", "ized")
_EXCLUDED = """
    a about above after all also an and any are around as at be been before behind below best between both but by can
    compatible down each every extra for from has have her his i if in inside into is it its like make makes may more
    most my near new no non not of off on only or other our out outside over own per plus she so some such than that
    the their them these they this those through to too under until up us use used using very via was we were what when
    which while who will with within without would you your
    anti big black blue bright brown casual cheap classic clean clear cold comfortable cool cute dark deep dry easy
    elegant fast fine firm flat flexible fresh full funny gentle genuine glossy good gray great green grey happy hard
    heavy high hot huge ideal large light long loose low mini modern multi natural nice old open organic perfect pink
    portable premium professional pure purple quick quiet raw red real rich rough round sharp shiny short simple slim
    small smart smooth soft solid special strong super sweet tall thick thin tight tiny traditional ultra universal warm
    wet white wide wild wireless yellow young
"""
_NO_NOUNS = frozenset(_EXCLUDED.split())


class NounTagger(enum.StrEnum):
    """Who finds nouns."""

    AUTO = "auto"
    """spaCy for official data, as in WebShop; the rule for the generated catalogue."""
    SPACY = "spacy"
    RULE = "rule"


@functools.lru_cache(maxsize=8192)
def nouns_by_rule(title: str) -> tuple[str, ...]:
    """The nouns of a title by the rule above.

    >>> nouns_by_rule("Kenzo Men's Waterproof Running Shoes, Extra Wide - 2 Pairs, Dark Blue")
    ('kenzo', "men's", 'running', 'shoes', 'pairs')
    """
    words = (word.lower() for word in _WORD.findall(title))
    return tuple(word for word in words if _is_noun(word))


def _is_noun(word: str) -> bool:
    return not (word[0].isdigit() or word in _NO_NOUNS or (len(word) > 4 and word.endswith(_ADJECTIVE_ENDINGS)))


def find_tagger(wanted: NounTagger) -> Tagger:
    """The tagger of that kind; `NounTagger.AUTO` is settled before.

    Raises:
        UsageError: spaCy is asked for and not installed.
    """
    if wanted is NounTagger.RULE:
        return nouns_by_rule
    if not is_spacy_installed():
        raise UsageError(
            "spaCy cannot find nouns",
            got="no package spacy, or no model",
            expected=f"both installed: spacy, and its model {SPACY_MODEL}",
            hint="or set the option nouns to rule: rewards then differ from WebShop's where titles decide",
        )
    return _spacy_tagger()


def is_spacy_installed() -> bool:
    """Whether spaCy and the model that WebShop uses can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("spacy", SPACY_MODEL))


@functools.cache
def _spacy_tagger() -> Tagger:
    import spacy  # an optional package, and slow to import

    parse = spacy.load(SPACY_MODEL)

    @functools.lru_cache(maxsize=8192)
    def nouns(title: str) -> tuple[str, ...]:
        return tuple(token.text.lower() for token in parse(title) if token.pos_ in ("NOUN", "PROPN"))

    return nouns
