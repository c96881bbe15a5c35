"""Exact arithmetic of expressions with whole numbers, + - * / and brackets."""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

_TOKEN = re.compile(r"\d{1,9}|[-+*/()×÷−]", re.ASCII)
_KNOWN = re.compile(r"[-+*/()×÷−\s\d]*", re.ASCII)
_SPELLINGS = str.maketrans("×÷−", "*/-")
MAX_TOKENS = 64
_Pair: TypeAlias = tuple[int, int]


class Value(NamedTuple):
    """A fraction, not reduced."""

    over: int
    under: int = 1

    def equals(self, number: int) -> bool:
        """Return True if the fraction is this whole number."""
        return self.over == number * self.under

    def __str__(self) -> str:
        """Return a whole number if it is one, or else a reduced fraction.

        >>> str(Value(6, -4)), str(Value(6, 3))
        ('-3/2', '2')
        """
        large, small = self.over, self.under
        while small:
            large, small = small, large % small
        over, under = self.over // large, self.under // large
        over, under = (over, under) if under > 0 else (-over, -under)
        return str(over) if under == 1 else f"{over}/{under}"


class NotArithmetic(Exception):
    """The text cannot be read or computed; the message says why."""


class Expression(NamedTuple):
    """A parsed expression."""

    value: Value
    numbers: list[int]
    """Numbers in the expression, in the order of writing."""


def compute(text: str) -> Expression:
    """Read an expression and compute it.

    >>> compute("(1 + 2) / 4 * 4").value.equals(3)
    True

    Raises:
        NotArithmetic: the text is not an expression, is too long, or divides by zero.
    """
    return compute_tokens(tokenize(text))


def compute_tokens(tokens: list[str]) -> Expression:
    """Compute an expression from the tokens of `tokenize`.

    Raises:
        NotArithmetic: see `compute`.
    """
    if len(tokens) > MAX_TOKENS:
        raise NotArithmetic("The expression is too long.")
    left = ["", *reversed(tokens)]
    value = _sum(left)
    if len(left) > 1:
        raise NotArithmetic(f"The expression cannot be read from {left[-1]!r} on.")
    return Expression(Value(*value), [int(token) for token in tokens if token.isdigit()])


def tokenize(text: str) -> list[str]:
    """Split a text into numbers, operators and brackets.

    Raises:
        NotArithmetic: the text contains anything else.
    """
    if _KNOWN.fullmatch(text) is None:
        raise NotArithmetic("Write one expression of numbers, + - * / and brackets, and nothing else.")
    return _TOKEN.findall(text if text.isascii() else text.translate(_SPELLINGS))


def _sum(left: list[str]) -> _Pair:
    """Read a sum from the end of the reversed tokens that are left; the first token is empty and marks the end."""
    over, under = _product(left)
    while (operator := left[-1]) == "+" or operator == "-":
        left.pop()
        other, other_under = _product(left)
        added = other * under
        over = over * other_under + (added if operator == "+" else -added)
        under *= other_under
    return over, under


def _product(left: list[str]) -> _Pair:
    over, under = _factor(left)
    while (operator := left[-1]) == "*" or operator == "/":
        left.pop()
        other, other_under = _factor(left)
        if operator == "*":
            over, under = over * other, under * other_under
        elif other:
            over, under = over * other_under, under * other
        else:
            raise NotArithmetic("This divides by zero.")
    return over, under


def _factor(left: list[str]) -> _Pair:
    token = left[-1]
    if not token:
        raise NotArithmetic("A number is missing.")
    left.pop()
    if token.isdigit():
        return int(token), 1
    if token == "-":
        over, under = _factor(left)
        return -over, under
    if token != "(":
        raise NotArithmetic(f"{token!r} does not belong here.")
    value = _sum(left)
    if left[-1] != ")":
        raise NotArithmetic("A closing bracket is missing.")
    left.pop()
    return value


class Term(NamedTuple):
    """A number of a search: its value and its text."""

    value: Value
    text: str


def reach(target: int, numbers: list[int]) -> str | None:
    """Return an expression that uses each number once and has the value `target`; ``None`` if there is none.

    >>> reach(24, [1, 5, 5, 5])
    '(5*(5-(1/5)))'
    """
    return _reach(target, [Term(Value(number), str(number)) for number in numbers], set())


def _reach(target: int, terms: list[Term], seen: set[tuple[str, ...]]) -> str | None:
    if len(terms) == 1:
        return terms[0].text if terms[0].value.equals(target) else None
    key = tuple(sorted(str(term.value) for term in terms))
    if key in seen:
        return None
    seen.add(key)
    for first, one in enumerate(terms):
        for second, other in enumerate(terms):
            if first == second:
                continue
            rest = [term for place, term in enumerate(terms) if place not in (first, second)]
            for joined in _join(one, other, in_order=first < second):
                found = _reach(target, [*rest, joined], seen)
                if found:
                    return found
    return None


def _join(one: Term, other: Term, *, in_order: bool) -> list[Term]:
    (a, b), (c, d) = one.value, other.value
    terms = [Term(Value(a * d - c * b, b * d), f"({one.text}-{other.text})")]
    if c:
        terms.append(Term(Value(a * d, b * c), f"({one.text}/{other.text})"))
    if in_order:
        terms.append(Term(Value(a * d + c * b, b * d), f"({one.text}+{other.text})"))
        terms.append(Term(Value(a * c, b * d), f"({one.text}*{other.text})"))
    return terms
