"""Form of actions and passages: Search-R1's tags, or ReAct's brackets."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentrl.remote.retrieval import Passage, list_passages

_LISTED = re.compile(r'^(?:<information>)?Doc \d+\(Title: "(.*?)"\) (.*?)(?:</information>)?$', re.MULTILINE)


class MoveKind(enum.Enum):
    """Kind of an action."""

    SEARCH = "search"
    ANSWER = "answer"
    NOTHING = "nothing"
    """The action contains no move, or one without text."""


class Move(NamedTuple):
    """A parsed action."""

    kind: MoveKind
    text: str = ""
    """The query or the answer."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """Form of a policy's moves and of the passages that it reads."""

    pattern: re.Pattern[str]
    """Pattern of a move, with groups for its opening word and its text."""
    answer_word: str
    """Opening word of an answer; ``search`` opens a search."""
    written: str
    passages: str
    action_hint: str = ""
    reminder: str = ""
    """Line that names the moves, at the end of each observation."""
    reminds: bool = False
    """True if observations end with this line."""

    def read(self, action: str) -> Move:
        """Return the first move of an action, because later text was written before the move's result was known.

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
        """Instruction after an action that is not a move."""
        return f"Search again, or give the final answer in this form:\n{self.answer('Oslo')}"

    def show(self, found: Sequence[Passage]) -> str:
        """Return the observation with the passages of a search."""
        return self.remind(self.passages.format(list_passages(found)))

    def remind(self, observation: str) -> str:
        """Return an observation, with the reminder if it is on."""
        return f"{observation}\n{self.reminder}" if self.reminds else observation

    def with_reminder(self, remind: bool | None) -> Protocol:
        """Return the protocol with or without the reminder; unchanged for ``None``."""
        return self if remind is None else replace(self, reminds=remind)


TAGS = Protocol(
    pattern=re.compile(r"<(search|answer)>((?:(?!<(?:search|answer)>).)*?)</\1>", re.DOTALL),
    answer_word="answer",
    written="<{word}>{text}</{word}>",
    passages="<information>{}</information>",
    reminder="Write <search>words</search> to look something up, or <answer>the answer</answer> to answer.",
)
"""Search-R1's protocol."""
BRACKETS = Protocol(
    pattern=re.compile(r"^[ \t]*(search|finish)\[(.*)\]", re.MULTILINE),
    answer_word="finish",
    written="{word}[{text}]",
    passages="{}",
    action_hint="search[words] or finish[the answer], for example: search[capital of Norway]",
    reminder="Actions: search[words], finish[answer]",
    reminds=True,
)
"""ReAct's protocol, which is easier for small models, in loops that mark the action."""


def read_passages(observation: str) -> list[Passage]:
    """Return the passages in an observation, with or without tags."""
    return [Passage(title, text) for title, text in _LISTED.findall(observation)]
