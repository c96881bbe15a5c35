"""Changes that make a generated house as unusual as the original's format allows, to compare the engines on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from ..facts import Facts
from ..goals import Condition
from ..state import House, vocabulary_facts
from ..vocabulary import Ability

_SHARED, _OPENED, _INSIDE, _TWICE, _ELSEWHERE, _TREATED, _AT_RECEPTACLE = 0.3, 0.2, 0.5, 0.1, 0.2, 0.1, 0.2
"""Probability of each oddity where it is possible."""
_TREATMENTS = (Condition.HOT.value, Condition.COOL.value, Condition.CLEAN.value, Condition.SLICED.value)


def make_odd(house: House, seed: int) -> House:
    """Return a house with unusual facts: shared poses, open doors, things in things, in two places, or at wrong spots.

    Its task may be solved from the start, or impossible.
    """
    random = Random(f"oddities {seed}")
    house = replace(house, poses=_share(house.poses, random))
    facts = vocabulary_facts(house)
    places = tuple(_odd_places(own, len(house.receptacles), random) for own in facts.places)
    spots = tuple(_odd_spots(own, house.poses, random) for own in facts.spots)
    return replace(
        house,
        places=(),
        stated=replace(
            facts,
            opened=tuple(openable and random.random() < _OPENED for openable in facts.openable),
            places=places,
            spots=spots,
            insides=_odd_insides(facts, random),
            conditions=tuple(_draw(_TREATMENTS, random) if random.random() < _TREATED else 0 for _ in places),
            start=_draw(house.poses, random) if random.random() < _AT_RECEPTACLE else facts.start,
        ),
    )


def _share(poses: Sequence[int], random: Random) -> tuple[int, ...]:
    shared = list(poses[:1])
    for pose in poses[1:]:
        shared.append(shared[-1] if random.random() < _SHARED else pose)
    return tuple(shared)


def _odd_places(places: tuple[int, ...], receptacles: int, random: Random) -> tuple[int, ...]:
    return tuple(sorted({*places, random.randrange(receptacles)})) if random.random() < _TWICE else places


def _odd_spots(spots: tuple[int, ...], poses: Sequence[int], random: Random) -> tuple[int, ...]:
    if random.random() >= _ELSEWHERE:
        return spots
    return (_draw(poses, random),) if random.random() < 0.5 else ()


def _odd_insides(facts: Facts, random: Random) -> tuple[tuple[int, ...], ...]:
    """Put some of the things that share a place with a container into it."""
    return tuple(
        tuple(
            other
            for other, places in enumerate(facts.places)
            if other != thing and places == facts.places[thing] and random.random() < _INSIDE
        )
        if abilities & Ability.CONTAINER.value
        else ()
        for thing, abilities in enumerate(facts.abilities)
    )


def _draw(items: Sequence[int], random: Random) -> int:
    return items[int(random.random() * len(items))]
