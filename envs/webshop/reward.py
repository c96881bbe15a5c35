"""Reward of a purchase, from 0 to 1.

``type x (attributes met + options met + [price within the limit]) / (attributes + options + 1)``

With WebShop's quirks (``compat``), as computed by its own engine:

- A goal's named option is compared as text with every chosen value, of any name, and each side is first reduced to a
  colour word that it contains ("tan" in "titanium"). The text of a named option is not reduced unless it is a colour
  word itself. It is enough if one set of words contains the other: "red" matches "red wine".
- Titles that share no noun give a reward of 0, and few shared nouns give 0.1, even within one query and category.

Without them, a named option is met only by the value chosen under its name, and an option without a name by any chosen
value; values must be the same (`is_same_value`); and titles matter only if neither query nor category agree.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from rapidfuzz import fuzz

from .colours import COLOURS, normalise_colour
from .nouns import Tagger
from .records import Goal, GoalOption, Product

ALIKE = 85
"""Minimum similarity of matching texts, in percent (exclusive)."""
_NO_WORD = re.compile(r"\W")
_LATIN_1 = dict.fromkeys(range(128, 256))
_NO_NOUNS_SCORE = 0.2
_PART = re.compile(r"""(?<![\w)-])-?\d+(?:,\d{3})*(?:\.\d+)?|\d+(?:\.\d+)?|[^\W\d_]+|['’′"”″%°+]""")


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeMatch:
    """Match between the kind of the purchase and the wanted kind."""

    reward: float
    """Factor of the reward: 0, 0.1, 0.5 or 1."""
    query_match: bool
    category_match: bool
    title_score: float
    """Share of the wanted title's nouns in the purchase's title."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A purchase's reward and its parts."""

    type_match: TypeMatch
    attributes_met: int
    attributes: int
    options_met: int
    options: int
    within_price: bool

    @property
    def reward(self) -> float:
        """Reward, from 0 to 1."""
        met = self.attributes_met + self.options_met + self.within_price
        return met / self._parts * self.type_match.reward

    @property
    def _parts(self) -> int:
        return self.attributes + self.options + 1

    def components(self) -> dict[str, float]:
        """Return the parts under WebShop's names: rewards ``r_…`` and their weights ``w_…``."""
        match = self.type_match
        named = {
            "r_type": match.reward,
            "r_att": self.attributes_met / self.attributes,
            "w_att": self.attributes / self._parts,
            "query_match": float(match.query_match),
            "category_match": float(match.category_match),
            "title_score": match.title_score,
            "r_price": float(self.within_price),
            "w_price": 1 / self._parts,
        }
        if self.options:
            named |= {"r_option": self.options_met / self.options, "w_option": self.options / self._parts}
        return named


def judge(
    product: Product, goal: Goal, *, price: float, chosen: Mapping[str, str], nouns: Tagger, compat: bool = True
) -> Verdict:
    """Compare a purchase with a goal.

    Args:
        product: The purchase.
        goal: The goal.
        price: Price of the purchase, in dollars.
        chosen: The chosen options: value by name.
        nouns: Function that finds the nouns of a title.
        compat: Use WebShop's quirks.
    """
    is_met = _is_option_met_by_any if compat else _is_option_met_by_name
    return Verdict(
        type_match=match_type(product, goal, nouns, compat=compat),
        attributes_met=sum(_has_attribute(product, attribute) for attribute in goal.attributes),
        attributes=len(goal.attributes),
        options_met=sum(is_met(option, chosen) for option in goal.options),
        options=len(goal.options),
        within_price=price <= goal.price_upper,
    )


def match_type(product: Product, goal: Goal, nouns: Tagger, *, compat: bool = True) -> TypeMatch:
    """Compare query, category path and title of a purchase with those of a goal."""
    query_match = product.query == goal.query
    category_match = len(_path(product.product_category) & _path(goal.product_category)) >= 2
    wanted = nouns(goal.title)
    common = len(set(nouns(product.title)) & set(wanted))
    score = common / len(wanted) if wanted else _NO_NOUNS_SCORE
    is_related = query_match or category_match
    reward = 1.0 if is_related or score > 0.2 else 0.5
    if compat or not is_related:
        reward = 0.0 if score == 0 else 0.1 if score < 0.1 else reward
    return TypeMatch(reward=reward, query_match=query_match, category_match=category_match, title_score=score)


def _path(product_category: str) -> set[str]:
    return {part.strip() for part in product_category.split("›")}


def _has_attribute(product: Product, wanted: str) -> bool:
    if any(token_set_ratio(attribute, wanted) > ALIKE for attribute in product.attributes):
        return True
    texts = (product.title, " ".join(product.bullets), product.description)
    return any(wanted in text.lower() for text in texts)


def token_set_ratio(one: str, other: str) -> int:
    """Return the similarity of two sets of words in percent: 100 if one set contains the other.

    Equals the ratio of the package thefuzz (0.19), which WebShop's reward uses.

    >>> token_set_ratio("6.76 fl oz", "('size', '6.76 fl oz')"), token_set_ratio("natural", "nature")
    (100, 77)
    """
    return round(fuzz.token_set_ratio(_clean(one), _clean(other)))


@functools.lru_cache(maxsize=16384)
def _clean(text: str) -> str:
    """Normalize a text as thefuzz does: lower case, spaces for punctuation, no characters 128 to 255.

    >>> _clean(" Café-Crème: 6.76 FL_OZ ")
    'caf crme  6 76 fl_oz'
    """
    return _NO_WORD.sub(" ", text.translate(_LATIN_1)).lower().strip()


def _is_option_met_by_any(option: GoalOption, chosen: Mapping[str, str]) -> bool:
    if option.name is None:
        wanted = normalise_colour(option.value)
    else:
        pair = (option.name, option.value)
        wanted = next((colour for colour in COLOURS if colour in pair), str(pair))
    return any(token_set_ratio(normalise_colour(value), wanted) > ALIKE for value in chosen.values())


def _is_option_met_by_name(option: GoalOption, chosen: Mapping[str, str]) -> bool:
    values = chosen.values() if option.name is None else filter(None, [chosen.get(option.name)])
    return any(is_same_value(value, option.value) for value in values)


def is_same_value(one: str, other: str) -> bool:
    """Return True if two texts name the same value of an option, regardless of punctuation.

    Words are compared without case and without a plural s; gray equals grey. Texts with numbers must have the same
    words, numbers, signs and unit marks in the same order; other texts the same words in any order.

    >>> is_same_value("12 fl oz", "1 fl oz"), is_same_value("xx-large", "x-large"), is_same_value("32GB", "32.0 gb")
    (False, False, True)
    """
    parts, others = _parts(one), _parts(other)
    if not any(map(_is_number, (*parts, *others))):
        parts, others = sorted(parts), sorted(others)
    return parts == others if parts or others else one.strip() == other.strip()


def _parts(text: str) -> list[str]:
    """Return the words and numbers of a text in the form that `is_same_value` compares."""
    return [_number(part) if _is_number(part) else _singular(part) for part in _PART.findall(text.lower())]


def _is_number(part: str) -> bool:
    return part[-1].isdecimal()


def _number(text: str) -> str:
    return f"{float(text.replace(',', '')):.12g}"


def _singular(word: str) -> str:
    single = word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word
    return "gray" if single == "grey" else single
