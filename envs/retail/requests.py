"""What a customer may want: what is said about it, step by step, and what the desk has to do."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class RequestKind(enum.StrEnum):
    """A kind of request."""

    CANCEL = "cancel_order"
    ITEMS = "modify_items"
    ADDRESS = "modify_address"
    PAYMENT = "modify_payment"
    RETURN = "return_items"
    EXCHANGE = "exchange_items"
    QUESTION = "question"
    REFUSED = "refused_cancel"
    """Asks to cancel what was delivered, and must be told no."""
    TRANSFER = "transfer"


class TaskType(enum.StrEnum):
    """The type of a task: the kind of its only request, or that there are two."""

    CANCEL = RequestKind.CANCEL.value
    ITEMS = RequestKind.ITEMS.value
    ADDRESS = RequestKind.ADDRESS.value
    PAYMENT = RequestKind.PAYMENT.value
    RETURN = RequestKind.RETURN.value
    EXCHANGE = RequestKind.EXCHANGE.value
    QUESTION = RequestKind.QUESTION.value
    REFUSED = RequestKind.REFUSED.value
    TRANSFER = RequestKind.TRANSFER.value
    TWO_REQUESTS = "two_requests"


class Topic(enum.StrEnum):
    """What a fact is about, and an agent may ask for."""

    ORDER = "order"
    REASON = "reason"
    ITEM = "item"
    WISH = "wish"
    PAYMENT = "payment"
    ADDRESS = "address"


class Fact(NamedTuple):
    """Something that the customer tells."""

    topic: Topic
    text: str
    at_first: str | None = None
    """What a customer who changes their mind says at first."""


class Action(NamedTuple):
    """A call that the desk has to make."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing that a customer wants."""

    kind: RequestKind
    opening: str
    facts: tuple[Fact, ...] = ()
    """In the order in which they are told when nobody asks."""
    actions: tuple[Action, ...] = ()
    outputs: tuple[str, ...] = ()
    """What the agent has to say, such as an amount."""
    order_id: str | None = None


class Persona(enum.StrEnum):
    """How a customer talks."""

    DIRECT = "direct"
    """Tells everything at once."""
    TERSE = "terse"
    """Tells one thing at a time."""
    CHATTY = "chatty"
    """Tells two things at a time, between other words."""
    FORGETFUL = "forgetful"
    """Knows neither the email address nor order numbers."""
    WAVERING = "wavering"
    """Wants something else when asked to confirm."""

    @property
    def facts_at_once(self) -> int:
        """How many facts a reply holds at most."""
        return {Persona.TERSE: 1, Persona.CHATTY: 2}.get(self, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A customer with a list of requests."""

    user_id: str
    by_email: str
    """How the customer gives the email address."""
    by_name: str
    """How the customer gives name and zip code."""
    persona: Persona
    requests: tuple[Request, ...]

    @property
    def task_type(self) -> TaskType:
        """The kind of the only request; a refused one comes with another."""
        kinds = [request.kind for request in self.requests]
        single = len(kinds) == 1 or kinds[0] is RequestKind.REFUSED
        return TaskType(kinds[0].value) if single else TaskType.TWO_REQUESTS

    def wavers_about(self, request: Request) -> Fact | None:
        """What a wavering customer first wants otherwise; ``None`` for others, and where nothing is to be chosen."""
        if self.persona is not Persona.WAVERING:
            return None
        return next((fact for fact in request.facts if fact.at_first is not None), None)
