"""A customer that a language model plays, behind any OpenAI-compatible service."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentrl.engine import (
    ChatAnswer,
    ChatPolicy,
    SamplingParams,
    StopReason,
)
from agentrl.errors import EngineError, EnvironmentFailure
from agentrl.message import Message, system, user

from . import phrases
from .briefing import GREETING, brief
from .customer_options import SECTION, CustomerOptions
from .database import Database
from .phrases import STOP
from .tasks import Case

LONGEST_HEARD = 4000
"""Maximum characters of an utterance that the customer gets, so that an agent cannot fill the model's context."""
SECOND_TEMPERATURE = 0.7
"""Minimum temperature of a second attempt: at 0 the same unusable answer would come again."""
_NOTHING = "(says nothing)"
_NO_STOP = "[…]"
"""Replacement of the stop mark in the agent's words, so that the customer does not repeat it."""
_THOUGHTS = re.compile(r".*</think>|<think>.*", re.DOTALL)


class ModelCustomer:
    """Customer of one scenario. It gets the agent's words, and nothing of the agent's actions.

    Args:
        case: The scenario: identity and requests.
        options: Settings of the model and its number of answers.
        service: The service of the model.
        seed: Seed of every request.
        talk: The conversation so far, alternating: the customer first, then the agent.
    """

    def __init__(
        self, case: Case, options: CustomerOptions, service: ChatPolicy, *, seed: int, talk: Sequence[str] = ()
    ) -> None:
        self._options, self._service, self._seed = options, service, seed
        self._task_id = case.task_id
        self._part = (system(brief(case.scenario)), user(GREETING))
        self._talk = list(talk)

    def to_plain(self) -> dict[str, Any]:
        """Return the seed and the conversation as JSON types."""
        return {"seed": self._seed, "talk": list(self._talk)}

    async def open(self) -> str:
        """Return the first words.

        Raises:
            EnvironmentFailure: the service failed, or the model gave no usable answer.
            UsageError: the service refuses the key or the model's name.
        """
        words = await self._ask(self._part)
        self._talk = [words]
        return words

    async def answer(self, text: str, database: Database) -> str:
        """Return the reply to what the agent says; the last one ends with `STOP`.

        If the customer was transferred or is out of patience, the last reply does not come from the model.

        Raises:
            EnvironmentFailure: the service failed, or the model gave no usable answer.
            UsageError: the service refuses the key or the model's name.
        """
        words = agent_words(text)
        if database.transfers:
            reply = phrases.HANDED_OVER
        elif len(self._talk) // 2 >= self._options.patience:
            reply = phrases.OUT_OF_TIME
        else:
            past = [Message(role=("assistant", "user")[n % 2], content=words) for n, words in enumerate(self._talk)]
            reply = await self._ask([*self._part, *past, user(words)])
        self._talk += [words, reply]
        return reply

    async def _ask(self, messages: Sequence[Message]) -> str:
        """Return the customer's next words; after an unusable answer, the model is asked once more."""
        for attempt in range(2):
            answer = await self._chat(messages, attempt)
            words = customer_words(answer.message.text)
            if words and (self._talk or not words.endswith(STOP)):
                return words
        cut = answer.stop_reason is StopReason.LENGTH
        raise EnvironmentFailure(
            f"the customer of {self._task_id} gave no usable answer",
            got=f"{answer.message.text[:200]!r}, {answer.answer_tokens} tokens" + (", cut off" if cut else ""),
            expected="words" if self._talk else f"first words, without {STOP}",
            hint=f"raise {SECTION}.max_tokens, or let the model think less" if cut else "try another model",
        )

    async def _chat(self, messages: Sequence[Message], attempt: int) -> ChatAnswer:
        params = SamplingParams(
            temperature=max(self._options.temperature, SECOND_TEMPERATURE * attempt),
            max_tokens=self._options.max_tokens,
            seed=self._seed + attempt,
        )
        try:
            return await self._service.chat(messages, (), params, f"{self._task_id}, {len(messages)} messages")
        except EngineError as error:
            what = f"the customer of {self._task_id} cannot answer: {error.what}"
            hint = error.hint or f"see {SECTION}.url and {SECTION}.timeout_s"
            raise EnvironmentFailure(what, got=error.got, expected=error.expected, hint=hint) from error


def agent_words(text: str) -> str:
    """Return the agent's words as the customer gets them: not empty, not too long, without the stop mark."""
    words = text.replace(STOP, _NO_STOP).strip() or _NOTHING
    return words if len(words) <= LONGEST_HEARD else f"{words[:LONGEST_HEARD]} […]"


def customer_words(text: str) -> str:
    """Return the customer's words in a model's answer, without thinking and without text after the stop mark.

    >>> customer_words("<think>Who am I?</think> Bye. ###STOP### That was it."), customer_words("<think>Hm.")
    ('Bye. ###STOP###', '')
    """
    words, stop, _ = _THOUGHTS.sub("", text).partition(STOP)
    return f"{words.strip()} {stop}".strip()
