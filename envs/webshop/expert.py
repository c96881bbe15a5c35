"""A scripted customer that reads text pages: it searches with the wishes of the instruction, looks at products whose
price is within the limit, and buys the first that has all options and attributes that were asked for.

It knows the vocabulary of the generated catalogue. For other catalogues it is a rule of thumb: it searches with the
instruction, and clicks the options whose values stand in it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentrl.errors import UsageError
from agentrl.message import Content, user

from .goals import NO_LIMIT
from .pages import BACK_TO_SEARCH, BUY_NOW, NEXT, PREVIOUS, SubPage
from .rendering import SEPARATOR
from .shop import BY_CHANCE
from .vocabulary import load_vocabulary

_Steps = Generator[str, str, None]
_LIMIT = re.compile(r",? and price lower than ([\d.]+) dollars")
_MARKS = re.compile(r"^\[(?:clicked )?button\] (.*) \[(?:clicked )?button_\]$")
_ASIN = re.compile(r"[0-9A-Z]{10}")
_DOLLARS = re.compile(r"\$([\d.]+)")
_LABELS = {label.lower() for label in (*SubPage, BACK_TO_SEARCH, NEXT, PREVIOUS, BUY_NOW)}
"""Options of these values cannot be chosen: a click on them is one on the button."""
_TO_GO_ON = 5
"""Steps that must be left to look closer, and go on to another product: features, back, back, there, buy."""


def goal_words(instruction: str) -> str:
    """An instruction without its price limit, in lower case.

    >>> goal_words("I need [big] socks, and price lower than 30.00 dollars")
    'i need (big) socks'
    """
    return _LIMIT.sub("", instruction).strip(" .").lower().translate(str.maketrans("[]", "()"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What an instruction asks for, as far as the vocabulary goes."""

    words: str
    """The whole instruction but the price."""
    kind: str
    """The product's type; empty when it is not a known one."""
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    """Values."""
    limit: float
    """In dollars."""

    @property
    def keywords(self) -> str:
        """What to search for."""
        return " ".join([*self.attributes, self.kind, *self.options]) if self.kind else self.words


def read_wishes(instruction: str) -> Wishes:
    """Take an instruction apart.

    >>> wishes = read_wishes("i need long lasting lip balm, pack pack of 2, and price lower than 20.00 dollars")
    >>> wishes.kind, wishes.attributes, wishes.options, wishes.limit
    ('lip balm', ('long lasting',), ('pack of 2',), 20.0)
    """
    limit, words = _LIMIT.search(instruction), goal_words(instruction)
    vocabulary = load_vocabulary()
    kinds, words_left = _take(words, (kind.name for kind in vocabulary.types))
    attributes, words_left = _take(words_left, (text for texts in vocabulary.attributes.values() for text in texts))
    options, _ = _take(words_left, (value for values in vocabulary.options.values() for value in values))
    return Wishes(
        words=words,
        kind=next(iter(kinds), ""),
        attributes=tuple(attributes),
        options=tuple(options),
        limit=float(limit[1]) if limit else NO_LIMIT,
    )


class _Taken(NamedTuple):
    phrases: list[str]
    rest: str


def _take(text: str, phrases: Iterable[str]) -> _Taken:
    """The phrases that stand in a text, longer ones first, and the text without them."""
    found = []
    for phrase in sorted(set(phrases), key=lambda phrase: (-len(phrase), phrase)):
        text, count = re.subn(rf"(?<![\w.-]){re.escape(phrase)}(?![\w-]|\.\d)", "|", text)
        found += [phrase] * bool(count)
    return _Taken(found, text)


class _Result(NamedTuple):
    asin: str
    title: str
    prices: tuple[float, ...]


class WebShopExpert:
    """Plays one episode. The first observation is the search page; each later one answers the last action.

    Args:
        max_steps: How many steps it has.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._steps: _Steps | None = None

    def act(self, observation: Content) -> str:
        """The next action.

        Raises:
            UsageError: the first observation states no wish, or nothing is left to do.
        """
        text = user(observation).text
        try:
            if self._steps is None:
                self._steps = _Plan(text, self._max_steps).steps()
                return next(self._steps)
            return self._steps.send(text)
        except StopIteration as stop:
            raise UsageError("the webshop expert has nothing left to do", got=repr(text[:80])) from stop


@dataclass(slots=True)
class _Plan:
    """What the expert knows, and its plan: a generator of actions that is sent what each of them led to."""

    first: str
    steps_left: int
    wishes: Wishes = field(init=False)

    def __post_init__(self) -> None:
        self.wishes = read_wishes(_instruction(self.first))

    def steps(self) -> _Steps:
        """Search, look at products, buy."""
        results: list[_Result] = []
        for keywords in (self.wishes.keywords, self.wishes.words, BY_CHANCE):
            results = _results((yield from self._do(f"search[{keywords}]")))
            if results:
                break
        ranked = sorted(results, key=self._order)
        for i, result in enumerate(ranked):
            page = yield from self._do(f"click[{result.asin.lower()}]")
            wanted = self._options_on(page, result)
            is_last = i == len(ranked) - 1 or self.steps_left < _TO_GO_ON + len(self.wishes.options)
            if is_last or (self._has_options(wanted) and (yield from self._has_attributes(result))):
                yield from self._buy(wanted)
                return
            yield from self._do(f"click[{PREVIOUS.lower()}]")

    def _do(self, action: str) -> Generator[str, str, list[str]]:
        self.steps_left -= 1
        return texts_of((yield action))

    def _order(self, result: _Result) -> tuple[bool, bool, bool]:
        """Surely affordable ones of the right type first; else as they were found."""
        limit = self.wishes.limit
        return self.wishes.kind not in result.title.lower(), max(result.prices) > limit, min(result.prices) > limit

    def _options_on(self, page: Sequence[str], result: _Result) -> list[str]:
        """Values on a product's page that the instruction asks for."""
        values = page[page.index(PREVIOUS) + 1 : page.index(result.title) if result.title in page else None]
        asked = _take(self.wishes.words, set(values) - _LABELS).phrases
        return [value for value in asked if not self.wishes.kind or value in self.wishes.options]

    def _has_options(self, wanted: Sequence[str]) -> bool:
        return set(self.wishes.options) <= set(wanted)

    def _has_attributes(self, result: _Result) -> Generator[str, str, bool]:
        """Whether title or features name all attributes; leads back to the product's page."""
        missing = [attribute for attribute in self.wishes.attributes if attribute not in result.title.lower()]
        if not missing:
            return True
        page = yield from self._do(f"click[{SubPage.FEATURES.lower()}]")
        yield from self._do(f"click[{PREVIOUS.lower()}]")
        told = "\n".join(page[page.index(PREVIOUS) :]).lower()
        return all(attribute in told for attribute in missing)

    def _buy(self, wanted: Sequence[str]) -> _Steps:
        for value in wanted[: self.steps_left - 1]:
            yield from self._do(f"click[{value}]")
        yield f"click[{BUY_NOW.lower()}]"


def texts_of(observation: str) -> list[str]:
    """The texts of a page in either text form, without marks."""
    if SEPARATOR in observation:
        return observation.split(SEPARATOR)
    lines = (line.strip() for line in observation.splitlines())
    return [_MARKS.sub(r"\1", line) for line in lines if line and not line.startswith("You have clicked ")]


def _instruction(observation: str) -> str:
    texts = texts_of(observation)
    if "Instruction:" not in texts[:-1]:
        raise UsageError("the observation states no webshop instruction", got=repr(observation[:80]))
    return texts[texts.index("Instruction:") + 1]


def _results(page: Sequence[str]) -> list[_Result]:
    """The products on a page of results."""
    shown = list(page[page.index(NEXT) + 1 :]) if NEXT in page else []
    starts = [i for i, text in enumerate(shown) if _ASIN.fullmatch(text)] + [len(shown)]
    rows = [shown[start:stop] for start, stop in itertools.pairwise(starts)]
    return [
        _Result(row[0], row[1], tuple(map(float, _DOLLARS.findall(row[-1]))) or (NO_LIMIT,)) for row in rows if row[1:]
    ]
