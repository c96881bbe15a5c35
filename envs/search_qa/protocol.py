"""What an action looks like, and how passages are shown: in Search-R1's tags, or in ReAct's brackets."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentrl.remote.retrieval import Passage, list_passages


class MoveKind(enum.Enum):
    """What an action does."""

    SEARCH = "search"
    ANSWER = "answer"
    NOTHING = "nothing"
    """The action holds no move, or one without words."""


class Move(NamedTuple):
    """An action as it was understood."""

    kind: MoveKind
    text: str = ""
    """The query or the answer."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a policy writes its moves, and reads what a search found."""

    pattern: re.Pattern[str]
    """Finds a move: the word that opens it, and its text."""
    answer_word: str
    """What opens an answer; ``search`` opens a search."""
    written: str
    passages: str
    action_hint: str = ""
    reminder: str = ""
    """The moves, as the last line of each observation."""
    reminds: bool = False
    """Observations have this line."""

    def read(self, action: str) -> Move:
        """Return the first move of an action: whatever was written after it was written before its result was known.

        >>> TAGS.read("<think>Hm.</think> <search> Marlport </search>")
        Move(kind=<MoveKind.SEARCH: 'search'>, text='Marlport')
        >>> BRACKETS.read("finish[Oslo]")
        Move(kind=<MoveKind.ANSWER: 'answer'>, text='Oslo')
        """
        found = self.pattern.search(action)
        if found is None or not found[2].strip():
            return Move(MoveKind.NOTHING)
        return Move(MoveKind.ANSWER if found[1] == self.answer_word else MoveKind.SEARCH, found[2].strip())

    def search(self, query: str) -> str:
        """Return the action that looks for `query`."""
        return self.written.format(word="search", text=query)

    def answer(self, answer: str) -> str:
        """Return the action that answers."""
        return self.written.format(word=self.answer_word, text=answer)

    @property
    def rule(self) -> str:
        """What to do after an action that is no move."""
        return f"Search again, or give the final answer in this form:\n{self.answer('Oslo')}"

    def show(self, found: Sequence[Passage]) -> str:
        """Return what a search found, as the policy reads it."""
        return self.remind(self.passages.format(list_passages(found)))

    def remind(self, observation: str) -> str:
        """Return an observation, with the moves where it reminds of them."""
        return f"{observation}\n{self.reminder}" if self.reminds else observation

    def with_reminder(self, remind: bool | None) -> Protocol:
        """Return the protocol with or without the reminder; as it is where nobody chose."""
        return self if remind is None else replace(self, reminds=remind)


TAGS = Protocol(
    pattern=re.compile(r"<(search|answer)>((?:(?!<(?:search|answer)>).)*?)</\1>", re.DOTALL),
    answer_word="answer",
    written="<{word}>{text}</{word}>",
    passages="<information>{}</information>",
    reminder="Write <search>words</search> to look something up, or <answer>the answer</answer> to answer.",
)
"""Search-R1's."""
BRACKETS = Protocol(
    pattern=re.compile(r"^[ \t]*(search|finish)\[(.*)\]", re.MULTILINE),
    answer_word="finish",
    written="{word}[{text}]",
    passages="{}",
    action_hint="search[words] or finish[the answer], for example: search[capital of Norway]",
    reminder="Actions: search[words], finish[answer]",
    reminds=True,
)
"""ReAct's: easier for small models, in loops that mark the action."""


_LISTED = re.compile(r'^(?:<information>)?Doc \d+\(Title: "(.*?)"\) (.*?)(?:</information>)?$', re.MULTILINE)


def read_passages(observation: str) -> list[Passage]:
    """Return the passages that an observation shows, with or without tags."""
    return [Passage(title, text) for title, text in _LISTED.findall(observation)]
