"""Scripted customer of the airline, which states its request step by step and ends with a stop mark.

Its replies depend only on the scenario, its own state, the agent's words and the database.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..retail.hearing import figures_in, hear
from . import phrases
from .records import Database
from .requests import Fact, Persona, Scenario, Topic

PATIENCE = 6
"""Maximum number of replies that contain nothing new."""
_TOPICS: Mapping[Topic, re.Pattern[str]] = {
    topic: re.compile(pattern, re.IGNORECASE)
    for topic, pattern in {
        Topic.USER: r"\buser id\b|\bidentif|\bverify\b|who you are",
        Topic.RESERVATION: r"\breservation\b|\bbooking\b|\bwhich trip\b",
        Topic.REASON: r"\breason\b|\bwhy\b",
        Topic.WISH: r"\binstead\b|\b(which|what|new) (flight|date|day|cabin)s?\b|\bhow many (more|additional)\b"
        r"|\bwho will fly instead\b|\bwhere\b|\bwhen\b",
        Topic.PASSENGERS: r"\bpassengers?\b|\bwho will fly\b|\balone\b",
        Topic.BAGS: r"\bbags?\b|\bluggage\b|\bbaggage\b",
        Topic.INSURANCE: r"\binsurance\b",
        Topic.PAYMENT: r"\bpay(ment)?\b|\brefund|\b(gift|credit) card\b",
    }.items()
}


@dataclass(slots=True, kw_only=True)
class Mood:
    """Changing state of a customer."""

    told: list[str] = field(default_factory=list)
    """Topics of the facts that the customer has stated."""
    changed_mind: bool = False
    spent: int = 0
    """Number of replies without anything new."""
    refusals: int = 0
    """Number of refusals by an agent that has looked up the refused record."""


class Customer:
    """Scripted customer of one scenario.

    Args:
        scenario: The customer's request.
        gold_key: Hash of the database when the request is met.
        mood: State of the conversation; by default its start.
    """

    def __init__(self, scenario: Scenario, gold_key: str, mood: Mapping[str, Any] | None = None) -> None:
        self.scenario, self._gold_key = scenario, gold_key
        self.mood = Mood(**(mood or {}))
        self.mood.told = list(self.mood.told)

    def to_plain(self) -> dict[str, Any]:
        """Return the mood as JSON types."""
        return asdict(self.mood)

    def open(self) -> str:
        """Return the first words."""
        told = self._tell(list(self.scenario.facts)) if self.scenario.persona is Persona.DIRECT else []
        return " ".join(["Hello.", self.scenario.opening, *told])

    def answer(self, text: str, database: Database) -> str:
        """Return the reply to the agent's message; the last reply ends with `STOP`."""
        if database.transfers:
            return phrases.HANDED_OVER
        heard, figures, outputs = hear(text), figures_in(text), self.scenario.outputs
        if outputs:
            if figures.answers(outputs):
                return phrases.DONE
            if len(figures.amounts) > 1 or figures.is_record:
                return self._spend(phrases.WHICH_AMOUNT)
        elif not self.scenario.kind.is_refused and database.key() == self._gold_key:
            return phrases.DONE
        if heard.refuses and not heard.wants_confirmation and self.scenario.reservation_id in database.seen:
            return self._hear_refusal()
        return self._reply(text, wants_confirmation=heard.wants_confirmation)

    def _hear_refusal(self) -> str:
        """Question the first refusal and accept the second; the reply does not reveal whether the refusal is right."""
        self.mood.refusals += 1
        return phrases.DOUBTS if self.mood.refusals == 1 else phrases.REFUSED

    def _reply(self, text: str, *, wants_confirmation: bool) -> str:
        left = [fact for fact in self.scenario.facts if fact.topic.value not in self.mood.told]
        asked = [fact for fact in left if _TOPICS[fact.topic].search(text)]
        if asked:
            return " ".join(self._tell(asked if self.scenario.persona is not Persona.TERSE else asked[:1]))
        if wants_confirmation and not left:
            fact = self.scenario.wavers_about
            if fact is not None and not self.mood.changed_mind:
                self.mood.changed_mind = True
                return phrases.WAVERS.format(text=fact.text)
            return self._spend(phrases.YES)
        return " ".join(self._tell(left[:1])) if left else self._spend(phrases.ALL_TOLD)

    def _tell(self, facts: list[Fact]) -> list[str]:
        self.mood.told += [fact.topic.value for fact in facts]
        wavers = None if self.mood.changed_mind else self.scenario.wavers_about
        return [fact.at_first if fact is wavers and fact.at_first else fact.text for fact in facts]

    def _spend(self, reply: str) -> str:
        self.mood.spent += 1
        return reply if self.mood.spent <= PATIENCE else phrases.OUT_OF_TIME
