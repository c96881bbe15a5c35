"""Invented names of the fact world: unique within their kind, and divided among the splits."""

from __future__ import annotations

import enum
import functools
import importlib.resources
import itertools
import json
from random import Random

from ..task_ids import SPLITS, check_split


class Kind(enum.StrEnum):
    """Kind of named thing."""

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
"""Number of names of each kind by split, in the order of `SPLITS`."""


@functools.cache
def names(kind: Kind, split: str) -> tuple[str, ...]:
    """Return the names of a kind that belong only to a split.

    Raises:
        UsageError: the split does not exist.
    """
    check_split(split, "search_qa")
    everything = ["".join(parts) for parts in itertools.product(*_parts()[kind.value])]
    Random(f"names of {kind}").shuffle(everything)
    number = SPLITS.index(split)
    start = sum(COUNTS[kind][:number])
    return tuple(everything[start : start + COUNTS[kind][number]])


@functools.cache
def _parts() -> dict[str, list[list[str]]]:
    """Return the parts of names by kind; a name has one part from each list."""
    text = importlib.resources.files(__package__).joinpath("data/names.json").read_text(encoding="utf-8")
    parts: dict[str, list[list[str]]] = json.loads(text)
    return parts
