"""Experts that see everything: they plan once and play their plan."""

from __future__ import annotations

from abc import ABC, abstractmethod

from agentrl.errors import UsageError
from agentrl.message import Content, text_of


def read(observation: Content) -> str:
    """The text of an observation; of a picture, its alternative text.

    Raises:
        UsageError: there is none.
    """
    text = text_of(observation)
    if not text:
        raise UsageError("the experts of puzzles read text only", got=type(observation).__name__)
    return text


class Planner(ABC):
    """Plans from the first observation that it is shown, and again whenever its plan is used up."""

    def __init__(self) -> None:
        self._left: list[str] = []

    @abstractmethod
    def plan(self, text: str) -> list[str]:
        """The actions that solve what the text shows."""

    def act(self, observation: Content) -> str:
        """The next action of the plan.

        Raises:
            UsageError: there is nothing to do.
        """
        if not self._left:
            self._left = self.plan(read(observation))[::-1]
        if not self._left:
            raise UsageError("the expert finds no way to solve this", got=repr(observation))
        return self._left.pop()
