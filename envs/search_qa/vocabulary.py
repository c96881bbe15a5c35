"""The names of the fact world: made up, unique within their kind, and divided among the splits."""

from __future__ import annotations

import enum
import functools
import importlib.resources
import itertools
import json
from random import Random

from ..task_ids import SPLITS, check_split


class Kind(enum.StrEnum):
    """What a name stands for."""

    PERSON = "person"
    CITY = "city"
    COUNTRY = "country"
    COMPANY = "company"
    BOOK = "book"
    RIVER = "river"
    CURRENCY = "currency"
    LANGUAGE = "language"


COUNTS: dict[Kind, tuple[int, int, int]] = {
    Kind.PERSON: (1200, 300, 1200),
    Kind.CITY: (300, 80, 300),
    Kind.COUNTRY: (60, 20, 60),
    Kind.COMPANY: (400, 100, 400),
    Kind.BOOK: (600, 150, 600),
    Kind.RIVER: (120, 40, 120),
    Kind.CURRENCY: (60, 20, 60),
    Kind.LANGUAGE: (60, 20, 60),
}
"""How many names of a kind each split has, in the order of `SPLITS`."""


@functools.cache
def names(kind: Kind, split: str) -> tuple[str, ...]:
    """Return the names of a kind that belong to a split, and to no other.

    Raises:
        UsageError: no such split.
    """
    check_split(split, "search_qa")
    everything = ["".join(parts) for parts in itertools.product(*_parts()[kind.value])]
    Random(f"names of {kind}").shuffle(everything)
    number = SPLITS.index(split)
    start = sum(COUNTS[kind][:number])
    return tuple(everything[start : start + COUNTS[kind][number]])


@functools.cache
def _parts() -> dict[str, list[list[str]]]:
    """What names are put together from, by kind: one choice from each list."""
    text = importlib.resources.files(__package__).joinpath("data/names.json").read_text(encoding="utf-8")
    parts: dict[str, list[list[str]]] = json.loads(text)
    return parts
