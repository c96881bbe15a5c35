"""What a customer hears in what the agent says: questions by topic, a wish for confirmation, a refusal, amounts."""

from __future__ import annotations

import re
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
_NUMBER = re.compile(r"(?<![\w#.-])\d+(?:\.\d+)?(?![\w-])")


class Heard(NamedTuple):
    """An utterance of the agent as the customer takes it."""

    topics: frozenset[Topic]
    """What is asked for, or mentioned."""
    wants_email: bool
    wants_name: bool
    wants_confirmation: bool
    refuses: bool


def hear(text: str) -> Heard:
    """Take an utterance in.

    >>> sorted(hear("What is the order number, and the reason?").topics)
    [<Topic.ORDER: 'order'>, <Topic.REASON: 'reason'>]
    """
    wants_email, wants_name = bool(_EMAIL.search(text)), bool(_NAME.search(text))
    return Heard(
        topics=frozenset(topic for topic, pattern in _TOPICS.items() if pattern.search(text)),
        wants_email=wants_email or bool(_IDENTITY.search(text)),
        wants_name=wants_name,
        wants_confirmation=bool(_CONFIRM.search(text)),
        refuses=bool(_REFUSAL.search(text)),
    )


def says_amount(text: str, amount: str) -> bool:
    """Whether a number is said, however it is written.

    >>> says_amount("That is $1,240.5 in all.", "1240.50"), says_amount("12 or 13", "1")
    (True, False)
    """
    numbers = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", text))
    return any(abs(float(number) - float(amount)) < 0.005 for number in numbers)
