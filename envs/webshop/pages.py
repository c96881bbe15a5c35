"""The shop's pages: what stands on each, in order, whatever form it is shown in."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .records import Product

PRODUCTS_PER_PAGE = 10
SEARCH, BACK_TO_SEARCH, NEXT, PREVIOUS, BUY_NOW = "Search", "Back to Search", "Next >", "< Prev", "Buy Now"
RATING = "N.A."
"""WebShop's data has no ratings and no reviews."""


class SubPage(enum.StrEnum):
    """What a product's page leads to; the values are the buttons' labels."""

    DESCRIPTION = "Description"
    FEATURES = "Features"
    REVIEWS = "Reviews"
    ATTRIBUTES = "Attributes"
    """Only shown when asked for."""


class Part(enum.Enum):
    """Kinds of things on a page."""

    HEADING = enum.auto()
    INSTRUCTION = enum.auto()
    """What the customer wants."""
    TEXT = enum.auto()
    SEARCH_BAR = enum.auto()
    """Holds no text."""
    BUTTON = enum.auto()
    LINK = enum.auto()
    """To a product."""
    OPTION = enum.auto()
    """One value of an option."""
    PICTURE = enum.auto()
    """Its text is an address, and no visible text."""


CLICKABLE = (Part.BUTTON, Part.LINK, Part.OPTION)
"""In the order in which WebShop lists what can be clicked."""


class Element(NamedTuple):
    """One thing on a page."""

    part: Part
    text: str
    name: str = ""
    """Of an `Part.OPTION`: whose value it is."""


def search_page(instruction: str) -> list[Element]:
    """Return the first page."""
    return [
        Element(Part.HEADING, "WebShop"),
        Element(Part.TEXT, "Instruction: "),
        Element(Part.INSTRUCTION, instruction),
        Element(Part.SEARCH_BAR, ""),
        Element(Part.BUTTON, SEARCH),
    ]


def _top(instruction: str) -> list[Element]:
    """What stands on top of all pages between the first and the last."""
    return [
        Element(Part.TEXT, "Instruction:"),
        Element(Part.INSTRUCTION, instruction),
        Element(Part.BUTTON, BACK_TO_SEARCH),
    ]


def results_page(instruction: str, products: Sequence[Product], *, number: int, total: int) -> list[Element]:
    """Return a page of products found.

    Args:
        instruction: What the customer wants.
        products: Those on this page.
        number: Of this page, from 1.
        total: Products found in all.
    """
    page = [*_top(instruction), Element(Part.HEADING, f"Page {number} (Total results: {total})")]
    page += [Element(Part.BUTTON, label) for label in ((PREVIOUS, NEXT) if number > 1 else (NEXT,))]
    for product in products:
        page += [
            Element(Part.PICTURE, product.image),
            Element(Part.LINK, product.asin),
            Element(Part.TEXT, product.title),
            Element(Part.TEXT, product.price_tag),
        ]
    return page


def item_page(instruction: str, product: Product, *, show_attributes: bool) -> list[Element]:
    """Return a product's page."""
    page = [*_top(instruction), Element(Part.BUTTON, PREVIOUS), Element(Part.PICTURE, product.image)]
    for name, values in product.options.items():
        page.append(Element(Part.TEXT, name))
        page += [Element(Part.OPTION, value, name) for value in values]
    page += [
        Element(Part.HEADING, product.title),
        Element(Part.TEXT, f"Price: {product.price_tag}"),
        Element(Part.TEXT, f"Rating: {RATING}"),
    ]
    shown = [part for part in SubPage if show_attributes or part is not SubPage.ATTRIBUTES]
    return page + [Element(Part.BUTTON, label) for label in (*shown, BUY_NOW)]


def sub_page(instruction: str, product: Product, which: SubPage) -> list[Element]:
    """Return a page of details. Blanks before some texts are those of WebShop's pages."""
    match which:
        case SubPage.DESCRIPTION:
            texts = [product.description]
        case SubPage.FEATURES:
            texts = [f" {bullet}" for bullet in product.bullets]
        case SubPage.REVIEWS:
            texts = []
        case SubPage.ATTRIBUTES:
            texts = [f" {attribute}" for attribute in product.attributes]
            texts += [product.category, product.query, product.product_category]
    return [*_top(instruction), Element(Part.BUTTON, PREVIOUS), *(Element(Part.TEXT, text) for text in texts)]


def done_page(asin: str, options: Mapping[str, str], reward: float) -> list[Element]:
    """Return the last page. Most of what it would tell was never filled in; the reward is there."""
    bought = json.dumps(options, sort_keys=True).replace("&", r"\u0026").replace("'", r"\u0027")
    texts = [
        *("Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)"),
        *("Purchased", "asin", asin, "options", bought.replace("<", r"\u003c").replace(">", r"\u003e")),
        *("attrs", "None", "category", "None", "query", "None", "product category", "None"),
        *("Target", "asin", "options", "attrs", "price upper", "instuction text", "category", "product category"),
        *("query", "Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)", str(reward), "Reward Details ", "None"),
    ]
    return [Element(Part.TEXT, text) for text in texts]
