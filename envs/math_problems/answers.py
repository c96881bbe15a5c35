"""Extraction and comparison of answers: exactly as numbers, otherwise as texts."""

from __future__ import annotations

import re
from fractions import Fraction

from agentrl.reward.answers import boxed_answer

MAX_DIGITS = 60
_WHOLE = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+(?!\d)|\d+)"
_PLAIN = rf"(?:{_WHOLE}(?:\.\d+)?|\.\d+)"
_FORMS = rf"""(?P<sign>[-+]?)(?:
    (?:(?P<mixed>\d+)\s*)?\\[dt]?frac\s*(?:\{{\s*(?P<over>[-+]?\d+)\s*\}}|(?P<over_digit>\d))
        \s*(?:\{{\s*(?P<under>[-+]?\d+)\s*\}}|(?P<under_digit>\d))
    |(?P<mixed_plain>\d+)\s+(?P<over_plain>\d+)/(?P<under_plain>\d+)
    |(?P<number>{_PLAIN})(?:\s*/\s*(?P<divisor>[-+]?{_PLAIN}))?
)"""
_NUMBER = re.compile(_FORMS, re.VERBOSE | re.ASCII)
_NUMBER_IN_TEXT = re.compile(rf"(?<![\w\\^.+-]){_FORMS}(?![\w^]|[.,]\d)", re.VERBOSE | re.ASCII)
_SEPARATOR_OF_THOUSANDS = re.compile(r"\{,\}|\\,|,")
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_TYPESETTING = re.compile(r"\\(?:left|right|!|;|quad|[()\[\]])|\*\*|__|`|\\(?=[$%])|\$|\\,(?!\d{3})")
_DECORATION = re.compile(r"\\(?:left|right|text|mathrm|!|,|;|\$|%)|[$%{}\s]")
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_LABEL = re.compile(r"(?:####|\banswer\b(?:\s+is\b)?)[\s\"'*_]*[:=]?", re.IGNORECASE)
_REASON = re.compile(
    r"(?<=[^\s,;:(-])[\s,;:(-]+(?:because|since|as|which|so|where|for|after|by)\b.*", re.IGNORECASE | re.DOTALL
)
_END_OF_SENTENCE = re.compile(r"[.!?](?=\s|$)|\n")
_LEAD = re.compile(
    r"(?:\b(?:so|thus|therefore|hence|it is|it's|that is|this is|i get|that makes)\b|[=:,\s])*", re.IGNORECASE
)
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_HARMLESS = re.compile(r"[\s.,:;!?\"'’%€£{}()\[\]*_~&]*")
_MAX_WORDS = 3
"""Maximum number of words after a number without a label, such as its unit."""


class NoAnswer(Exception):
    """The text states no answer or several; the message says which."""


def stated_answer(text: str) -> str | None:
    r"""Return the answer that a text states; ``None`` if it states none.

    The answer is in the last ``\boxed{}``, ``\fbox{}`` or ``<answer>`` tag, or else after the last ``####`` or
    "answer", without reasons and up to the end of the sentence. Without any of these marks, a text that is only a
    number is the answer.

    >>> stated_answer(r"So it is \boxed{\frac{3}{4}}."), stated_answer("The answer is 42, because 6 * 7 is.")
    ('\\frac{3}{4}', '42')
    >>> stated_answer("42 apples."), stated_answer("I do not know the answer."), stated_answer("Let me see: 42")
    ('42 apples', None, None)
    """
    marked = boxed_answer(text) or _find_tagged(text)
    if marked is not None:
        return marked.strip() or None
    plain = _without_typesetting(text)
    labels = list(_LABEL.finditer(plain))
    if not labels:
        return _standing_alone(plain)
    behind = plain[labels[-1].end() :].strip()
    return _END_OF_SENTENCE.split(_REASON.sub("", behind), maxsplit=1)[0].strip(" \t*_\"'") or None


def stated_number(stated: str) -> Fraction:
    """Return the number of a stated answer: the only one in it, or the one after the last equals sign.

    >>> stated_number("42 apples"), stated_number("6 * 7 = 42"), stated_number("-1 1/2")
    (Fraction(42, 1), Fraction(42, 1), Fraction(-3, 2))

    Raises:
        NoAnswer: it contains no number, or several different ones.
    """
    plain = _without_typesetting(stated).rpartition("=")[2]
    found = [_value(match) for match in _NUMBER_IN_TEXT.finditer(plain)]
    rest = _WORD.sub("", _NUMBER_IN_TEXT.sub("", plain))
    if len(set(found)) > 1:
        raise NoAnswer("You gave several answers.")
    if not found or found[0] is None or not _HARMLESS.fullmatch(rest):
        raise NoAnswer("This answer is not a number.")
    return found[0]


def number_of(text: str) -> Fraction | None:
    r"""Return the exact number of a text; ``None`` if the text is not a number.

    >>> number_of("$1,250.50"), number_of(r"-\frac{3}{4}"), number_of("2 apples")
    (Fraction(2501, 2), Fraction(-3, 4), None)
    """
    plain = _without_typesetting(text).strip().rstrip(".").removesuffix("%").strip()
    found = _NUMBER.fullmatch(plain)
    return _value(found) if found else None


def same_answer(answer: str, right: str) -> bool:
    r"""Return True if two answers are the same number, or the same text apart from its typesetting.

    >>> same_answer("0.75", r"\frac{3}{4}"), same_answer("(1, 2)", r"\left(1,2\right)"), same_answer("3", "4")
    (True, True, False)
    """
    number = number_of(right)
    if number is not None:
        return number_of(answer) == number
    return _plain(answer) == _plain(right)


def _find_tagged(text: str) -> str | None:
    start, last = None, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start is not None:
            start, last = None, text[start : tag.start()]
    return last


def _standing_alone(plain: str) -> str | None:
    """Return the text if it is a number with at most a few words after it."""
    answer = _REASON.sub("", plain).strip().rstrip(".!").strip(" *_")
    found = _NUMBER_IN_TEXT.search(answer)
    if found is None or not _LEAD.fullmatch(answer[: found.start()]):
        return None
    behind = answer[found.end() :]
    is_short = len(_WORD.findall(behind)) <= _MAX_WORDS and _HARMLESS.fullmatch(_WORD.sub("", behind))
    return answer[found.start() :] if is_short else None


def _without_typesetting(text: str) -> str:
    return _TYPESETTING.sub("", _WRAPPER.sub(r" \1 ", re.sub(r"[−–](?=[\d.\\])", "-", text)))


def _value(found: re.Match[str]) -> Fraction | None:
    """Return the value of a matched number; ``None`` if it divides by zero or is too long."""
    if len(found[0]) > MAX_DIGITS:
        return None
    sign = -1 if found["sign"] == "-" else 1
    if found["number"]:
        divisor = _decimal(found["divisor"] or "1")
        return sign * _decimal(found["number"]) / divisor if divisor else None
    over = int(found["over"] or found["over_digit"] or found["over_plain"])
    under = int(found["under"] or found["under_digit"] or found["under_plain"])
    whole = int(found["mixed"] or found["mixed_plain"] or 0)
    return sign * (whole + Fraction(over, under)) if under else None


def _decimal(text: str) -> Fraction:
    return Fraction(_SEPARATOR_OF_THOUSANDS.sub("", text))


def _plain(text: str) -> str:
    return _DECORATION.sub("", text).rstrip(".").lower()
