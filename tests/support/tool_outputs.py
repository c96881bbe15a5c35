"""Outputs of models that call tools, by family and kind: valid ones and malformed ones, the same every time.

Parsers are compared on them (``tests/engines/test_tool_parsers.py``). What an output holds is drawn first and then
written in each family's notation, so that all families are tried with the same calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from support.tool_notations import NOTATIONS, Call, Notation


def _schema(name: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": parameters}}


TOOLS = (
    _schema("look"),
    _schema("say", text={"type": "string"}),
    _schema(
        "put",
        what={"type": "string"},
        count={"type": "integer"},
        size={"type": "number"},
        gently={"type": "boolean"},
        places={"type": "array", "items": {"type": "string"}},
        options={"type": "object"},
    ),
)
"""The offered tools."""
_WORDS = ["mug", "cup", "drawer", "cabinet", "lamp", "desk", "shelf", "apple", "knife", "window", "garden", "river"]
_FOREIGN = ("Тихо, пожалуйста", "杭州の天気", "Zürich – Ωμέγα", "🍎 and 🥐", "naïve café", "مرحبا", "한국어 문장")
_ODD = ('say "hi"', "it's", "a\nb", "C:\\temp\\x", "{braces} [brackets]", "a; b, c", "50% & <b>", "tab\there")
_LIKE_OTHER_TYPES = ("123", "4.5", "true", "[1, 2]", '{"a": 1}', "-7")


@dataclass(frozen=True, slots=True)
class Output:
    """One output of a model."""

    kind: str
    """What is special about it: one of `KINDS`."""
    text: str


class _Drawn:
    """What outputs hold, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def words(self, least: int = 1, most: int = 4) -> str:
        return " ".join(self._random.choices(_WORDS, k=self._random.randint(least, most)))

    def one_of(self, options: Sequence[str]) -> str:
        return self._random.choice(options)

    def arguments(self) -> dict[str, Any]:
        drawn = {
            "what": self.words(),
            "count": self._random.randint(-50, 5000),
            "size": self._random.randint(1, 80) / 8 + 0.0625,
            "gently": self._random.random() < 0.5,
            "places": [self.words(1, 2) for _ in range(self._random.randint(0, 3))],
            "options": {self.one_of(_WORDS): self._random.randint(0, 9) for _ in range(self._random.randint(1, 2))},
        }
        kept = self._random.sample(sorted(drawn), k=self._random.randint(1, len(drawn)))
        return {key: drawn[key] for key in drawn if key in kept}

    def call(self) -> Call:
        if self._random.random() < 0.3:
            return Call("say", {"text": self.words(1, 8)})
        return Call("put", self.arguments())

    def nested(self) -> Any:
        inner: Any = {"list": [1, [2.5, None], {"deep": self.words()}], "on": True, "nothing": None, "empty": {}}
        for _ in range(self._random.randint(1, 4)):
            inner = {self.one_of(_WORDS): inner, "and": [inner["on"], []]} if "on" in inner else {"again": inner}
        return inner

    def calls(self) -> list[Call]:
        return [self.call() for _ in range(self._random.randint(2, 4))]


Writer = Callable[[_Drawn, Notation], str]


def _say(text: str) -> list[Call]:
    return [Call("say", {"text": text})]


KINDS: Mapping[str, tuple[int, Writer]] = {
    "one call": (40, lambda d, n: n.write([d.call()])),
    "several calls": (40, lambda d, n: n.write(d.calls())),
    "nested arguments": (30, lambda d, n: n.write([Call("put", {"options": d.nested()})])),
    "unicode": (30, lambda d, n: n.write([Call("put", {"what": d.one_of(_FOREIGN), "places": [d.one_of(_FOREIGN)]})])),
    "odd strings": (25, lambda d, n: n.write(_say(f"{d.words()} {d.one_of(_ODD)} {d.words()}"))),
    "strings like other types": (15, lambda d, n: n.write(_say(d.one_of(_LIKE_OTHER_TYPES)))),
    "no arguments": (10, lambda d, n: n.write([Call("look", {})] * (1 + (d.words(1, 2).count(" "))))),
    "text before": (25, lambda d, n: n.write([d.call()], before=f"I see a {d.words()}.")),
    "no call": (15, lambda d, n: n.plain(f"Go to the {d.words()}, then to the {d.words()}.")),
    "text after": (10, lambda d, n: n.write([d.call()], after=f"That was the {d.words()}.")),
    "unknown tool": (10, lambda d, n: n.write([replace(d.call(), name=f"fly_{d.one_of(_WORDS)}")])),
    "unknown tool among others": (10, lambda d, n: n.write([d.call(), Call("fly", {}), d.call()])),
    "undeclared argument": (10, lambda d, n: n.write([Call("say", {"text": d.words(), "how": d.words()})])),
    "cut in the arguments": (10, lambda d, n: n.cut(d.call())),
    "broken arguments": (10, lambda d, n: n.broken(d.words())),
    "a broken call after a good one": (10, lambda d, n: n.write([d.call()]) + n.joint + n.broken(d.words())),
    "arguments of another type": (10, lambda d, n: n.mistyped(d.words())),
    "no name": (10, lambda d, n: n.write([replace(d.call(), name="")])),
    "no closing mark": (10, lambda d, n: n.write([d.call()]).removesuffix(n.closing)),
}
"""How many outputs of each kind there are, and how one is written."""


def tool_outputs(family: str) -> list[Output]:
    """The outputs of a family, more than 300, in the order of `KINDS`."""
    notation = NOTATIONS[family]
    return [
        Output(kind, write(_Drawn(1000 * place + number), notation))
        for place, (kind, (count, write)) in enumerate(KINDS.items())
        for number in range(count)
    ]
