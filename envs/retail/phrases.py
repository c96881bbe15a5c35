"""Phrases of customers, which the expert also parses."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..desks.records import Row
from .requests import RequestKind

STOP = "###STOP###"
"""Mark at the end of the customer's last words."""
SERVED = f"Thank you, that is all. {STOP}"
HANDED_OVER = f"All right, I will wait for your colleague. {STOP}"
OUT_OF_TIME = f"I do not have any more time for this. Goodbye. {STOP}"
TOO_MANY_FIGURES = "I do not know which of these amounts you mean. Please tell me only that one, for example: $12.50."
TOO_MANY_FIGURES_OF_TWO = (
    "I do not know which of these numbers you mean. Please tell me one number of options and one price only, for"
    " example: 3 options, $12.50."
)
NO_COUNT = "And how many are there? Please tell me both together, for example: 3 options, $12.50."

OPENINGS: Mapping[RequestKind, tuple[str, ...]] = {
    RequestKind.CANCEL: ("I want to cancel an order.", "Please cancel an order of mine."),
    RequestKind.ITEMS: (
        "I want to change an item of an order that was not sent yet.",
        "There is an item in a pending order that should be different.",
    ),
    RequestKind.ADDRESS: (
        "I want a pending order to go to another address.",
        "Can you send one of my pending orders somewhere else?",
    ),
    RequestKind.PAYMENT: (
        "I want to pay for a pending order in another way.",
        "Can you change the payment method of a pending order?",
    ),
    RequestKind.RETURN: ("I want to return something that I received.", "I have to send something back."),
    RequestKind.EXCHANGE: (
        "I want to exchange something that I received.",
        "Something that was delivered should have been different, and I want to swap it.",
    ),
    RequestKind.REFUSED: ("I want to cancel an order.", "Please cancel an order of mine."),
    RequestKind.TRANSFER: (
        "My last parcel was damaged by the courier, and I demand compensation for the carpet that it ruined.",
        "I want to change the email address of my account.",
        "I would like to order fifty items for my company, at a discount.",
    ),
}
IN_STOCK = "How many options of the {product} are available right now, and what does the cheapest one cost?"
HOW_MUCH = "How much did I pay for that order in total?"

ORDER = "The order number is {order_id}."
FORGOTTEN_ORDER = "I do not have the number, but it is the order with the {product}."
REASONS: Mapping[str, str] = {
    "no longer needed": "I no longer need it.",
    "ordered by mistake": "I ordered it by mistake.",
}
ITEM = "It is about the {items}."
WISH = "I would like the one with {options} instead."
PAYMENT = "Please use my {method}."
ADDRESS = "The new address is {line}."
INSTEAD_RETURN = "Then I want to return all of it, please."

ORDER_NUMBER = re.compile(r"#W\d{7}")
FORGOTTEN = re.compile(r"the order with the ([^.]+)\.")
DESCRIBED = re.compile(r"the ([A-Z][\w -]*) \(([^)]*)\)")
WISHED = re.compile(r"the one with ([^.]*) instead")
METHOD = re.compile(r"use my (PayPal account|credit card|gift card)")
ADDRESS_LINE = re.compile(r"The new address is ([^,]+), (?:(Apt \d+), )?([^,]+), ([A-Z]{2}) (\d{5})\.")
EMAIL = re.compile(r"[\w.]+@[\w.]+\w")
NAME_AND_ZIP = re.compile(r"My name is (\w+) (\w+), and my zip code is (\d{5})")
PRODUCT_ASKED = re.compile(r"options of the ([^?]+?) are")


def describe_options(options: Mapping[str, str]) -> str:
    """Return options in words.

    >>> describe_options({"color": "red", "size": "M"})
    'color: red, size: M'
    """
    return ", ".join(f"{name}: {value}" for name, value in options.items())


def read_options(text: str) -> dict[str, str]:
    """Parse the options in a text of `describe_options`."""
    return dict(part.split(": ", 1) for part in text.split(", "))


def describe_item(item: Row) -> str:
    """Return an item of an order in words."""
    return f"{item['name']} ({describe_options(item['options'])})"


def describe_method(method: Row) -> str:
    """Return a payment method in words."""
    if method["source"] == "credit_card":
        return f"credit card ending in {method['last_four']}"
    return "PayPal account" if method["source"] == "paypal" else "gift card"


def describe_address(address: Row) -> str:
    """Return an address in one line."""
    streets = [part for part in (address["address1"], address["address2"]) if part]
    return f"{', '.join(streets)}, {address['city']}, {address['state']} {address['zip']}"
