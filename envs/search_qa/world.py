"""The fact world of a split: facts about people, cities, books and others, and passages that state them."""

from __future__ import annotations

import functools
from random import Random

from agentrl.remote.retrieval import Passage

from .relations import RELATIONS, Chain, Relation
from .vocabulary import Kind, names

_THINGS = (Kind.PERSON, Kind.CITY, Kind.COUNTRY, Kind.COMPANY, Kind.BOOK)
"""Kinds of things that have passages."""
_YEARS = (1700, 1999)

_LEADS: dict[Kind, tuple[str, ...]] = {
    Kind.PERSON: ("{x} is a {trait} engineer.", "{x} is a {trait} painter.", "{x} is a {trait} botanist."),
    Kind.CITY: ("{x} is a {trait} town with a market.", "{x} is a {trait} harbour town.", "{x} is a {trait} city."),
    Kind.COUNTRY: ("{x} is a {trait} country.", "{x} is a {trait} kingdom.", "{x} is a {trait} republic."),
    Kind.COMPANY: ("{x} is a {trait} company.", "{x} is a {trait} family business.", "{x} is a {trait} firm."),
    Kind.BOOK: ("{x} is a {trait} novel.", "{x} is a {trait} collection of essays.", "{x} is a {trait} memoir."),
}
_TRAITS = ("celebrated", "modest", "busy", "quiet", "curious", "proud", "famous", "lively", "small", "remarkable")
_ASIDES: dict[Kind, tuple[tuple[str, Kind], ...]] = {
    Kind.PERSON: (
        ("{x} once turned down an offer from {other}.", Kind.COMPANY),
        ("{x} spent two summers in {other}.", Kind.CITY),
        ("{x} is often mistaken for {other}.", Kind.PERSON),
        ("{x} keeps a copy of {other} on the desk.", Kind.BOOK),
    ),
    Kind.CITY: (
        ("It is twinned with {other}.", Kind.CITY),
        ("{other} gave a lecture in {x} last year.", Kind.PERSON),
        ("Trains run from {x} to {other} every hour.", Kind.CITY),
    ),
    Kind.COUNTRY: (
        ("Many of its visitors come from {other}.", Kind.COUNTRY),
        ("{other} has a branch in {x}.", Kind.COMPANY),
        ("The largest airport of {x} is not far from {other}.", Kind.CITY),
    ),
    Kind.COMPANY: (
        ("It competes with {other}.", Kind.COMPANY),
        ("{x} also has a warehouse in {other}.", Kind.CITY),
        ("{other} sits on its board.", Kind.PERSON),
    ),
    Kind.BOOK: (
        ("{other} drew its cover.", Kind.PERSON),
        ("Readers of {x} also like {other}.", Kind.BOOK),
        ("Most of {x} takes place in {other}.", Kind.CITY),
    ),
}
"""Sentences that answer no question but mislead a careless reader, with the kind of the other name in them."""


class World:
    """The facts and passages of one split; names of different splits differ.

    Args:
        split: Name of the split, which is the seed.

    Raises:
        UsageError: the split does not exist.
    """

    def __init__(self, split: str) -> None:
        self.split = split
        self.names = {kind: names(kind, split) for kind in Kind}
        self.facts: dict[tuple[str, str], str] = {}
        """Value of a relation, by the thing's name and the relation's noun."""
        self._random = Random(f"fact world {split}")
        self._decide_facts()
        self.passages = self._write_passages()

    def follow(self, chain: Chain) -> tuple[str, ...]:
        """Return the start and the value of each relation; the last one is the answer."""
        found = [chain.start]
        for relation in chain.relations:
            found.append(self.facts[found[-1], relation.noun])
        return tuple(found)

    def draw_chain(self, random: Random, hops: int) -> Chain:
        """Draw a chain of `hops` relations from a random thing; it may return to an earlier thing."""
        kind = random.choices(_THINGS, weights=[len(self.names[kind]) for kind in _THINGS])[0]
        start = random.choice(self.names[kind])
        relations: list[Relation] = []
        for left in range(hops, 0, -1):
            fitting = [relation for relation in _from(kind) if left == 1 or relation.to in _THINGS]
            relations.append(random.choice(fitting))
            kind = relations[-1].to or kind
        return Chain(start, tuple(relations))

    def _decide_facts(self) -> None:
        for relation in RELATIONS:
            for number, thing in enumerate(self.names[relation.of]):
                self.facts[thing, relation.noun] = self._value(relation, number, thing)
        for country in self.names[Kind.COUNTRY]:
            self.facts[self.facts[country, "capital"], "country"] = country

    def _value(self, relation: Relation, number: int, thing: str) -> str:
        """Draw a value; each value of a country is unique, so that a capital belongs to one country."""
        if relation.to is None:
            return str(self._random.randint(*_YEARS))
        values = self.names[relation.to]
        if relation.of is Kind.COUNTRY:
            return values[number]
        value = self._random.choice(values)
        while value == thing:
            value = self._random.choice(values)
        return value

    def _write_passages(self) -> tuple[Passage, ...]:
        passages = [self._write(kind, thing) for kind in _THINGS for thing in self.names[kind]]
        self._random.shuffle(passages)
        return tuple(passages)

    def _write(self, kind: Kind, thing: str) -> Passage:
        """Write a passage: the lead, then facts and asides in random order."""
        random = self._random
        lead = random.choice(_LEADS[kind]).format(x=thing, trait=random.choice(_TRAITS))
        rest = [
            random.choice(relation.sentences).format(x=thing, y=self.facts[thing, relation.noun])
            for relation in _from(kind)
        ]
        for template, other_kind in random.sample(_ASIDES[kind], 2):
            rest.append(template.format(x=thing, other=random.choice(self.names[other_kind])))
        random.shuffle(rest)
        return Passage(thing, " ".join([lead, *rest]))


@functools.cache
def _from(kind: Kind) -> tuple[Relation, ...]:
    return tuple(relation for relation in RELATIONS if relation.of is kind)


@functools.cache
def world_of(split: str) -> World:
    """Return the world of a split; it is created once per process.

    Raises:
        UsageError: the split does not exist.
    """
    return World(split)
