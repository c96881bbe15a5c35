"""Judges that decide whether an answer is right."""

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

MAX_FORMULA_CHARS = 400
"""Maximum characters of a formula that is evaluated."""
_HUGE = re.compile(r"(?:\^|\*\*)[\s{(+-]*(?:\d{5,}|[\d.]+[\s})]*(?:\^|\*\*|!))")
"""An exponent of five or more digits, or one that is itself a power or a factorial."""
_LIST = re.compile(r"\d\s*(?:[,;|/]\s|,(?!\d{3}(?!\d))|or\b|and\b|\s[-+]?\d)", re.IGNORECASE)
"""Several numbers, which are not an answer if a single number is right."""


class Judge(enum.StrEnum):
    """Method of comparing answers."""

    EXACT = "exact"
    """Compare as numbers and fractions, otherwise as texts."""
    MATH_VERIFY = "math_verify"
    """Compare with the package math-verify, which also supports formulas, sets and intervals, in its own process."""


def judge_named(name: str) -> Callable[[str, str], bool]:
    """Return a function of the given and the right answer, which raises `NoAnswer` unless a single answer was given.

    Raises:
        UsageError: the judge is unknown, or its package is not installed.
    """
    if name not in list(Judge):
        raise UsageError("unknown judge of answers", got=repr(name), expected=" or ".join(Judge))
    return _exact if name == Judge.EXACT else _math_verify()


def _require_answer(text: str) -> str:
    answer = stated_answer(text)
    if answer is None:
        raise NoAnswer("This does not state an answer.")
    return answer


def _exact(text: str, right: str) -> bool:
    answer, number = _require_answer(text), number_of(right)
    return same_answer(answer, right) if number is None else stated_number(answer) == number


@functools.cache
def _verifier() -> Verifier:
    """Return the verifier of this process; there is only one, because sympy takes 100 MB."""
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

    def compare(text: str, right: str) -> bool:
        answer = _require_answer(text)
        if number_of(right) is not None and _LIST.search(answer):
            return stated_number(answer) == number_of(right)
        return same_answer(answer, right) or (is_small(answer) and _verifier().is_same(right, answer))

    return compare


def is_small(formula: str) -> bool:
    r"""Return True if a formula can be evaluated cheaply: short, without towers of powers and exponents above 9,999.

    >>> is_small("x^{2} + 2^{10}"), is_small("9^{9^{9}}"), is_small("10^{100000}")
    (True, False, False)
    """
    return len(formula) <= MAX_FORMULA_CHARS and not _HUGE.search(formula)
