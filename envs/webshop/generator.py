"""The generated catalogue: products in WebShop's own format, each a function of its number only.

Products form families of near-duplicates with the same type, brand, title and description but different attributes,
options and prices. Six members combine one of three attributes with one of two halves of an option's values. The
seventh is a copy of one of them that costs more than any limit for the original. An instruction asks for features that
its product has and its siblings lack, mostly in words that do not occur in the catalogue. In some families the deciding
attribute is only on the features page, which is not searched. Overpriced copies have no instruction.
"""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .official import products_of
from .records import Product
from .vocabulary import ProductType, Sayings, load_vocabulary, vocabulary_file

GENERATOR = Path(__file__).read_bytes() + vocabulary_file()
"""Source of the catalogue; any change of the catalogue changes it."""
FAMILY = 7
"""Number of products in a family."""
_CHARACTERS = string.digits + string.ascii_uppercase
_INSTRUCTIONS = (
    "i am looking for {before}{type}{brand}{after}{options}",
    "i need {before}{type}{brand}{after}{options}",
    "please find me {before}{type}{after}{brand}{options}",
    "show me some {before}{type}{brand}{options}{also}.",
    "i would like to buy {before}{type}{brand}{also}{options}",
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
_OTHER_WORDS = 0.75
"""Share of attributes and option values that an instruction paraphrases."""
_OTHER_TYPE = 0.25
"""Share of instructions that use another name of the type."""
_BRANDED = 0.25
"""Share of instructions that name the brand unnecessarily."""
_HIDDEN = 0.4
"""Share of families whose deciding attribute is only on the features page; their instructions name the brand."""
_STRIDE = 263
"""Step through all 575 brands in no obvious order; the two numbers have no common factor."""
_DEAREST_LIMIT = 40
"""Maximum difference in dollars between a limit and the price rounded down to tens (`goals.price_limit`)."""


class RawProduct(NamedTuple):
    """A product in the form of WebShop's files."""

    row: Mapping[str, Any]
    """Row of ``items_shuffle.json``."""
    synthetic: Mapping[str, Any]
    """Entry of ``items_ins_v2.json``."""
    human: Sequence[Mapping[str, Any]]
    """Entries of ``items_human_ins.json``."""


class _Family(NamedTuple):
    """Family of near-duplicates: their common and their distinguishing properties."""

    kind: ProductType
    names: Mapping[str, str]
    """Brand, line and type."""
    shared: Sequence[str]
    """Attributes of all members; the first is in the title."""
    deciding: Sequence[str]
    """Attributes, of which each product of a family has one."""
    is_hidden: bool
    """True if deciding attributes are only on the features page."""
    split_option: str
    """Option whose values are split into halves; each product of a family has one half."""
    halves: tuple[Sequence[str], Sequence[str]]
    options: Mapping[str, Sequence[str]]
    """All options, with the values of those that are not split."""
    description: str
    first_bullet: str
    price: float
    roles: Sequence[int]
    """Number of the combination of each member; the last number is the overpriced copy."""
    copied: int
    """Combination that the overpriced copy repeats."""


def generate_products(count: int) -> Iterator[Product]:
    """Yield the first products of the catalogue."""
    for number in range(count):
        raw = generate_product(number)
        asin = raw.row["asin"]
        yield from products_of([raw.row], {asin: raw.synthetic}, {asin: raw.human})


def generate_product(number: int) -> RawProduct:
    """Return a product by its number."""
    family = _family(number // FAMILY)
    role = family.roles[number % FAMILY]
    is_copy = role == FAMILY - 1
    combination = family.copied if is_copy else role
    rng = random.Random(f"webshop product {number}")
    deciding, half = family.deciding[combination // 2], family.halves[combination % 2]
    options = {**family.options, family.split_option: half}
    attributes = [*family.shared, deciding]
    price = _price(family, combination)
    row = {
        "asin": _asin(number, rng),
        "name": f"{family.names['brand']} {family.names['line']} {family.names['type'].title()},"
        f" {family.shared[0].title()}",
        "full_description": family.description.format(
            **family.names, attributes=_join_words(family.shared if family.is_hidden else attributes)
        ),
        "small_description": _bullets(family, deciding, rng),
        "pricing": _overprice(price, rng) if is_copy else f"${price:.2f}",
        "customization_options": {
            name: [{"value": value, "image": None} for value in options[name]] for name in family.kind.options
        },
        "images": [],
        "category": family.kind.category,
        "query": family.kind.query,
        "product_category": family.kind.path,
    }
    synthetic: dict[str, Any] = {"attributes": attributes, "instruction": None, "instruction_attributes": None}
    if is_copy:
        return RawProduct(row, synthetic, ())
    wanted = [*rng.sample(family.shared, rng.randint(0 if family.is_hidden else 1, 2)), deciding]
    chosen = _chosen(family, combination % 2, rng)
    brand = family.names["brand"].lower() if _is_branded(family, chosen, rng) else ""
    synthetic |= {"instruction": _instruction(family, wanted, {}, brand, rng), "instruction_attributes": wanted}
    human = {
        "instruction": _instruction(family, wanted, chosen, brand, rng),
        "instruction_attributes": wanted,
        "instruction_options": list(chosen.values()),
    }
    return RawProduct(row, synthetic, [human])


@functools.lru_cache(maxsize=4)
def _family(number: int) -> _Family:
    words = load_vocabulary()
    rng = random.Random(f"webshop family {number}")
    kind = words.types[number % len(words.types)]
    shared_count = rng.randint(2, 3)
    attributes = rng.sample(list(words.attributes[kind.category]), shared_count + 3)
    split_option = rng.choice(kind.options)
    values = list(words.options[split_option])
    drawn = sorted(rng.sample(values, min(len(values), rng.choice((4, 6)))), key=values.index)
    half = len(drawn) // 2
    return _Family(
        kind=kind,
        names={"brand": _brand(number), "line": rng.choice(words.lines), "type": kind.name},
        shared=attributes[:shared_count],
        deciding=attributes[shared_count:],
        is_hidden=rng.random() < _HIDDEN,
        split_option=split_option,
        halves=(drawn[:half], drawn[half:]),
        options={name: _some_values(words.options[name], rng) for name in kind.options},
        description=rng.choice(_DESCRIPTIONS),
        first_bullet=rng.choice(_BULLETS),
        price=rng.uniform(*kind.price),
        roles=rng.sample(range(FAMILY), FAMILY),
        copied=rng.randrange(FAMILY - 1),
    )


def _brand(family: int) -> str:
    """Return a brand that is unique among the first 575 families of the same type."""
    words = load_vocabulary()
    type_number, place = family % len(words.types), family // len(words.types)
    brands = len(words.brand_starts) * len(words.brand_ends)
    start, end = divmod((place * _STRIDE + type_number * _STRIDE**2) % brands, len(words.brand_ends))
    return words.brand_starts[start] + words.brand_ends[end]


def _some_values(values: Sayings, rng: random.Random) -> list[str]:
    """Draw some of an option's values, in the vocabulary's order."""
    chosen = set(rng.sample(list(values), rng.randint(2, min(len(values), 6))))
    return [value for value in values if value in chosen]


def _chosen(family: _Family, half: int, rng: random.Random) -> dict[str, str]:
    """Draw the options that an instruction names, nearly always including the distinguishing one."""
    chosen = {name: rng.choice(values) for name, values in family.options.items() if rng.random() < 0.5}
    chosen.pop(family.split_option, None)
    if family.is_hidden or rng.random() < 0.8:
        other_words = set(" ".join(family.halves[1 - half]).replace("-", " ").split())
        values = [v for v in family.halves[half] if not set(v.replace("-", " ").split()) <= other_words]
        chosen[family.split_option] = rng.choice(values or family.halves[half])
    return {name: chosen[name] for name in rng.sample(sorted(chosen), len(chosen))}


def _is_branded(family: _Family, chosen: Mapping[str, str], rng: random.Random) -> bool:
    """Return True if an instruction names the brand: if the search needs it to find the family, otherwise at random."""
    return family.is_hidden or family.split_option not in chosen or rng.random() < _BRANDED


def _instruction(
    family: _Family, wanted: Sequence[str], chosen: Mapping[str, str], brand: str, rng: random.Random
) -> str:
    kind, words = family.kind, load_vocabulary()
    before, after = [], []
    for attribute in rng.sample(wanted, len(wanted)):
        others = words.attributes[kind.category][attribute]
        if rng.random() < _OTHER_WORDS:
            after.append(rng.choice(others))
        else:
            before.append(attribute)
    return rng.choice(_INSTRUCTIONS).format(
        type=rng.choice(kind.also) if rng.random() < _OTHER_TYPE else kind.name,
        brand=f" by {brand}" if brand else "",
        before="".join(f"{attribute} " for attribute in before),
        after=f" {_join_words(after)}" if after else "",
        also=f", {_join_words(after)}" if after else "",
        options="".join(f", {_option_words(name, value, rng)}" for name, value in chosen.items()),
    )


def _option_words(name: str, value: str, rng: random.Random) -> str:
    others = load_vocabulary().options[name][value]
    words = rng.choice(others) if others and rng.random() < _OTHER_WORDS else value
    return f"{name} {words}" if name != "pack" else words


def _bullets(family: _Family, deciding: str, rng: random.Random) -> list[str]:
    """Return a line for each attribute. Only the first line is searched, so it must not contain a hidden attribute."""
    first = family.shared[0] if family.is_hidden else deciding
    rest = [attribute for attribute in (*family.shared, deciding) if attribute != first]
    forms = [family.first_bullet, *rng.choices(_BULLETS, k=len(rest))]
    attributes = [first, *rng.sample(rest, len(rest))]
    return [
        form.format(attribute=attribute, brand=family.names["brand"])
        for form, attribute in zip(forms, attributes, strict=True)
    ]


def _price(family: _Family, combination: int) -> float:
    """Return the price of a combination, in dollars."""
    rng = random.Random(f"{family.names} {family.price} {combination}")
    return int(family.price * rng.uniform(0.8, 1.3)) + rng.choice((0.0, 0.49, 0.95, 0.99))


def _overprice(price: float, rng: random.Random) -> str:
    """Return a price above all limits of a product with this price, or a range that ends above them."""
    high = price // 10 * 10 + _DEAREST_LIMIT + rng.randint(1, 20) + 0.95
    return f"${price:.2f} to ${high:.2f}" if rng.random() < 0.5 else f"${high:.2f}"


def _asin(number: int, rng: random.Random) -> str:
    """Return an id in no obvious order, unique by its last four characters up to 1.6 million products."""
    digits = ""
    for _ in range(4):
        number, digit = divmod(number, len(_CHARACTERS))
        digits += _CHARACTERS[digit]
    return f"B0{''.join(rng.choices(_CHARACTERS, k=4))}{digits}"


def _join_words(texts: Sequence[str]) -> str:
    """Join texts to a list in words.

    >>> _join_words(["a"]), _join_words(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
