"""Base of the scripted agents, which read only the customer's messages and the tools' results."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any, ClassVar, TypeAlias

import orjson

from agentrl.errors import UsageError
from agentrl.message import Content

from .calls import call_text

Steps: TypeAlias = Generator[str, str, None]
"""Actions; each `send` brings the result of the last one."""
Reading: TypeAlias = Generator[str, str, Any]
"""Actions that determine a value and return it."""
CONFIRM = "I will do as you said. Do you confirm it?"
DONE = "It is done. Is there anything else?"
COLLEAGUE = "A colleague of mine will take over."


class Conversation:
    """The expert's knowledge and its plan: a generator of actions that receives the result of each of them."""

    def __init__(self, opening: str) -> None:
        self.heard = opening
        """All words of the customer about the current request."""

    def steps(self) -> Steps:
        """Serve the customer."""
        raise NotImplementedError

    def look(self, tool: str, **arguments: Any) -> Reading:
        """Call a tool that shows a record."""
        text = yield call_text(tool, arguments)
        return orjson.loads(text)

    def ask(self, question: str) -> Steps:
        """Say something to the customer, and remember the reply."""
        reply = yield question
        self.heard += f" {reply}"

    def last(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Return the last match in the customer's words, because customers change their minds."""
        return list(pattern.finditer(self.heard))[-1]

    def confirm(self, plan: Callable[[], Reading]) -> Reading:
        """Return the action that the customer confirms: the first one that `plan` returns twice in a row."""
        action = yield from plan()
        while True:
            yield from self.ask(CONFIRM)
            again = yield from plan()
            if again == action:
                return action
            action = again


class DeskExpert:
    """Expert for one episode. The first observation is the customer's first message."""

    desk: ClassVar[str]
    """Name for errors."""
    conversation: ClassVar[type[Conversation]]

    def __init__(self) -> None:
        self._steps: Steps | None = None

    def act(self, observation: Content) -> str:
        """Return the next action.

        Raises:
            UsageError: the customer's request is unknown to the expert.
        """
        text = observation if isinstance(observation, str) else ""
        try:
            if self._steps is None:
                self._steps = self.conversation(text).steps()
                return next(self._steps)
            return self._steps.send(text)
        except StopIteration as stop:
            raise UsageError(f"the {self.desk} expert has nothing left to do", got=repr(text[-120:])) from stop
