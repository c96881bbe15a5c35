"""The relations of the fact world, and their wordings in passages and questions.

Each relation is a function: a thing has exactly one value, so a chain of relations has exactly one answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from .vocabulary import Kind

_PATTERNS: dict[str, re.Pattern[str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """One relation. In templates ``{x}`` is the thing and ``{y}`` its value."""

    of: Kind
    to: Kind | None
    """Kind of the value; ``None`` is a year."""
    noun: str
    """Noun of the relation, as in "the NOUN of {x}"."""
    question: str
    sentences: tuple[str, ...]
    """Possible sentences in a passage about the thing; each is a complete sentence."""

    def read(self, text: str) -> str | None:
        """Return the value in a passage about a thing; ``None`` if it has none."""
        for sentence in split_sentences(text):
            for template in self.sentences:
                if found := _pattern(template).fullmatch(sentence):
                    return found["y"]
        return None


RELATIONS: tuple[Relation, ...] = (
    Relation(
        of=Kind.BOOK,
        to=Kind.PERSON,
        noun="author",
        question="Who wrote {x}?",
        sentences=("{x} was written by {y}.", "Its author is {y}.", "{y} wrote it over three winters."),
    ),
    Relation(
        of=Kind.BOOK,
        to=None,
        noun="year of publication",
        question="In which year was {x} published?",
        sentences=("It was published in {y}.", "{x} first appeared in {y}."),
    ),
    Relation(
        of=Kind.COMPANY,
        to=Kind.PERSON,
        noun="founder",
        question="Who founded {x}?",
        sentences=("{x} was founded by {y}.", "Its founder is {y}.", "{y} started the business in a shed."),
    ),
    Relation(
        of=Kind.COMPANY,
        to=Kind.CITY,
        noun="seat",
        question="In which city does {x} have its seat?",
        sentences=("{x} has its seat in {y}.", "The company is run from {y}.", "Its seat is in {y}."),
    ),
    Relation(
        of=Kind.COMPANY,
        to=None,
        noun="founding year",
        question="In which year did {x} open for business?",
        sentences=("It opened for business in {y}.", "{x} has traded since {y}."),
    ),
    Relation(
        of=Kind.PERSON,
        to=Kind.CITY,
        noun="birthplace",
        question="In which city was {x} born?",
        sentences=("{x} was born in {y}.", "{x} is a native of {y}.", "{y} is where {x} was born."),
    ),
    Relation(
        of=Kind.PERSON,
        to=Kind.COMPANY,
        noun="employer",
        question="Which company employs {x}?",
        sentences=("{x} works for {y}.", "{x} earns a living at {y}.", "The employer of {x} is {y}."),
    ),
    Relation(
        of=Kind.PERSON,
        to=Kind.PERSON,
        noun="teacher",
        question="Who taught {x}?",
        sentences=("{x} was taught by {y}.", "{x} was a pupil of {y}.", "The teacher of {x} was {y}."),
    ),
    Relation(
        of=Kind.PERSON,
        to=None,
        noun="year of birth",
        question="What is the year of birth of {x}?",
        sentences=("The year of birth is {y}.", "{x} came into the world in the year {y}."),
    ),
    Relation(
        of=Kind.CITY,
        to=Kind.COUNTRY,
        noun="country",
        question="In which country does {x} lie?",
        sentences=("{x} is a city in {y}.", "It belongs to {y}.", "The city is part of {y}."),
    ),
    Relation(
        of=Kind.CITY,
        to=Kind.PERSON,
        noun="mayor",
        question="Who is the mayor of {x}?",
        sentences=("Its mayor is {y}.", "{y} is the mayor of {x}.", "The mayor of {x} is {y}."),
    ),
    Relation(
        of=Kind.CITY,
        to=Kind.RIVER,
        noun="river",
        question="On which river does {x} lie?",
        sentences=("It lies on the river {y}.", "The river {y} flows through {x}."),
    ),
    Relation(
        of=Kind.COUNTRY,
        to=Kind.CITY,
        noun="capital",
        question="What is the capital of {x}?",
        sentences=("The capital of {x} is {y}.", "Its capital is {y}.", "{x} is governed from {y}."),
    ),
    Relation(
        of=Kind.COUNTRY,
        to=Kind.CURRENCY,
        noun="currency",
        question="What is the currency of {x}?",
        sentences=("Its currency is the {y}.", "In {x} people pay with the {y}."),
    ),
    Relation(
        of=Kind.COUNTRY,
        to=Kind.LANGUAGE,
        noun="language",
        question="Which language is spoken in {x}?",
        sentences=("The language of {x} is {y}.", "Its people speak {y}."),
    ),
)

BY_NOUN = {relation.noun: relation for relation in RELATIONS}
_OUTERMOST = re.compile(rf"the ({'|'.join(BY_NOUN)}) of (.+)")


class Chain(NamedTuple):
    """A question: its start, and the relations to follow from there, in order."""

    start: str
    relations: tuple[Relation, ...]

    def text(self) -> str:
        """Return the question in words."""
        described = self.start
        for relation in self.relations[:-1]:
            described = f"the {relation.noun} of {described}"
        return self.relations[-1].question.format(x=described)


def parse_chain(question: str) -> Chain | None:
    """Return the chain of a question; ``None`` if the question is not one of the fact world's.

    >>> parse_chain("In which city was the author of The Silent Tide born?").start
    'The Silent Tide'
    >>> parse_chain("How are you?") is None
    True
    """
    for last in RELATIONS:
        if found := _pattern(last.question).fullmatch(question):
            relations, described = [last], found["x"]
            while inner := _OUTERMOST.fullmatch(described):
                relations.append(BY_NOUN[inner[1]])
                described = inner[2]
            return Chain(described, tuple(reversed(relations)))
    return None


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a passage of the fact world, whose names contain no full stops."""
    return [f"{sentence}." for sentence in text.removesuffix(".").split(". ")]


def _pattern(template: str) -> re.Pattern[str]:
    if template not in _PATTERNS:
        escaped = re.escape(template).replace(r"\{x\}", "(?P<x>.+)", 1).replace(r"\{x\}", ".+")
        _PATTERNS[template] = re.compile(escaped.replace(r"\{y\}", "(?P<y>.+)"))
    return _PATTERNS[template]
