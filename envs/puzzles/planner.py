"""Experts for fully visible puzzles: they plan once and play their plan."""

from __future__ import annotations

from abc import ABC, abstractmethod

from agentrl.errors import UsageError
from agentrl.message import Content, text_of


def read(observation: Content) -> str:
    """Return the text of an observation; of a picture, its alternative text.

    Raises:
        UsageError: it has no text.
    """
    text = text_of(observation)
    if not text:
        raise UsageError("the experts of puzzles read text only", got=type(observation).__name__)
    return text


class Planner(ABC):
    """Expert that plans from the first observation, and again whenever its plan is used up."""

    def __init__(self) -> None:
        self._left: list[str] = []

    @abstractmethod
    def plan(self, text: str) -> list[str]:
        """Return the actions that solve the puzzle in the text."""

    def act(self, observation: Content) -> str:
        """Return the next action of the plan.

        Raises:
            UsageError: the plan is empty.
        """
        if not self._left:
            self._left = self.plan(read(observation))[::-1]
        if not self._left:
            raise UsageError("the expert found no solution", got=repr(observation))
        return self._left.pop()
