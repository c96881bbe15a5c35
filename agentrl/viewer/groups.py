"""The members of a group side by side: their rewards and advantages, and the first token where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from agentrl.observe.trajectory_index import EpisodeFilter
from agentrl.trajectory import Trajectory
from agentrl.viewer.episode_list import row_document
from agentrl.viewer.opened_source import OpenedSource
from agentrl.viewer.sources import UnknownAddress
from agentrl.viewer.training_tables import read_episode_rows

MOST_MEMBERS = 64
"""Maximum number of members that are compared."""


def group_document(opened: OpenedSource, group: str) -> dict[str, Any]:
    """Return a group.

    Raises:
        UnknownAddress: there is no such group.
    """
    opened.wait_for_index()
    with opened.index.reader() as index:
        rows = index.select(EpisodeFilter(group_id=group), limit=MOST_MEMBERS)
        rows.sort(key=lambda row: (row.member is None, row.member, row.attempt, row.number))
        if not rows:
            raise UnknownAddress(f"no such group in {opened.source.name}", got=repr(group[:200]))
        played = [index.read(row).trajectory for row in rows]
    table: Mapping[str, Mapping[str, Any]] = {}
    problem = None
    try:
        first = min(row.start_step for row in rows)
        table = read_episode_rows(opened.folders, opened.source, first, [row.id for row in rows])
    except (ValueError, OSError, KeyError) as error:  # a damaged file, or one that was just removed
        problem = f"the trainer's table cannot be read: {type(error).__name__}"
    rewards = [row.reward for row in rows if row.is_trainable and row.reward is not None]
    parts = [None, *(_first_difference(played[0], other) for other in played[1:])]
    differences = [part for part in parts if part is not None]
    return {
        "group": group,
        "task": rows[0].task_id,
        "environment": rows[0].environment,
        "mean": fmean(rewards) if rewards else None,
        "std": pstdev(rewards) if rewards else None,
        "members": [
            {
                "row": row_document(row),
                "advantage": table.get(row.id, {}).get("advantage_mean"),
                "table": table.get(row.id),
                "parts_at": part,
            }
            for row, part in zip(rows, parts, strict=True)
        ],
        "first_difference": min(differences, key=_place) if differences else None,
        "overlay_problem": problem,
    }


def _place(part: Mapping[str, int | None]) -> tuple[int, int]:
    return part["sequence"] or 0, part["position"] or 0


def _first_difference(one: Trajectory, other: Trajectory) -> dict[str, int | None] | None:
    """Return the first token at which an episode differs from another; ``None`` if all are equal."""
    for number, (a, b) in enumerate(zip(one.sequences, other.sequences, strict=False)):
        common = min(len(a), len(b))
        different = np.flatnonzero(a.token_ids[:common] != b.token_ids[:common])
        if different.size or len(a) != len(b):
            position = int(different[0]) if different.size else common
            return {"sequence": number, "position": position, "turn": _turn_at(other, number, position)}
    shared = min(len(one.sequences), len(other.sequences))
    if len(one.sequences) == len(other.sequences):
        return None
    return {"sequence": shared, "position": 0, "turn": _turn_at(other, shared, 0)}


def _turn_at(trajectory: Trajectory, number: int, position: int) -> int | None:
    """Return the turn whose answer contains a token, or that follows it."""
    if number >= len(trajectory.sequences):
        return None
    turns: Sequence[Any] = trajectory.sequences[number].turns
    return next((turn.index for turn in turns if position < turn.end), turns[-1].index if turns else None)
