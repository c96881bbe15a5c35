"""Requests of customers: the customer's messages about them, and the required actions of the agent."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from ..desks.records import Action


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
    """Request to cancel a delivered order, which the agent must refuse."""
    TRANSFER = "transfer"


class TaskType(enum.StrEnum):
    """The type of a task: the kind of its only request, or two requests."""

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
    """Topic of a fact, which an agent may ask for."""

    ORDER = "order"
    REASON = "reason"
    ITEM = "item"
    WISH = "wish"
    PAYMENT = "payment"
    ADDRESS = "address"


class Fact(NamedTuple):
    """A fact that the customer tells."""

    topic: Topic
    text: str
    at_first: str | None = None
    """First version of the fact, from a customer that changes its mind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request of a customer."""

    kind: RequestKind
    opening: str
    facts: tuple[Fact, ...] = ()
    """Facts in the order in which the customer volunteers them."""
    actions: tuple[Action, ...] = ()
    outputs: tuple[str, ...] = ()
    """Texts that the agent has to say, such as an amount."""
    order_id: str | None = None


class Persona(enum.StrEnum):
    """A customer's way of talking."""

    DIRECT = "direct"
    """Tells everything at once."""
    TERSE = "terse"
    """Tells one thing at a time."""
    CHATTY = "chatty"
    """Tells two things at a time, with small talk."""
    FORGETFUL = "forgetful"
    """Knows neither the email address nor order numbers."""
    WAVERING = "wavering"
    """Wants something else when asked to confirm."""

    @property
    def facts_at_once(self) -> int:
        """Maximum number of facts in a reply."""
        return {Persona.TERSE: 1, Persona.CHATTY: 2}.get(self, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A customer with a list of requests."""

    user_id: str
    by_email: str
    """Customer's sentence with the email address."""
    by_name: str
    """Customer's sentence with name and zip code."""
    persona: Persona
    requests: tuple[Request, ...]

    @property
    def task_type(self) -> TaskType:
        """The kind of the only request, or two requests; a refused request counts as one with the next."""
        kinds = [request.kind for request in self.requests]
        single = len(kinds) == 1 or kinds[0] is RequestKind.REFUSED
        return TaskType(kinds[0].value) if single else TaskType.TWO_REQUESTS

    def wavers_about(self, request: Request) -> Fact | None:
        """Return the fact about which a wavering customer changes its mind; ``None`` for others or without a choice."""
        if self.persona is not Persona.WAVERING:
            return None
        return next((fact for fact in request.facts if fact.at_first is not None), None)
