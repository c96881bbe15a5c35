"""Customer of a published task that the runtime plays as the role `user`: it talks, and calls tools on the phone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from agentrl.errors import EnvironmentFailure, ToolError
from agentrl.message import ToolCall

from ...desks.calls import read_action
from ...retail.role_customer import AGAIN, AGENT, ATTEMPTS, USER, agent_words, customer_words
from .instructions import ENDS, brief_customer
from .reading import PublishedTask

GREETING = "Hello, you have reached customer service. What can I do for you?"
MAX_CALLS = 12
"""Maximum number of the customer's calls between two of its messages; the runtime allows sixteen answers."""
TALK = "(Tell the agent what you have found out, before you call another tool.)"
NOT_YET = "(The conversation has just begun. Say what you want.)"
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""A call in the notation of many chat models."""
_AFTER_WORDS = re.compile(r"\n(?:```(?:json)?\n)?(\{\s*\"name\".*)", re.DOTALL)


class CustomerAct(NamedTuple):
    """Content of a customer's answer: words for the agent, a call, or nothing usable."""

    words: str = ""
    call: ToolCall | None = None
    request: str = ""
    """Request to the customer to try again."""


class PhoneCustomer:
    """Customer of one task, played outside of the environment.

    Args:
        task: The task.
        talk: The conversation so far, alternating: the customer first, then the agent.
        failed: Number of unusable answers of the customer since then.
        calls: Number of the customer's calls since then.
    """

    def __init__(self, task: PublishedTask, talk: Sequence[str] = (), failed: int = 0, calls: int = 0) -> None:
        self._task = task
        self._talk, self._failed, self._calls = list(talk), failed, calls

    def to_plain(self) -> dict[str, Any]:
        """Return the conversation as JSON types."""
        return {"talk": list(self._talk), "failed": self._failed, "calls": self._calls}

    @property
    def is_asked(self) -> bool:
        """True if the customer acts next."""
        return len(self._talk) % 2 == 0

    @property
    def has_just_begun(self) -> bool:
        """True before the agent has said anything."""
        return len(self._talk) <= 1

    @property
    def next_player(self) -> str:
        """Name of the player that acts next."""
        return USER if self.is_asked else AGENT

    def briefing(self) -> dict[str, Any]:
        """Return the players and the customer's instructions, for the info of `reset`."""
        return {"players": [AGENT, USER], "instructions": {USER: brief_customer(self._task)}}

    def answer(self, text: str) -> str:
        """Return the agent's message as the customer gets it."""
        words = agent_words(text)
        for mark in ENDS:
            words = words.replace(mark, "[…]")
        self._talk.append(words)
        return words

    def act(self, answer: str) -> CustomerAct:
        """Read a customer's answer.

        Raises:
            EnvironmentFailure: several unusable answers in a row.
        """
        act = self._read(answer)
        if act.request:
            self._failed += 1
            if self._failed == ATTEMPTS:
                raise EnvironmentFailure(
                    f"the customer of {self._task.row.id} gave no usable answer",
                    got=repr(answer[:200]),
                    expected="words, or a call of a tool",
                    hint=f"try another model for agent.roles.{USER}",
                )
        elif act.call is not None:
            self._calls += 1
        else:
            self._talk.append(act.words)
            self._failed = self._calls = 0
        return act

    def _read(self, answer: str) -> CustomerAct:
        text = customer_words(answer)
        try:
            act = read_action(call_in(text))
        except ToolError as error:
            return CustomerAct(request=f"Error: {error}")
        if isinstance(act, ToolCall):
            return CustomerAct(call=act) if self._calls < MAX_CALLS else CustomerAct(request=TALK)
        if not act.strip():
            return CustomerAct(request=AGAIN)
        if not self._talk and ends_conversation(act):
            return CustomerAct(request=NOT_YET)
        return CustomerAct(words=act)


def call_in(text: str) -> str:
    """Return the call in a customer's answer, which may have tags, or follow words; without a call, the answer.

    >>> call_in('I look. <tool_call> {"name": "toggle_data"} </tool_call>'), call_in("It is off.")
    ('{"name": "toggle_data"}', 'It is off.')
    """
    found = _TAGGED.search(text) or _AFTER_WORDS.search(text)
    return text if found is None else found[1].strip()


def ends_conversation(words: str) -> bool:
    """Return True if the customer's words end the conversation."""
    return any(mark in words for mark in ENDS)
