"""What the shop knows: products and the goals of its customers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple


class Annotation(NamedTuple):
    """What somebody asked for who had a product in mind."""

    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    """Values only, as people wrote them; empty in synthetic annotations, whose goals name every option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product. WebShop's name of a field stands behind it where it differs."""

    asin: str
    title: str
    """``name``, ``Title``"""
    description: str
    """``full_description``, ``Description``"""
    bullets: tuple[str, ...]
    """``small_description``, ``BulletPoints``"""
    prices: tuple[float, ...]
    """``pricing``: one price, or the ends of a range, in dollars."""
    options: Mapping[str, tuple[str, ...]]
    """Values by the option's name, both in lower case."""
    attributes: tuple[str, ...]
    category: str
    query: str
    product_category: str
    image: str
    """Address of the first picture; empty when there is none."""
    synthetic: Annotation | None
    """Of ``items_ins_v2.json``."""
    human: tuple[Annotation, ...]
    """Of ``items_human_ins.json``."""

    @property
    def price_tag(self) -> str:
        """The price as pages show it.

        >>> price_tag((12.5,)), price_tag((3.0, 4.25))
        ('$12.5', '$3.0 to $4.25')
        """
        return price_tag(self.prices)

    def to_plain(self) -> dict[str, Any]:
        """This product as JSON types; `from_plain` restores it."""
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
    """``None`` in human goals, which give the value only."""
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a customer wants."""

    asin: str
    """The product that the goal was made of. Others may do as well."""
    title: str
    category: str
    query: str
    product_category: str
    instruction: str
    """With the price limit, as pages show it."""
    attributes: tuple[str, ...]
    options: tuple[GoalOption, ...]
    price_upper: float
    """In dollars; 1,000,000 stands for no limit."""
    weight: float
    """Share in weighted sampling, not normalised."""
