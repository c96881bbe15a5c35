"""The words of the generated catalogue, read from ``data/vocabulary.json``."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import orjson

Sayings: TypeAlias = Mapping[str, tuple[str, ...]]
"""Words in products' texts, each with paraphrases, which do not occur in products' texts."""


class ProductType(NamedTuple):
    """A kind of product, such as a body lotion."""

    name: str
    also: tuple[str, ...]
    """Other names, which only instructions use."""
    category: str
    query: str
    path: str
    """Product category, from general to special."""
    price: tuple[float, float]
    """Minimum and maximum price, in dollars."""
    options: tuple[str, ...]
    """Names of the options of such products."""


class Vocabulary(NamedTuple):
    """All words."""

    brand_starts: tuple[str, ...]
    brand_ends: tuple[str, ...]
    lines: tuple[str, ...]
    types: tuple[ProductType, ...]
    """Types, of alternating categories."""
    attributes: Mapping[str, Sayings]
    """Attributes by category."""
    options: Mapping[str, Sayings]
    """Values by option."""


def vocabulary_file() -> bytes:
    """Return the content of the shipped file."""
    return importlib.resources.files(__package__).joinpath("data/vocabulary.json").read_bytes()


@functools.cache
def load_vocabulary() -> Vocabulary:
    """Load the vocabulary from the shipped file."""
    plain = orjson.loads(vocabulary_file())
    categories = plain["categories"]
    types = [
        [
            ProductType(
                name=row["name"],
                also=tuple(row["also"]),
                category=category,
                query=row["query"],
                path=f"{words['path']} › {row['path']} › {row['name'].title()}",
                price=tuple(row["price"]),
                options=tuple(row["options"]),
            )
            for row in words["types"]
        ]
        for category, words in categories.items()
    ]
    return Vocabulary(
        brand_starts=tuple(plain["brand_starts"]),
        brand_ends=tuple(plain["brand_ends"]),
        lines=tuple(plain["lines"]),
        types=tuple(kind for kinds in zip(*types, strict=True) for kind in kinds),
        attributes={category: _sayings(words["attributes"]) for category, words in categories.items()},
        options={name: _sayings(values) for name, values in plain["options"].items()},
    )


def _sayings(plain: Mapping[str, list[str]]) -> Sayings:
    return {text: tuple(others) for text, others in plain.items()}
