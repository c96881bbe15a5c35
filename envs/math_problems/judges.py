"""Who decides whether an answer is right."""

from __future__ import annotations

import atexit
import enum
import functools
import importlib.util
import re
from collections.abc import Callable

from agentrl.errors import UsageError

from .answers import NoAnswer, number_of, same_answer, stated_answer, stated_number
from .verifier import Verifier

LONGEST = 400
"""Characters of a formula that is worked out."""
_HUGE = re.compile(r"(?:\^|\*\*)[\s{(+-]*(?:\d{5,}|[\d.]+[\s})]*(?:\^|\*\*|!))")
"""An exponent of five digits and more, or one that is a power or a factorial of a number itself."""
_LIST = re.compile(r"\d\s*(?:[,;|/]\s|,(?!\d{3}(?!\d))|or\b|and\b|\s[-+]?\d)", re.IGNORECASE)
"""Several numbers: where one number is right, they are no answer."""


class Judge(enum.StrEnum):
    """How answers are compared."""

    EXACT = "exact"
    """As numbers and fractions, else as texts."""
    MATH_VERIFY = "math_verify"
    """By the package math-verify, which also knows formulas, sets and intervals; in a process of its own."""


def judge_named(name: str) -> Callable[[str, str], bool]:
    """A function of what was said and what is right, which raises `NoAnswer` where no single answer was said.

    Raises:
        UsageError: there is no such judge, or its package is not installed.
    """
    if name not in list(Judge):
        raise UsageError("no such judge of answers", got=repr(name), expected=" or ".join(Judge))
    return _exact if name == Judge.EXACT else _math_verify()


def _stated(said: str) -> str:
    answer = stated_answer(said)
    if answer is None:
        raise NoAnswer("This does not state an answer.")
    return answer


def _exact(said: str, right: str) -> bool:
    answer, number = _stated(said), number_of(right)
    return same_answer(answer, right) if number is None else stated_number(answer) == number


@functools.cache
def _verifier() -> Verifier:
    """One for the whole process: sympy takes 100 MB."""
    verifier = Verifier()
    atexit.register(verifier.close)
    return verifier


def _math_verify() -> Callable[[str, str], bool]:
    if importlib.util.find_spec("math_verify") is None:
        raise UsageError(
            "the judge math_verify needs a package that is not installed",
            got="no module math_verify",
            hint="install it with: pip install 'agentrl[math]'",
        )

    def compare(said: str, right: str) -> bool:
        answer = _stated(said)
        if number_of(right) is not None and _LIST.search(answer):
            return stated_number(answer) == number_of(right)
        return same_answer(answer, right) or (is_small(answer) and _verifier().is_same(right, answer))

    return compare


def is_small(formula: str) -> bool:
    r"""Return True if a formula may be worked out: it is short, and has no tower of powers and no exponent above 9,999.

    >>> is_small("x^{2} + 2^{10}"), is_small("9^{9^{9}}"), is_small("10^{100000}")
    (True, False, False)
    """
    return len(formula) <= LONGEST and not _HUGE.search(formula)
