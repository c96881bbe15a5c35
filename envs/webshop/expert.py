"""A scripted customer that reads text pages: it searches for the instruction's wishes, looks at products within the
price limit, and buys the first one with all wanted options and attributes.

It uses the vocabulary of the generated catalogue to understand instructions. For other catalogues it is a heuristic: it
searches with the instruction and clicks the options whose values occur in it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentrl.errors import UsageError
from agentrl.message import Content, user

from .goals import NO_LIMIT
from .pages import BACK_TO_SEARCH, BUY_NOW, NEXT, PREVIOUS, SubPage
from .rendering import SEPARATOR
from .shop import BY_CHANCE
from .vocabulary import Sayings, load_vocabulary

_Steps = Generator[str, str, None]
_LIMIT = re.compile(r",? and price lower than ([\d.]+) dollars")
_MARKS = re.compile(r"^\[(?:clicked )?button\] (.*) \[(?:clicked )?button_\]$")
_ASIN = re.compile(r"[0-9A-Z]{10}")
_DOLLARS = re.compile(r"\$([\d.]+)")
_LABELS = {label.lower() for label in (*SubPage, BACK_TO_SEARCH, NEXT, PREVIOUS, BUY_NOW)}
"""Option values that cannot be chosen, because a click on them is a click on a button."""
_KINDS, _BRANDS = "types", "brands"
"""Names of the phrases that are neither attributes nor values."""
_BACK, _NEXT = f"click[{PREVIOUS.lower()}]", f"click[{NEXT.lower()}]"
_TO_GO_ON = 4
"""Steps needed to look at the features and then buy another product: features, search, product, buy."""


def goal_words(instruction: str) -> str:
    """Return an instruction without its price limit, in lower case.

    >>> goal_words("I need [big] socks, and price lower than 30.00 dollars")
    'i need (big) socks'
    """
    return _LIMIT.sub("", instruction).strip(" .").lower().translate(str.maketrans("[]", "()"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Wishes of an instruction, in the vocabulary of the products."""

    words: str
    """Whole instruction except the price."""
    kind: str
    """Type of the product; empty if it is unknown."""
    brand: str
    """Brand; empty if the instruction names none."""
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    """Values of options."""
    limit: float
    """Price limit in dollars."""

    @property
    def keywords(self) -> str:
        """Words to search for. The brand and the options, which distinguish products of a type, count twice."""
        if not self.kind:
            return self.words
        twice = (self.brand, *self.options)
        return " ".join(filter(None, (*twice, *self.attributes, self.kind, *twice)))


def read_wishes(instruction: str) -> Wishes:
    """Parse an instruction.

    >>> wishes = read_wishes("i need lip balm by alsen that will stay on all day, and price lower than 20.00 dollars")
    >>> wishes.kind, wishes.brand, wishes.attributes, wishes.limit
    ('lip balm', 'alsen', ('long lasting',), 20.0)
    """
    limit, words = _LIMIT.search(instruction), goal_words(instruction)
    vocabulary = load_vocabulary()
    found, rest = _phrases_of(_KINDS).find(words)
    kind = next((kind for kind in vocabulary.types if kind.name in found), None)
    brands, rest = _phrases_of(_BRANDS).find(rest)
    attributes, rest = _phrases_of(kind.category).find(rest) if kind else _Found((), rest)
    return Wishes(
        words=words,
        kind=kind.name if kind else "",
        brand=next(iter(brands), ""),
        attributes=attributes,
        options=tuple(value for name in (kind.options if kind else ()) for value in _phrases_of(name).find(rest).texts),
        limit=float(limit[1]) if limit else NO_LIMIT,
    )


class _Found(NamedTuple):
    texts: tuple[str, ...]
    """Meanings of the phrases, each once, in the order of the text."""
    rest: str
    """Text without the phrases."""


class _Phrases:
    """Phrases to find in texts, longest first, and their meanings."""

    def __init__(self, meanings: Mapping[str, str]) -> None:
        self._meanings = meanings
        longest_first = sorted(meanings, key=lambda phrase: (-len(phrase), phrase))
        choices = "|".join(map(re.escape, longest_first))
        self._pattern = re.compile(rf"(?<![\w.-])(?:{choices})(?![\w-]|\.\d)" if choices else r"(?!)")

    def find(self, text: str) -> _Found:
        """Find the phrases in a text.

        >>> _Phrases({"large": "large", "extra large": "x-large"}).find("an extra large one")
        _Found(texts=('x-large',), rest='an | one')
        """
        texts = dict.fromkeys(self._meanings[phrase] for phrase in self._pattern.findall(text))
        return _Found(tuple(texts), self._pattern.sub("|", text))


@functools.cache
def _phrases_of(name: str) -> _Phrases:
    """Return the vocabulary's phrases for types, brands, the attributes of a category or the values of an option."""
    words = load_vocabulary()
    sayings: Sayings
    if name == _KINDS:
        sayings = {kind.name: kind.also for kind in words.types}
    elif name == _BRANDS:
        sayings = {f"{start}{end}".lower(): () for start in words.brand_starts for end in words.brand_ends}
    else:
        sayings = words.attributes[name] if name in words.attributes else words.options[name]
    return _Phrases({phrase: text for text, others in sayings.items() for phrase in (text, *others)})


class Result(NamedTuple):
    """A product on a page of results."""

    asin: str
    title: str
    prices: tuple[float, ...]

    @property
    def click(self) -> str:
        """Action that opens the product's page."""
        return f"click[{self.asin.lower()}]"


class WebShopExpert:
    """Expert for one episode. The first observation is the search page; each later one answers the last action.

    Args:
        max_steps: Maximum number of steps.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._steps: _Steps | None = None

    def act(self, observation: Content) -> str:
        """Return the next action.

        Raises:
            UsageError: the first observation has no instruction, or nothing is left to do.
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
    """The expert's knowledge and its plan: a generator of actions that receives the page after each of them."""

    first: str
    steps_left: int
    wishes: Wishes = field(init=False)
    search: str = field(init=False)
    """The successful search."""
    is_first_page: bool = True
    """True on the first page of results, to which that search returns."""

    def __post_init__(self) -> None:
        self.wishes = read_wishes(_instruction(self.first))

    def steps(self) -> _Steps:
        """Yield the actions: search, look at the products of each page of results, buy."""
        results = yield from self._search()
        first = results[:1]
        while results and self.steps_left >= self._steps_to_go_on:
            for result in sorted(filter(self._is_affordable, results), key=self._is_other_kind):
                if (yield from self._look_at(result)):
                    return
            results = read_results((yield from self._do(_NEXT)))
            self.is_first_page = False
        yield from self._do(self.search)
        for result in first:
            yield from self._buy(self._options_on((yield from self._do(result.click)), result))

    def _search(self) -> Generator[str, str, list[Result]]:
        for keywords in (self.wishes.keywords, self.wishes.words, BY_CHANCE):
            self.search = f"search[{keywords}]"
            results = read_results((yield from self._do(self.search)))
            if results:
                break
        return results

    def _look_at(self, result: Result) -> Generator[str, str, bool]:
        """Buy a product if it fits, or if no steps are left to look at another one.

        Returns:
            True if it was bought; otherwise the page of results is shown again.
        """
        wanted = self._options_on((yield from self._do(result.click)), result)
        if self.steps_left >= self._steps_to_go_on:
            if set(self.wishes.options) - set(wanted):
                yield from self._do(_BACK)
                return False
            if self._missing_in(result.title):
                features = yield from self._do(f"click[{SubPage.FEATURES.lower()}]")
                if self._missing_in("\n".join([result.title, *features[features.index(PREVIOUS) :]])):
                    for action in [self.search] if self.is_first_page else [_BACK, _BACK]:
                        yield from self._do(action)
                    return False
                yield from self._do(_BACK)
        yield from self._buy(wanted)
        return True

    @property
    def _steps_to_go_on(self) -> int:
        """Number of steps needed to look at the features and then buy another product."""
        return _TO_GO_ON + len(self.wishes.options)

    def _do(self, action: str) -> Generator[str, str, list[str]]:
        self.steps_left -= 1
        return texts_of((yield action))

    def _is_affordable(self, result: Result) -> bool:
        return max(result.prices) <= self.wishes.limit

    def _is_other_kind(self, result: Result) -> bool:
        return self.wishes.kind not in result.title.lower()

    def _options_on(self, page: Sequence[str], result: Result) -> list[str]:
        """Return the values on a product's page that the instruction asks for."""
        shown = page[page.index(PREVIOUS) + 1 : page.index(result.title) if result.title in page else None]
        values = set(shown) - _LABELS
        if self.wishes.kind:
            return [value for value in self.wishes.options if value in values]
        return list(_Phrases({value: value for value in values}).find(self.wishes.words).texts)

    def _missing_in(self, text: str) -> list[str]:
        """Return the wanted attributes that a text does not contain."""
        return [attribute for attribute in self.wishes.attributes if attribute not in text.lower()]

    def _buy(self, wanted: Sequence[str]) -> _Steps:
        for value in wanted[: self.steps_left - 1]:
            yield from self._do(f"click[{value}]")
        yield f"click[{BUY_NOW.lower()}]"


def texts_of(observation: str) -> list[str]:
    """Return the texts of a page in either text form, without marks."""
    if SEPARATOR in observation:
        return observation.split(SEPARATOR)
    lines = (line.strip() for line in observation.splitlines())
    return [_MARKS.sub(r"\1", line) for line in lines if line and not line.startswith("You have clicked ")]


def _instruction(observation: str) -> str:
    texts = texts_of(observation)
    if "Instruction:" not in texts[:-1]:
        raise UsageError("the observation states no webshop instruction", got=repr(observation[:80]))
    return texts[texts.index("Instruction:") + 1]


def read_results(page: Sequence[str]) -> list[Result]:
    """Return the products on a page of results."""
    shown = list(page[page.index(NEXT) + 1 :]) if NEXT in page else []
    starts = [i for i, text in enumerate(shown) if _ASIN.fullmatch(text)] + [len(shown)]
    rows = [shown[start:stop] for start, stop in itertools.pairwise(starts)]
    return [
        Result(row[0], row[1], tuple(map(float, _DOLLARS.findall(row[-1]))) or (NO_LIMIT,)) for row in rows if row[1:]
    ]
