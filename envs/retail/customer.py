"""Scripted customer, which states its request step by step and ends with a stop mark.

It checks in the database if a request was met. A question ends with the first answer, right or wrong, because the
customer cannot tell. Its replies depend only on the scenario, its own state, and the agent's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from . import phrases
from .database import Database
from .hearing import Utterance, figures_in, hear
from .requests import Fact, Persona, Request, RequestKind, Scenario

PATIENCE = 6
"""Maximum number of a customer's replies per request that contain nothing new."""
_SMALL_TALK = ("Sure!", "No problem.", "Of course.", "Good question.")


@dataclass(slots=True, kw_only=True)
class Mood:
    """Changing state of a customer."""

    request: int = 0
    """Index of the current request."""
    told: list[str] = field(default_factory=list)
    """Topics of this request's facts that the customer has stated."""
    changed_mind: bool = False
    """True if the customer has changed its mind about this request."""
    introduced: bool = False
    replies: int = 0
    spent: int = 0
    """Number of replies without anything new on this request."""


class Customer:
    """Scripted customer of one scenario.

    Args:
        scenario: The customer's identity and requests.
        expected: The order of each request after the request is met.
        mood: State of the conversation; by default its start.
    """

    def __init__(
        self, scenario: Scenario, expected: tuple[Mapping[str, Any], ...], mood: Mapping[str, Any] | None = None
    ) -> None:
        self.scenario = scenario
        self._expected = expected
        self.mood = Mood(**(mood or {}))
        self.mood.told = list(self.mood.told)

    def to_plain(self) -> dict[str, Any]:
        """Return the mood as JSON types."""
        return asdict(self.mood)

    @property
    def request(self) -> Request:
        """Current request."""
        return self.scenario.requests[self.mood.request]

    @property
    def question(self) -> tuple[str, ...]:
        """Right answer to the current question; empty without a question."""
        return self.request.outputs

    def open(self) -> str:
        """Return the first words."""
        greeting = "Hello there, I hope that you are well!" if self.scenario.persona is Persona.CHATTY else "Hello."
        words = [greeting, self.request.opening]
        if self.scenario.persona is Persona.DIRECT:
            self.mood.introduced = True
            words += [self.scenario.by_email, *self._tell(list(self.request.facts))]
        return " ".join(words)

    def answer(self, text: str, database: Database) -> str:
        """Return the reply to the agent's message; the last reply ends with `STOP`."""
        self.mood.replies += 1
        heard = hear(text)
        if database.transfers:
            return phrases.HANDED_OVER
        if self._is_met(heard, text, database):
            return self._go_on()
        words = [*self._unclear(text), *self._reply(heard)]
        if self.mood.spent > PATIENCE:
            return phrases.OUT_OF_TIME
        return " ".join(words)

    def _is_met(self, heard: Utterance, text: str, database: Database) -> bool:
        request = self.request
        if request.kind is RequestKind.REFUSED:
            return heard.refuses
        if request.outputs:
            return figures_in(text).answers(request.outputs)
        if request.order_id is None:
            return False
        return database.order(request.order_id) == self._expected[self.mood.request]

    def _unclear(self, text: str) -> list[str]:
        """Return a reply to figures that do not answer the customer's question."""
        outputs, figures = self.request.outputs, figures_in(text)
        if not outputs or not (figures.amounts or figures.counts):
            return []
        if figures.is_record or len(figures.amounts) > 1 or (len(outputs) > 1 and len(figures.counts) > 1):
            return [phrases.TOO_MANY_FIGURES if len(outputs) == 1 else phrases.TOO_MANY_FIGURES_OF_TWO]
        return [] if len(outputs) == 1 or not figures.amounts else [phrases.NO_COUNT]

    def _go_on(self) -> str:
        """Return the next request, or the goodbye."""
        was_refused = self.request.kind is RequestKind.REFUSED
        if self.mood.request + 1 == len(self.scenario.requests):
            return phrases.SERVED
        self.mood.request += 1
        self.mood.told, self.mood.changed_mind, self.mood.spent = [], False, 0
        if was_refused:
            return f"I see. {self.request.opening}"
        words = ["Thank you. One more thing.", self.request.opening]
        if self.scenario.persona is Persona.DIRECT:
            words += self._tell(list(self.request.facts))
        return " ".join(words)

    def _reply(self, heard: Utterance) -> list[str]:
        """Answer with identity, requested facts and confirmation; otherwise state or repeat a fact."""
        was_introduced = self.mood.introduced
        words = self._introduction(heard)
        is_new = bool(words) and not was_introduced
        if heard.wants_confirmation and (changed := self._change_of_mind()) is not None:
            return [f"No, wait. {changed}"]
        confirms = heard.wants_confirmation and not self._untold()
        asked = [fact for fact in self.request.facts if fact.topic in heard.topics]
        new = [fact for fact in asked if fact.topic.value not in self.mood.told]
        if new:
            words, is_new = [*words, *self._tell(new[: self.scenario.persona.facts_at_once])], True
        if confirms:
            words.insert(0, "Yes, please.")
        if not words:
            words, is_new = self._volunteer(asked)
        self.mood.spent += not is_new
        return [*self._chat(), *words]

    def _introduction(self, heard: Utterance) -> list[str]:
        asked = heard.wants_email or heard.wants_name
        if not asked or (self.mood.introduced and heard.topics):
            return []
        self.mood.introduced = True
        if self.scenario.persona is not Persona.FORGETFUL:
            return [self.scenario.by_email if heard.wants_email else self.scenario.by_name]
        forgotten = ["I do not remember my email address."] if heard.wants_email else []
        return [*forgotten, *([self.scenario.by_name] if heard.wants_name or heard.wants_email else [])]

    def _change_of_mind(self) -> str | None:
        """Return the changed request of a wavering customer, once, after it has stated the first one."""
        wavering = self._wavering_fact()
        if wavering is None or self.mood.changed_mind or wavering.topic.value not in self.mood.told:
            return None
        self.mood.changed_mind = True
        return wavering.text

    def _wavering_fact(self) -> Fact | None:
        return self.scenario.wavers_about(self.request)

    def _volunteer(self, asked: list[Fact]) -> tuple[list[str], bool]:
        """Return new facts and True; if there are none, repeat the requested facts or the request, with False."""
        untold = self._untold()
        if untold:
            return self._tell(untold[: self.scenario.persona.facts_at_once]), True
        again = [self._text(fact) for fact in asked] or [self.request.opening, *map(self._text, self.request.facts)]
        return ["As I said:", *again], False

    def _untold(self) -> list[Fact]:
        return [fact for fact in self.request.facts if fact.topic.value not in self.mood.told]

    def _tell(self, facts: list[Fact]) -> list[str]:
        self.mood.told += [fact.topic.value for fact in facts]
        return [self._text(fact) for fact in facts]

    def _text(self, fact: Fact) -> str:
        """Return the current version of a fact: a wavering customer starts with another one."""
        is_first = fact is self._wavering_fact() and not self.mood.changed_mind
        return fact.at_first if is_first and fact.at_first is not None else fact.text

    def _chat(self) -> list[str]:
        if self.scenario.persona is not Persona.CHATTY:
            return []
        return [_SMALL_TALK[self.mood.replies % len(_SMALL_TALK)]]
