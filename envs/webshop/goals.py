"""The goals of a catalogue, and the prices of their products.

WebShop draws prices within a range, and price limits, from an unseeded generator, so instructions and rewards differ
between processes. Here each draw depends only on the product's id. The order of goals is WebShop's: shuffled by
Python's generator with the seed 233.
"""

from __future__ import annotations

import enum
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .records import Annotation, Goal, GoalOption, Product
from .tables import map_array, save_array

ORDER_SEED = 233
NO_LIMIT = 1_000_000.0
"""Price limit in dollars of goals without a limit."""
_LIMITS = tuple(10.0 * i for i in range(1, 100))


class GoalKind(enum.StrEnum):
    """Source of goals."""

    HUMAN = "human"
    """Instructions that people wrote for a product."""
    SYNTHETIC = "synthetic"
    """One instruction per product, with every combination of its options."""


class _Row(NamedTuple):
    product: int
    number: int
    """Number of the product's annotation, or of the combination of options."""
    price_upper: float
    attributes: tuple[str, ...]


def purchase_price(product: Product) -> float:
    """Return the price of a product in dollars: its price, or one drawn within its range."""
    if len(product.prices) == 1:
        return product.prices[0]
    return random.Random(f"price {product.asin}").uniform(*product.prices)


def price_limit(product: Product, number: int) -> float:
    """Return the larger of two of the next four tens above the price, in dollars; `NO_LIMIT` if there is only one."""
    price = purchase_price(product)
    above = list(itertools.islice((limit for limit in _LIMITS if limit > price), 4))
    return max(random.Random(f"limit {product.asin} {number}").sample(above, 2)) if len(above) >= 2 else NO_LIMIT


def price_text(limit: float) -> str:
    """Return the words of a price limit in an instruction.

    >>> price_text(40.0), price_text(NO_LIMIT)
    (', and price lower than 40.00 dollars', '')
    """
    return f", and price lower than {limit:.2f} dollars" if limit < NO_LIMIT else ""


def make_goals(products: Iterable[Product], kind: GoalKind, folder: Path) -> None:
    """Write the goals of products, in their final order; `Goals` reads them."""
    rows_of = _human_rows if kind is GoalKind.HUMAN else _synthetic_rows
    rows = [row for i, product in enumerate(products) for row in rows_of(i, product)]
    weights = [1.0] * len(rows) if kind is GoalKind.HUMAN else _weights(rows)
    order = list(range(len(rows)))
    random.Random(ORDER_SEED).shuffle(order)
    save_array(folder, "products", np.array([rows[i].product for i in order], np.int32))
    save_array(folder, "numbers", np.array([rows[i].number for i in order], np.int32))
    save_array(folder, "limits", np.array([rows[i].price_upper for i in order], np.float64))
    save_array(folder, "weights", np.array([weights[i] for i in order], np.float64))


def _human_rows(index: int, product: Product) -> Iterator[_Row]:
    for number, annotation in enumerate(product.human):
        if annotation.attributes:
            yield _Row(index, number, price_limit(product, number), annotation.attributes)


def _synthetic_rows(index: int, product: Product) -> Iterator[_Row]:
    if product.synthetic is not None and product.synthetic.attributes:
        limit = price_limit(product, 0)
        for number in range(math.prod(map(len, product.options.values()))):
            yield _Row(index, number, limit, product.synthetic.attributes)


def _weights(rows: Iterable[_Row]) -> list[float]:
    """Return the goals' weights: the mean of 1 / (number of goals with the attribute) over a goal's attributes."""
    rows = list(rows)
    counts = Counter(attribute for row in rows for attribute in row.attributes)
    return [sum(1.0 / counts[attribute] for attribute in row.attributes) / len(row.attributes) for row in rows]


class Goals:
    """The goals of a catalogue, in WebShop's order.

    Args:
        kind: Source of the goals.
        folder: Folder that `make_goals` wrote.
    """

    def __init__(self, kind: GoalKind, folder: Path) -> None:
        self.kind = kind
        self.products = map_array(folder, "products")
        """Product number of each goal."""
        self._numbers = map_array(folder, "numbers")
        self._limits = map_array(folder, "limits")
        self.weights = map_array(folder, "weights")

    def __len__(self) -> int:
        return len(self.products)

    def goal(self, index: int, product: Product) -> Goal:
        """Return a goal.

        Args:
            index: Number of the goal.
            product: Product of the goal.
        """
        number, limit = int(self._numbers[index]), float(self._limits[index])
        if self.kind is GoalKind.HUMAN:
            annotation = product.human[number]
            text = annotation.instruction.strip(".") + price_text(limit)
            options = tuple(GoalOption(None, value) for value in annotation.options)
        else:
            annotation = product.synthetic or Annotation("", (), ())
            options = option_choice(product, number)
            chosen = ", and ".join(f"{option.name}: {option.value}" for option in options)
            text = f"{annotation.instruction}{' with ' + chosen if chosen else ''}{price_text(limit)}"
        return Goal(
            asin=product.asin,
            title=product.title,
            category=product.category,
            query=product.query,
            product_category=product.product_category,
            instruction=text,
            attributes=annotation.attributes,
            options=options,
            price_upper=limit,
            weight=float(self.weights[index]),
        )


def option_choice(product: Product, number: int) -> tuple[GoalOption, ...]:
    """Return a combination of options by number; options are sorted by name, and the last one varies fastest."""
    chosen = []
    for name in sorted(product.options, reverse=True):
        number, place = divmod(number, len(product.options[name]))
        chosen.append(GoalOption(name, product.options[name][place]))
    return tuple(reversed(chosen))
