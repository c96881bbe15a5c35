"""Finds the answer in a text, and compares answers: exactly as numbers, else as texts."""

from __future__ import annotations

import re
from fractions import Fraction

MOST_DIGITS = 60
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)", re.ASCII)
_FRACTION = re.compile(r"([-+]?)(?:\\[dt]?frac)?\{?([-+]?\d+)\}?(?:/|(?=\{))\{?([-+]?\d+)\}?", re.ASCII)
_MIXED = re.compile(r"([-+]?\d+)\s*\\[dt]?frac\{(\d+)\}\{(\d+)\}", re.ASCII)
_DECORATION = re.compile(r"\\(?:left|right|text|mathrm|!|,|;|\$|%)|[$%{}\s]")
_LABEL = re.compile(r"(?:####|\banswer(?: is)?\s*[:=]?)\s*(.+)$", re.IGNORECASE)


def stated_answer(text: str) -> str:
    r"""What a text says is the answer: in its last ``\boxed{}``, else after ``####`` or "answer", else all of it.

    >>> stated_answer(r"So it is \boxed{\frac{3}{4}}."), stated_answer("The answer is 42.")
    ('\\frac{3}{4}', '42.')
    """
    start = text.rfind("\\boxed{")
    if start >= 0:
        depth, begin = 1, start + len("\\boxed{")
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                return text[begin:end]
    labels = re.split(r"(?=####|\banswer)", text, flags=re.IGNORECASE)
    found = _LABEL.match(labels[-1].strip().replace("\n", " "))
    return found[1] if found else text.strip()


def number_of(text: str) -> Fraction | None:
    r"""The number that a text is, exactly; ``None`` when it is none.

    >>> number_of("$1,250.50"), number_of(r"-\frac{3}{4}"), number_of("2 apples")
    (Fraction(2501, 2), Fraction(-3, 4), None)
    """
    if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS:
        return Fraction(int(text))
    plain = re.sub(r"(?<=\d)(?:,|\{,\}|\\,)(?=\d{3}(?!\d))", "", text.strip().rstrip(".")).replace("−", "-")
    if len(plain) > MOST_DIGITS:
        return None
    if mixed := _MIXED.fullmatch(plain.strip("$ ")):
        whole, over, under = int(mixed[1]), int(mixed[2]), int(mixed[3])
        return whole + Fraction(over if whole >= 0 else -over, under) if under else None
    bare = re.sub(r"\\(?:left|right|!|,|;|\$|%)|[$%\s]", "", plain)
    if fraction := _FRACTION.fullmatch(bare):
        sign, over, under = fraction[1], int(fraction[2]), int(fraction[3])
        return Fraction(-over if sign == "-" else over, under) if under else None
    return Fraction(bare) if _NUMBER.fullmatch(bare) else None


def same_answer(said: str, right: str) -> bool:
    r"""Whether two answers are the same number, or the same text but for its typesetting.

    >>> same_answer("0.75", r"\frac{3}{4}"), same_answer("(1, 2)", r"\left(1,2\right)"), same_answer("3", "4")
    (True, True, False)
    """
    number = number_of(right)
    if number is not None:
        return number_of(said) == number
    return _plain(said) == _plain(right)


def _plain(text: str) -> str:
    return _DECORATION.sub("", text).rstrip(".").lower()
