"""Workloads of multi-turn sessions, in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a session."""

    new_ids: list[int]
    """New tokens before the answer."""
    answer_tokens: int


Session: TypeAlias = list[Turn]


def as_session(trajectory: Trajectory) -> Session:
    """Return an episode of one sequence as a session of the server."""
    (sequence,) = trajectory.sequences
    ids, session, said = sequence.ids_list(), [], 0
    for turn in sequence.turns:
        session.append(Turn(new_ids=ids[said : turn.start], answer_tokens=turn.end - turn.start))
        said = turn.end
    return session
