"""Expert of published tasks: it makes the published actions, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from agentrl.message import Content

from ...desks.calls import call_text
from .customer import PhoneCustomer
from .instructions import DONE, ENDS
from .reading import PublishedTask

ASK = "Please do this on your phone: {name}."
_HELLO, _OK, _DID, _BYE = "Hello, my phone does not work.", "I am working on it.", "I have done that.", "That was all."


class Playable(Protocol):
    """Part of the environment that the expert uses."""

    customer: PhoneCustomer | None

    @property
    def task(self) -> PublishedTask:
        """The current task."""


class PublishedExpert:
    """Expert for one episode; it plays the customer, too, if the runtime would.

    Args:
        desk: The environment.
    """

    def __init__(self, desk: Playable) -> None:
        self._desk = desk
        self._steps: Iterator[tuple[str, str]] | None = None
        self._next: tuple[str, str] | None = None

    def act(self, observation: Content) -> str:
        """Return the next action of the player whose turn it is."""
        del observation
        if self._steps is None:
            self._steps = self._solo() if self._desk.customer is None else self._both()
        if self._next is None:
            self._next = next(self._steps)
        player, action = self._next
        is_customer = self._desk.customer is not None and self._desk.customer.is_asked
        if (player == "user") != is_customer and self._desk.customer is not None:
            return _OK if player == "user" else _DID
        self._next = None
        return action

    def _solo(self) -> Iterator[tuple[str, str]]:
        for action in self._desk.task.gold:
            yield "assistant", call_text(action.name, action.arguments)
        yield "assistant", call_text(DONE, {})

    def _both(self) -> Iterator[tuple[str, str]]:
        """The customer speaks first; a player whose turn it is not hands over with a few words."""
        yield "user", _HELLO
        for action in self._desk.task.gold:
            if action.requestor == "user":
                yield "assistant", ASK.format(name=action.name)
            yield action.requestor, call_text(action.name, action.arguments)
            if action.requestor == "user":
                yield "user", _DID
        yield "assistant", _BYE
        yield "user", f"Thank you. {ENDS[0]}"
