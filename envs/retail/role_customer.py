"""Customer that the runtime plays as the role `user`: its instructions and its messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentrl.errors import EnvironmentFailure

from . import phrases
from .briefing import GREETING, brief
from .database import Database
from .options import ROLE
from .phrases import STOP
from .tasks import Case

AGENT, USER = "agent", "user"
PATIENCE = 30
"""Maximum number of the customer's answers."""
ATTEMPTS = 3
"""Maximum number of unusable answers of a customer in a row."""
MAX_UTTERANCE_CHARS = 4000
"""Maximum characters of an utterance that the customer gets, so that an agent cannot fill the model's context."""
BEGIN = '(You begin with: "{}")'
"""Line below the greeting. The notes contain it, too, but small models find it only here."""
AGAIN = "(That could not be understood. Say in plain words what the customer says now.)"
NOT_YET = f"(The conversation has just begun. Say what you want, without {STOP}.)"
_NOTHING = "(says nothing)"
_NO_STOP = "[…]"
"""Replacement of the stop mark in the agent's words, so that the customer does not repeat it."""
_THOUGHTS = re.compile(r".*</think>|<think>.*", re.DOTALL)


def roles_of(*, customer: object = None, **_options: Any) -> tuple[str, ...]:
    """Return the roles that the runtime plays for the desk."""
    return (USER,) if customer == ROLE else ()


class RoleCustomer:
    """Customer of one scenario, played outside of the environment: its words are actions.

    Args:
        case: The scenario: identity and requests.
        talk: The conversation so far, alternating: the customer first, then the agent.
        failed: Number of unusable answers of the customer since then.
    """

    def __init__(self, case: Case, talk: Sequence[str] = (), failed: int = 0) -> None:
        self._case = case
        self._talk = list(talk)
        self._failed = failed

    def to_plain(self) -> dict[str, Any]:
        """Return the conversation as JSON types."""
        return {"talk": list(self._talk), "failed": self._failed}

    @property
    def is_asked(self) -> bool:
        """True if the customer acts next."""
        return len(self._talk) % 2 == 0

    @property
    def next_player(self) -> str:
        """Name of the player that acts next."""
        return USER if self.is_asked else AGENT

    @property
    def holds_step(self) -> bool:
        """True if words did not end a step of the agent: the customer acts next, or has just spoken first."""
        return self.is_asked or len(self._talk) == 1

    @property
    def question(self) -> tuple[str, ...]:
        """Right answer to the question of the scenario; empty without a question."""
        return self._case.outputs

    def briefing(self) -> dict[str, Any]:
        """Return the players and the customer's instructions, for the info of `reset`."""
        return {"players": [AGENT, USER], "instructions": {USER: brief(self._case.scenario)}}

    def open(self) -> str:
        """Return the first text that the customer reads."""
        return f"{GREETING}\n\n{BEGIN.format(self._case.scenario.requests[0].opening)}"

    def answer(self, text: str, database: Database) -> str:
        """Return the agent's message for the customer, or the last words of a customer who cannot answer any more."""
        words = agent_words(text)
        self._talk.append(words)
        if database.transfers:
            return self._say(phrases.HANDED_OVER)
        return words if len(self._talk) // 2 <= PATIENCE else self._say(phrases.OUT_OF_TIME)

    def hear(self, action: str) -> str:
        """Return the customer's words in its action, which the agent reads, or a request to the customer to try again.

        Raises:
            EnvironmentFailure: several unusable answers in a row.
        """
        words = customer_words(action)
        if words and (self._talk or not words.endswith(STOP)):
            return self._say(words)
        self._failed += 1
        if self._failed == ATTEMPTS:
            raise EnvironmentFailure(
                f"the customer of {self._case.task_id} gave no usable answer",
                got=repr(action[:200]),
                expected="words" if self._talk else f"first words, without {STOP}",
                hint=f"try another model for agent.roles.{USER}",
            )
        return NOT_YET if words else AGAIN

    def _say(self, words: str) -> str:
        self._talk.append(words)
        self._failed = 0
        return words


def agent_words(text: str) -> str:
    """Return the agent's words as the customer gets them: not empty, not too long, without the stop mark."""
    words = text.replace(STOP, _NO_STOP).strip() or _NOTHING
    return words if len(words) <= MAX_UTTERANCE_CHARS else f"{words[:MAX_UTTERANCE_CHARS]} […]"


def customer_words(text: str) -> str:
    """Return the customer's words in a model's answer, without thinking and without text after the stop mark.

    >>> customer_words("<think>Who am I?</think> Bye. ###STOP### That was it."), customer_words("<think>Hm.")
    ('Bye. ###STOP###', '')
    """
    words, stop, _ = _THOUGHTS.sub("", text).partition(STOP)
    return f"{words.strip()} {stop}".strip()
