"""The elements of the shop's pages, in order, independent of their form."""

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
    """Pages below a product's page; the values are the labels of their buttons."""

    DESCRIPTION = "Description"
    FEATURES = "Features"
    REVIEWS = "Reviews"
    ATTRIBUTES = "Attributes"
    """Page that only an option adds."""


class Part(enum.Enum):
    """Kinds of elements on a page."""

    HEADING = enum.auto()
    INSTRUCTION = enum.auto()
    """Instruction of the customer."""
    TEXT = enum.auto()
    SEARCH_BAR = enum.auto()
    """Search bar, without text."""
    BUTTON = enum.auto()
    LINK = enum.auto()
    """Link to a product."""
    OPTION = enum.auto()
    """Value of an option."""
    PICTURE = enum.auto()
    """Picture, whose text is its address and not visible."""


CLICKABLE = (Part.BUTTON, Part.LINK, Part.OPTION)
"""Clickable kinds, in the order in which WebShop lists them."""


class Element(NamedTuple):
    """An element of a page."""

    part: Part
    text: str
    name: str = ""
    """Name of the option, for `Part.OPTION`."""


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
    """Return the top of all pages between the first and the last."""
    return [
        Element(Part.TEXT, "Instruction:"),
        Element(Part.INSTRUCTION, instruction),
        Element(Part.BUTTON, BACK_TO_SEARCH),
    ]


def results_page(instruction: str, products: Sequence[Product], *, number: int, total: int) -> list[Element]:
    """Return a page of search results.

    Args:
        instruction: Instruction of the customer.
        products: Products on this page.
        number: Number of this page, from 1.
        total: Total number of found products.
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
    """Return a page of details. Leading spaces of some texts are those of WebShop's pages."""
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
    """Return the last page. WebShop never fills in most of its fields, except the reward."""
    bought = json.dumps(options, sort_keys=True).replace("&", r"\u0026").replace("'", r"\u0027")
    texts = [
        *("Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)"),
        *("Purchased", "asin", asin, "options", bought.replace("<", r"\u003c").replace(">", r"\u003e")),
        *("attrs", "None", "category", "None", "query", "None", "product category", "None"),
        *("Target", "asin", "options", "attrs", "price upper", "instuction text", "category", "product category"),
        *("query", "Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)", str(reward), "Reward Details ", "None"),
    ]
    return [Element(Part.TEXT, text) for text in texts]
