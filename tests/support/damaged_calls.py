"""Outputs of models with damaged tool calls: one thing or two went wrong in them, as models get them wrong."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

from support.tool_notations import NOTATIONS, Call, Notation
from support.tool_outputs import Output

_MARK = re.compile(r"</?[^<>\s]+(?: [^<>]*)?>|\[/?[A-Z_]+\]|```\w*")
_BORROWED = sorted(NOTATIONS.keys() - {"apertus", "lfm2", "seed_oss"})
"""Notations in which answers of other families are written; fixed, so that a new notation does not change them."""
_WORDS = ("mug", "cup", "drawer", "lamp", "desk", "apple", "a } brace", "the ] bracket", "50% off", "it's", "Zürich")


class Damage:
    """Ways to damage an answer in one family's notation; each takes the whole answer."""

    def __init__(self, seed: int, notation: Notation) -> None:
        self._random = random.Random(seed)
        self._notation = notation

    def answer(self) -> str:
        """Return an answer with one call or two, undamaged."""
        return self._notation.write([self._call() for _ in range(self._random.choice((1, 1, 2)))])

    def _call(self) -> Call:
        if self._random.random() < 0.2:
            return Call("look", {})
        if self._random.random() < 0.3:
            return Call("say", {"text": self._words()})
        arguments = {
            "what": self._words(),
            "count": self._random.randint(-5, 500),
            "gently": self._random.random() < 0.5,
        }
        arguments |= {"places": [self._words()], "options": {"a": 1, "b": {"c": [2]}}}
        kept = self._random.sample(sorted(arguments), k=self._random.randint(1, len(arguments)))
        return Call("put", {key: arguments[key] for key in sorted(kept)})

    def _words(self) -> str:
        return " ".join(self._random.choices(_WORDS, k=self._random.randint(1, 3)))

    def ended_early(self, text: str) -> str:
        return text[: len(text) - self._random.randint(1, len(self._notation.closing) + 4)]

    def without_last_mark(self, text: str) -> str:
        marks = list(_MARK.finditer(text))
        return text[: marks[-1].start()] if marks else text[:-1]

    def without_a_mark(self, text: str) -> str:
        marks = list(_MARK.finditer(text))
        if not marks:
            return text
        lost = self._random.choice(marks)
        return text[: lost.start()] + text[lost.end() :]

    def with_a_mark_twice(self, text: str) -> str:
        marks = list(_MARK.finditer(text))
        if not marks:
            return text
        again = self._random.choice(marks)
        return text[: again.end()] + again[0] + text[again.end() :]

    def without_first_and_last_mark(self, text: str) -> str:
        marks = list(_MARK.finditer(text))
        return text[marks[0].end() : marks[-1].start()] if len(marks) > 1 else text

    def without_marks(self, text: str) -> str:
        return _MARK.sub("", text)

    def in_a_fence(self, text: str) -> str:
        return f"```{self._random.choice(('json', '', 'xml'))}\n{text}\n```"

    def bare_json(self, text: str) -> str:
        return NOTATIONS["hermes"].write([self._call()]).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")

    def fenced_json(self, text: str) -> str:
        before = self._random.choice(("", "I act.\n", "So:\n\n"))
        return f"{before}```json\n{self.bare_json(text)}\n```"

    def in_tools_tags(self, text: str) -> str:
        return f"<tools>\n{self.bare_json(text)}\n</tools>"

    def listed(self, text: str) -> str:
        return f"<tool_call>\n[{self.bare_json(text)}, {self.bare_json(text)}]\n</tool_call>"

    def with_a_trailing_comma(self, text: str) -> str:
        return re.sub(r"([}\]])(?=[^}\]]*$)", r",\1", text, count=1)

    def without_a_bracket(self, text: str) -> str:
        place = max(text.rfind("}"), text.rfind("]"))
        return text[:place] + text[place + 1 :] if place >= 0 else text

    def with_a_bracket_more(self, text: str) -> str:
        place = text.rfind("}")
        return text[: place + 1] + "}" + text[place + 1 :] if place >= 0 else text + "}"

    def with_renamed_keys(self, text: str) -> str:
        if '"arguments"' in text:
            return text.replace('"arguments"', '"parameters"')
        return text.replace('"parameters"', '"arguments"')

    def with_text_before(self, text: str) -> str:
        return self._random.choice(("I act.", "I act.\n", "So [now] I act: ", "\n\n")) + text

    def with_text_after(self, text: str) -> str:
        return text + self._random.choice((" Done.", "\nDone.", "\n\n", " ", "\n[done]"))

    def with_blanks(self, text: str) -> str:
        marks = list(_MARK.finditer(text)) or list(re.finditer(r".", text))
        near = self._random.choice(marks)
        place = self._random.choice((near.start(), near.end()))
        return text[:place] + self._random.choice((" ", "\n", "\n\n  ")) + text[place:]

    def without_blanks(self, text: str) -> str:
        return text.replace("\n", "")

    def with_a_letter_less(self, text: str) -> str:
        place = self._random.randrange(len(text))
        return text[:place] + text[place + 1 :]

    def with_a_letter_more(self, text: str) -> str:
        place = self._random.randrange(len(text))
        return text[:place] + self._random.choice("{}[]\",:<>/\\ \nx'") + text[place:]

    def with_a_line_break_in_text(self, text: str) -> str:
        return text.replace(" ", "\n", 3)

    def in_another_notation(self, text: str) -> str:
        other = NOTATIONS[self._random.choice(_BORROWED)]
        return other.write([self._call()])

    def two_at_once(self, text: str) -> str:
        first, second = self._random.sample([way for name, way in DAMAGES.items() if name != "two_at_once"], 2)
        return second(self, first(self, text) or text)


DAMAGES: Mapping[str, Callable[[Damage, str], str]] = {
    name: way for name, way in vars(Damage).items() if not name.startswith("_") and name != "answer"
}
"""The ways, by name."""


def damaged_calls(family: str, each: int) -> list[Output]:
    """Return `each` outputs of every kind of damage, in a family's notation."""
    outputs = []
    for place, (kind, way) in enumerate(DAMAGES.items()):
        for number in range(each):
            damage = Damage(100_000 + 1000 * place + number, NOTATIONS[family])
            text = way(damage, damage.answer())
            if text:
                outputs.append(Output(kind, text))
    return outputs
