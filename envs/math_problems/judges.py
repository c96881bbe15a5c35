"""Who decides whether an answer is right."""

from __future__ import annotations

import enum
from collections.abc import Callable

from agentrl.errors import UsageError

from .answers import same_answer, stated_answer


class Judge(enum.StrEnum):
    """How answers are compared."""

    EXACT = "exact"
    """As numbers and fractions, else as texts."""
    MATH_VERIFY = "math_verify"
    """By the package math-verify, which also knows formulas, sets and intervals."""


def judge_named(name: str) -> Callable[[str, str], bool]:
    """A function of what was said and what is right.

    Raises:
        UsageError: there is no such judge, or its package is not installed.
    """
    if name not in list(Judge):
        raise UsageError("no such judge of answers", got=repr(name), expected=" or ".join(Judge))
    return _exact if name == Judge.EXACT else _math_verify()


def _exact(said: str, right: str) -> bool:
    return same_answer(stated_answer(said), right)


def _math_verify() -> Callable[[str, str], bool]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise UsageError(
            "the judge math_verify needs a package that is not installed",
            got=error,
            hint="install it with: pip install 'agentrl[math]'",
        ) from error

    def compare(said: str, right: str) -> bool:
        if _exact(said, right):
            return True
        gold = parse(f"\\boxed{{{right}}}", parsing_timeout=None)
        answer = parse(f"\\boxed{{{stated_answer(said)}}}", parsing_timeout=None)
        return bool(verify(gold, answer, timeout_seconds=None))

    return compare
