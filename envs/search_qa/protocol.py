"""The text protocol of Search-R1: what an action looks like, and how passages are shown."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import NamedTuple

from agentrl.remote.retrieval import Passage, list_passages

_TAGGED = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)

RULE = "Search again, or give the final answer in this form:\n<answer>Oslo</answer>"


class MoveKind(enum.Enum):
    """What an action does."""

    SEARCH = "search"
    ANSWER = "answer"
    NOTHING = "nothing"
    """The action holds neither tag, or nothing in it."""


class Move(NamedTuple):
    """An action as it was understood."""

    kind: MoveKind
    text: str = ""
    """The query or the answer."""


def read_action(action: str) -> Move:
    """The first tag of an action: whatever was written after it was written before its result was known.

    >>> read_action("<think>Hm.</think> <search> Marlport </search>")
    Move(kind=<MoveKind.SEARCH: 'search'>, text='Marlport')
    """
    found = _TAGGED.search(action)
    if found is None or not found[2].strip():
        return Move(MoveKind.NOTHING)
    return Move(MoveKind(found[1]), found[2].strip())


def search_action(query: str) -> str:
    """The action that looks for `query`."""
    return f"<search>{query}</search>"


def answer_action(answer: str) -> str:
    """The action that answers."""
    return f"<answer>{answer}</answer>"


def show_passages(passages: Sequence[Passage]) -> str:
    """What a search found, in the tags of the text protocol."""
    return f"<information>{list_passages(passages)}</information>"


_LISTED = re.compile(r'^(?:<information>)?Doc \d+\(Title: "(.*?)"\) (.*?)(?:</information>)?$', re.MULTILINE)


def read_passages(observation: str) -> list[Passage]:
    """The passages that an observation shows, with or without tags."""
    return [Passage(title, text) for title, text in _LISTED.findall(observation)]
