"""The generated catalogue: products in WebShop's own format, each a function of its number alone.

Every product has a human-like instruction, which names its type, one to three of its attributes and up to all of its
options, and a synthetic one. Products with a price range get no instruction: their price is only known at the till.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .official import products_of
from .records import Product
from .vocabulary import ProductType, load_vocabulary, vocabulary_file

GENERATOR = Path(__file__).read_bytes() + vocabulary_file()
"""Whatever changes the catalogue changes this."""
_CHARACTERS = string.digits + string.ascii_uppercase
_INSTRUCTIONS = (
    "i am looking for {type} that is {attributes}{options}",
    "i need {attributes} {type}{options}",
    "please find me {attributes} {type}{options}",
    "show me some {type}, {attributes}{options}.",
)
_DESCRIPTIONS = (
    "Our {line} {type} is {attributes}. It was made for people who use it every day and want it to last.",
    "Meet the {type} of the {line} series by {brand}: {attributes}. Ask us if anything is unclear, we answer quickly.",
    "{brand} has made {type} for years. This one is {attributes}, and part of the {line} series.",
)
_BULLETS = (
    "{attribute}: one reason why customers come back to {brand}",
    "{attribute} - checked by hand before it leaves our house",
    "made to be {attribute}, at home or on the way",
)
_RANGED = 0.1
"""Share of products with a price range."""


class RawProduct(NamedTuple):
    """A product as it would stand in WebShop's files."""

    row: Mapping[str, Any]
    """Of ``items_shuffle.json``."""
    synthetic: Mapping[str, Any]
    """Of ``items_ins_v2.json``."""
    human: Sequence[Mapping[str, Any]]
    """Of ``items_human_ins.json``."""


def generate_products(count: int) -> Iterator[Product]:
    """The first products of the catalogue."""
    for number in range(count):
        raw = generate_product(number)
        asin = raw.row["asin"]
        yield from products_of([raw.row], {asin: raw.synthetic}, {asin: raw.human})


def generate_product(number: int) -> RawProduct:
    """One product."""
    words = load_vocabulary()
    rng = random.Random(f"webshop product {number}")
    kind = words.types[number % len(words.types)]
    attributes = rng.sample(words.attributes[kind.category], rng.randint(3, 6))
    options = {name: _values(name, rng) for name in kind.options}
    names = {
        "brand": rng.choice(words.brand_starts) + rng.choice(words.brand_ends),
        "line": rng.choice(words.lines),
        "type": kind.name,
    }
    pricing = _pricing(kind, rng)
    row = {
        "asin": _asin(number, rng),
        "name": _title(names, attributes),
        "full_description": rng.choice(_DESCRIPTIONS).format(**names, attributes=_listed(attributes)),
        "small_description": [_bullet(attribute, names["brand"], rng) for attribute in attributes],
        "pricing": pricing,
        "customization_options": {
            name: [{"value": value, "image": None} for value in options[name]] for name in options
        },
        "images": [],
        "category": kind.category,
        "query": kind.query,
        "product_category": kind.path,
    }
    asked = rng.randint(1, 3)
    wanted = rng.sample(attributes[:asked], asked)
    synthetic: dict[str, Any] = {"attributes": attributes, "instruction": None, "instruction_attributes": None}
    if " to " in pricing:
        return RawProduct(row, synthetic, ())
    synthetic |= {"instruction": f"find me {_listed(wanted)} {kind.name}", "instruction_attributes": wanted}
    return RawProduct(row, synthetic, [_instruction(kind, wanted, options, rng)])


def _instruction(
    kind: ProductType, wanted: list[str], options: Mapping[str, list[str]], rng: random.Random
) -> dict[str, Any]:
    named = rng.sample(sorted(options), rng.randint(0, len(options)))
    chosen = {name: rng.choice(options[name]) for name in named}
    text = rng.choice(_INSTRUCTIONS).format(
        type=kind.name,
        attributes=_listed(wanted),
        options="".join(f", {name} {value}" for name, value in chosen.items()),
    )
    return {"instruction": text, "instruction_attributes": wanted, "instruction_options": list(chosen.values())}


def _values(option: str, rng: random.Random) -> list[str]:
    """Some of an option's values, in the vocabulary's order."""
    values = load_vocabulary().options[option]
    chosen = set(rng.sample(values, rng.randint(2, min(len(values), 6))))
    return [value for value in values if value in chosen]


def _pricing(kind: ProductType, rng: random.Random) -> str:
    prices = [int(rng.uniform(*kind.price)) + rng.choice((0.0, 0.49, 0.95, 0.99)) for _ in range(2)]
    low, high = sorted(prices)
    return f"${low:.2f} to ${high:.2f}" if rng.random() < _RANGED and low < high else f"${prices[0]:.2f}"


def _asin(number: int, rng: random.Random) -> str:
    """An id: unique by its last four characters up to 1.6 million products, and in no order."""
    digits = ""
    for _ in range(4):
        number, digit = divmod(number, len(_CHARACTERS))
        digits += _CHARACTERS[digit]
    return f"B0{''.join(rng.choices(_CHARACTERS, k=4))}{digits}"


def _title(names: Mapping[str, str], attributes: Sequence[str]) -> str:
    told = ", ".join(attribute.title() for attribute in attributes[:2])
    return f"{names['brand']} {names['line']} {names['type'].title()}, {told}"


def _bullet(attribute: str, brand: str, rng: random.Random) -> str:
    return rng.choice(_BULLETS).format(attribute=attribute, brand=brand)


def _listed(texts: Sequence[str]) -> str:
    """Texts as a list in words.

    >>> _listed(["a"]), _listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
