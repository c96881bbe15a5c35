"""Sentences of the scripted customer, and what its expert reads in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..desks.records import Row
from .records import BASIC, BUSINESS, CREDIT_CARD, ECONOMY

STOP = "###STOP###"
"""Mark at the end of the customer's last words."""
_CANCEL = ("I would like to cancel a trip.", "I need to call off one of my trips.")
_COMPENSATION = ("You cancelled my flight, and I would like to be compensated.",)
OPENINGS: Mapping[str, Sequence[str]] = {
    "cancel": _CANCEL,
    "refused_cancel": _CANCEL,
    "transfer": _CANCEL,
    "change_flight": ("I have to fly on another day.", "I would like to move a flight to another day."),
    "change_cabin": ("I would like to fly in another cabin.",),
    "add_bags": ("I will have more luggage.", "I need to add luggage to a trip."),
    "change_passenger": ("Someone else will fly in place of a passenger.",),
    "book": ("I would like to book a flight.", "I need a new flight."),
    "compensation": _COMPENSATION,
    "refused_compensation": _COMPENSATION,
    "upgrade_price": ("How much more would I have to pay to fly in business?",),
}
"""First sentences by the kind of request."""
USER = "My user id is {user_id}."
RESERVATION = "It is reservation {reservation_id}."
ROUTE = "I do not have the number, but it is the trip from {origin} to {destination}."
PLANS, ILL = "My plans have changed.", "I am ill, and my doctor tells me not to fly."
NEW_DATE = "I would like to fly on {date} instead, as cheaply as possible."
NEW_CABIN = "I would like to fly in business."
MORE_BAGS = "I would like to add {count} checked bags."
NEW_PASSENGER = "Instead of {old}, {new} will fly, born on {dob}."
NEW_TRIP = (
    "I would like to fly from {origin} to {destination} on {date}, one way, in {cabin}, on the cheapest direct flight."
)
ALONE, WITH = "I fly alone.", "I fly with {name}."
BAGS = "I have {count} checked bags."
INSURED, UNINSURED = "I want the insurance.", "I do not want insurance."
CABINS: Mapping[str, str] = {BASIC: "basic economy", ECONOMY: "economy", BUSINESS: "business"}
YES = "Yes, please."
WAVERS = "No, wait. {text}"
ALL_TOLD = "I have told you everything."
DONE = f"Thank you, that is all. {STOP}"
REFUSED = f"That is a pity. Goodbye. {STOP}"
HANDED_OVER = f"I will wait for your colleague. {STOP}"
OUT_OF_TIME = f"I have no more time for this. {STOP}"
WHICH_AMOUNT = 'Which of these is it? Please say one amount, such as "240.00 dollars".'

USER_ID = re.compile(r"user id is (\w+)")
NUMBER = re.compile(r"It is reservation ([0-9A-Z]{6})")
TRIP = re.compile(r"the trip from ([A-Z]{3}) to ([A-Z]{3})")
REASON = re.compile(f"{re.escape(PLANS)}|{re.escape(ILL)}")
DATE = re.compile(r"fly on (\d{4}-\d\d-\d\d) instead")
CABIN = re.compile(re.escape(NEW_CABIN))
ADDED = re.compile(r"add (\d+) checked bags")
REPLACED = re.compile(r"Instead of ([^,]+), (\w+) (\w+) will fly, born on (\d{4}-\d\d-\d\d)")
BOOKED = re.compile(r"fly from ([A-Z]{3}) to ([A-Z]{3}) on (\d{4}-\d\d-\d\d), one way, in ([a-z ]+), on")
COMPANION = re.compile(r"I fly (?:alone|with (\w+) (\w+))\.")
OWN_BAGS = re.compile(r"I have (\d+) checked bags")
INSURANCE = re.compile(f"{re.escape(INSURED)}|{re.escape(UNINSURED)}")
PAID_WITH = re.compile(r"use my (?:credit card ending in (\d{4})|(gift card))")


def full_name(person: Row) -> str:
    """Return a passenger's name."""
    return f"{person['first_name']} {person['last_name']}"


def describe_payment(method: Row) -> str:
    """Return the sentence that chooses a payment method."""
    named = f"credit card ending in {method['last_four']}" if method["source"] == CREDIT_CARD else "gift card"
    return f"Please use my {named}."
