"""Records of the shop: products and goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple


class Annotation(NamedTuple):
    """An instruction for a product, with the attributes and options that it asks for."""

    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    """Only values, as people wrote them; empty in synthetic annotations, whose goals name every option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product. The documentation of a field gives WebShop's name if it differs."""

    asin: str
    title: str
    """``name``, ``Title``"""
    description: str
    """``full_description``, ``Description``"""
    bullets: tuple[str, ...]
    """``small_description``, ``BulletPoints``"""
    prices: tuple[float, ...]
    """``pricing``: one price, or the two ends of a range, in dollars."""
    options: Mapping[str, tuple[str, ...]]
    """Values by the option's name, both in lower case."""
    attributes: tuple[str, ...]
    category: str
    query: str
    product_category: str
    image: str
    """Address of the first picture; empty without a picture."""
    synthetic: Annotation | None
    """Annotation in ``items_ins_v2.json``."""
    human: tuple[Annotation, ...]
    """Annotations in ``items_human_ins.json``."""

    @property
    def price_tag(self) -> str:
        """Price as shown on pages.

        >>> price_tag((12.5,)), price_tag((3.0, 4.25))
        ('$12.5', '$3.0 to $4.25')
        """
        return price_tag(self.prices)

    def to_plain(self) -> dict[str, Any]:
        """Return this product as JSON types; `from_plain` restores it."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        synthetic = None if self.synthetic is None else list(self.synthetic)
        return {**plain, "synthetic": synthetic, "human": [list(annotation) for annotation in self.human]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Product:
        """Restore a product from `to_plain`."""
        synthetic = plain["synthetic"]
        return cls(
            **{
                **plain,
                "bullets": tuple(plain["bullets"]),
                "prices": tuple(plain["prices"]),
                "options": {name: tuple(values) for name, values in plain["options"].items()},
                "attributes": tuple(plain["attributes"]),
                "synthetic": None if synthetic is None else _annotation(synthetic),
                "human": tuple(map(_annotation, plain["human"])),
            }
        )


def _annotation(plain: tuple[str, list[str], list[str]]) -> Annotation:
    instruction, attributes, options = plain
    return Annotation(instruction, tuple(attributes), tuple(options))


def price_tag(prices: tuple[float, ...]) -> str:
    """Return one price or two as text."""
    return " to ".join(f"${price}" for price in prices)


class GoalOption(NamedTuple):
    """An option that a goal asks for."""

    name: str | None
    """Name of the option; ``None`` in human goals, which give only the value."""
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Goal of a customer."""

    asin: str
    """Product for which the goal was written; others may also meet it."""
    title: str
    category: str
    query: str
    product_category: str
    instruction: str
    """Instruction with the price limit, as shown on pages."""
    attributes: tuple[str, ...]
    options: tuple[GoalOption, ...]
    price_upper: float
    """Price limit in dollars; 1,000,000 means no limit."""
    weight: float
    """Sampling weight, not normalized."""
