"""Interpretation of the agent's words: questions by topic, a request for confirmation, a refusal, figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from .requests import Topic

_TOPICS: dict[Topic, re.Pattern[str]] = {
    topic: re.compile(pattern, re.IGNORECASE)
    for topic, pattern in {
        Topic.ORDER: r"order (number|id)|which order|number of (the|your) order",
        Topic.REASON: r"\breason\b|\bwhy\b",
        Topic.ITEM: r"\b(which|what) (item|product|article)s?\b",
        Topic.WISH: r"\binstead\b|\b(which|what|new) (option|variant|version|color|size)s?\b|\bprefer\b",
        Topic.PAYMENT: r"\bpayment\b|\brefund|\bpaypal\b|\b(gift|credit) card\b",
        Topic.ADDRESS: r"\baddress\b",
    }.items()
}
_EMAIL = re.compile(r"\be-?mail\b", re.IGNORECASE)
_NAME = re.compile(r"\bname\b|\bzip\b|postal code", re.IGNORECASE)
_IDENTITY = re.compile(r"\bidentity\b|\bverify\b|authenticat|who you are", re.IGNORECASE)
_CONFIRM = re.compile(
    r"\bconfirm|\byes\b|\bgo ahead\b|\bproceed\b|\b(shall|should) I (do|cancel|change|return|exchange)\b"
    r"|\bis (this|that) (correct|right|ok)",
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"\bcannot\b|\bcan not\b|\bcan'?t\b|\bcan’t\b|\bunable\b|\bnot (possible|able|allowed|permitted|eligible)\b",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?P<sign>\$\s*)?(?<![\w#.-])(?P<number>\d+(?:\.\d+)?)(?![\w-])(?P<unit>\s*(?:dollars?\b|usd\b|\$))?",
    re.IGNORECASE,
)
_RECORD = re.compile(r"[\"']\w+[\"']\s*:")
"""A JSON key, which shows that a text quotes a tool's result."""
MAX_COUNT = 99
"""Largest whole number that is read as a count; larger ones are ids of items, cards and orders."""


class Utterance(NamedTuple):
    """An utterance of the agent as the customer understands it."""

    topics: frozenset[Topic]
    """Topics that are asked for or mentioned."""
    wants_email: bool
    wants_name: bool
    wants_confirmation: bool
    refuses: bool


def hear(text: str) -> Utterance:
    """Interpret an utterance.

    >>> sorted(hear("What is the order number, and the reason?").topics)
    [<Topic.ORDER: 'order'>, <Topic.REASON: 'reason'>]
    """
    wants_email, wants_name = bool(_EMAIL.search(text)), bool(_NAME.search(text))
    return Utterance(
        topics=frozenset(topic for topic, pattern in _TOPICS.items() if pattern.search(text)),
        wants_email=wants_email or bool(_IDENTITY.search(text)),
        wants_name=wants_name,
        wants_confirmation=bool(_CONFIRM.search(text)),
        refuses=bool(_REFUSAL.search(text)),
    )


class Figures(NamedTuple):
    """The different figures in an utterance."""

    amounts: tuple[str, ...]
    """Amounts of money, with cents: numbers with a decimal point, a dollar sign or the word "dollars"."""
    counts: tuple[str, ...]
    """Other whole numbers up to `MAX_COUNT`."""
    is_record: bool = False
    """True if the utterance quotes a record, which a customer does not read."""

    def answers(self, outputs: Sequence[str]) -> bool:
        """Return True if they are one answer, right or wrong, to a question: one amount, and one count if asked for.

        Several amounts are not an answer, because any of them might be right.
        """
        return not self.is_record and len(self.amounts) == 1 and (len(outputs) == 1 or len(self.counts) == 1)

    def answer(self, outputs: Sequence[str]) -> tuple[str, ...]:
        """Return the answer: the count if it was asked for, then the amount."""
        return (*self.counts, *self.amounts) if len(outputs) > 1 else self.amounts


def figures_in(text: str) -> Figures:
    """Return the figures in a text, in a normalized form.

    >>> figures_in("7 options, the cheapest for $1,240.5 (item 5123456789).")
    Figures(amounts=('1240.50',), counts=('7',), is_record=False)
    """
    amounts, counts = set[str](), set[str]()
    for found in _NUMBER.finditer(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)):
        number = found["number"]
        if found["sign"] or found["unit"] or "." in number:
            amounts.add(f"{float(number):.2f}")
        elif float(number) <= MAX_COUNT:
            counts.add(str(int(number)))
    return Figures(tuple(sorted(amounts)), tuple(sorted(counts)), bool(_RECORD.search(text)))
