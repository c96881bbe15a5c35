"""Scripted customer, who holds the phone and follows the agent's instructions.

Its replies depend only on the problem, its own state, the phone, the agent's words and the records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from . import phrases
from .faults import NEEDED, CallerPersona, Trouble, network_of
from .hearing import CallerTopic, hear_instructions
from .phone import SIM_LOCKED, Feature, Network, Phone, PhoneStep, Verb
from .records import TelecomDatabase, TelecomStore

MAX_STEPS = 3
"""Maximum number of things that a customer does on the phone per message; a cautious one does only one."""
PATIENCE = 8
"""Maximum number of replies that contain nothing new."""

_YES = re.compile(r"\s*(?:yes|please do|go ahead)\b", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class CallerState:
    """Changing state of a customer."""

    said: list[str] = field(default_factory=list)
    """Different sentences so far."""
    spent: int = 0
    """Number of replies without a new sentence."""
    has_seen_lock: bool = False
    """True if the customer has informed the agent that the SIM card is locked."""


class Caller:
    """Scripted customer with one problem.

    Args:
        trouble: The customer's problem.
        store: The records of the split.
        phone: Settings of the phone; by default those at the start.
        state: State of the conversation; by default its start.
    """

    def __init__(
        self,
        trouble: Trouble,
        store: TelecomStore,
        phone: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.trouble = trouble
        self.phone = Phone(**(phone or trouble.phone))
        self.state = CallerState(**(state or {}))
        self.state.said = list(self.state.said)
        self._customer, self._line = store.customers[trouble.customer_id], store.lines[trouble.line_id]
        self._model = store.devices[self._line["device_id"]]["model"]

    def to_plain(self) -> dict[str, Any]:
        """Return the phone and the state as JSON types."""
        return {"phone": self.phone.to_plain(), "state": asdict(self.state)}

    def open(self) -> str:
        """Return the first words."""
        topics = (CallerTopic.NUMBER, CallerTopic.NAME, CallerTopic.PLACE)
        told = [self._know(topic) for topic in topics] if self.trouble.persona is CallerPersona.DIRECT else []
        self.state.said += told
        return " ".join(["Hello.", self.trouble.opening, *told])

    def missing(self, database: TelecomDatabase) -> str | None:
        """Return the first required function that does not work; ``None`` if all work."""
        functions = self.phone.functions(self._network(database))
        return next((name for name in NEEDED[self.trouble.kind] if not getattr(functions, name)), None)

    def answer(self, text: str, database: TelecomDatabase) -> str:
        """Follow the agent's instructions, and return the reply; the last reply ends with `STOP`."""
        if database.transfers:
            return phrases.HANDED_OVER
        heard = hear_instructions(text)
        words = [self._know(topic) for topic in heard.topics if topic is not CallerTopic.STATE]
        wanted = heard.steps or self._agreed(text, database)
        steps = wanted[: 1 if self.trouble.persona is CallerPersona.CAUTIOUS else MAX_STEPS]
        words += [self._do(step, database) for step in steps]
        missing = self.missing(database)
        if missing is None:
            return " ".join([*words, phrases.FIXED])
        if CallerTopic.STATE in heard.topics:
            words.append(phrases.STILL[missing])
        if not words:
            words = [phrases.YES if heard.wants_consent else phrases.NOT_UNDERSTOOD]
        return self._reply([*words, *([phrases.TOO_MANY] if len(steps) < len(wanted) else [])])

    def _agreed(self, text: str, database: TelecomDatabase) -> tuple[PhoneStep, ...]:
        """Return the payment if the agent answers yes to the customer, who has asked whether to pay."""
        is_asked = _YES.match(text) and database.requested(self._customer)
        return (PhoneStep(Verb.ON, Feature.PAYMENT),) if is_asked else ()

    def _reply(self, words: list[str]) -> str:
        new = [text for text in words if text not in self.state.said]
        self.state.said += dict.fromkeys(new)
        self.state.spent += not new
        self.state.has_seen_lock |= any(SIM_LOCKED in text or "locked SIM card" in text for text in words)
        return " ".join(words) if self.state.spent <= PATIENCE else phrases.OUT_OF_TIME

    def _know(self, topic: CallerTopic) -> str:
        """Return what the customer knows about a topic."""
        name = phrases.NAME.format(name=self._customer["full_name"], born=self._customer["date_of_birth"])
        match topic:
            case CallerTopic.NUMBER if self.trouble.persona is CallerPersona.FORGETFUL:
                return phrases.NO_NUMBER
            case CallerTopic.NUMBER:
                return phrases.NUMBER.format(number=self._line["phone_number"])
            case CallerTopic.NAME:
                return name
            case CallerTopic.MODEL:
                return phrases.MODEL.format(model=self._model)
            case CallerTopic.PLACE:
                return phrases.ABROAD if self.trouble.abroad else phrases.AT_HOME
            case CallerTopic.DATA_AMOUNT:
                return phrases.AMOUNT.format(gb=self.trouble.gb)
        return self.trouble.opening

    def _do(self, step: PhoneStep, database: TelecomDatabase) -> str:
        if step.feature is not Feature.PAYMENT:
            return self.phone.carry_out(step, self._network(database))
        if step.verb is not Verb.CHECK and (bill := database.pay(self._customer)) is not None:
            return phrases.PAID.format(dollars=bill["total_due"], bill_id=bill["bill_id"])
        requested = database.requested(self._customer)
        if requested is None:
            return phrases.NO_REQUEST
        return phrases.REQUESTED.format(dollars=requested["total_due"], bill_id=requested["bill_id"])

    def _network(self, database: TelecomDatabase) -> Network:
        """Return the state of the network; a phone on a suspended line loses it."""
        network = network_of(database, self.trouble.line_id, abroad=self.trouble.abroad)
        self.phone.registered = self.phone.registered and network.active
        return network
