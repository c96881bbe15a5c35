"""The words of an episode that has no tokens: what `agentrl view` shows of scripted policies and text services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from agentrl.message import Message, plainly_written


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message as text."""

    role: str
    text: str
    turn: int | None = None
    """Place of the turn that it is the answer of, among the episode's turns; ``None`` for what others said."""


Transcript: TypeAlias = list[list[Said]]
"""The messages of each conversation."""


def transcript(conversations: Sequence[Sequence[Message]], answers: Sequence[Message], n_turns: int) -> Transcript:
    """Return conversations as text.

    Args:
        conversations: Their messages.
        answers: Those of them with which the policy took its turns, in order.
        n_turns: Turns of the episode. Where there are others than those of `answers`, no answer names its turn.
    """
    turns = {id(answer): turn for turn, answer in enumerate(answers)} if len(answers) == n_turns else {}
    return [[_said(message, turns.get(id(message))) for message in messages] for messages in conversations]


def _said(message: Message, turn: int | None) -> Said:
    thought = "" if message.reasoning is None else f"<think>{message.reasoning}</think>\n"
    return Said(role=message.role, text=f"{thought}{plainly_written(message)}", turn=turn)


def transcript_record(said: Transcript) -> list[list[dict[str, Any]]]:
    """Return a transcript as plain JSON types."""
    return [[asdict(one) for one in messages] for messages in said]


def transcript_from_record(rows: Iterable[Iterable[Mapping[str, Any]]]) -> Transcript:
    """Restore what `transcript_record` was given."""
    return [[Said(**row) for row in messages] for messages in rows]
