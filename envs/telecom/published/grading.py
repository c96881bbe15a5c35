"""The reward of a published task, as tau2-bench computes it: the product of the parts that the task names."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.errors import ToolError

from .reading import PublishedTask
from .schema import Criteria, GoldAction
from .world import PublishedWorld


class MadeCall(NamedTuple):
    """Tool call of either side, successful or not."""

    name: str
    arguments: Mapping[str, Any]


def grade(
    task: PublishedTask, world: PublishedWorld, calls: Sequence[MadeCall], said: Sequence[str]
) -> dict[str, bool]:
    """Return which parts of a task's reward are met; the reward is 1 if all are, and otherwise 0.

    Args:
        task: The task.
        world: State at the end, which assertions do not change.
        calls: Calls of both sides.
        said: Messages of the agent.
    """
    criteria = task.row.evaluation_criteria
    if criteria is None:
        return {}
    has_state = criteria.actions is not None or criteria.env_assertions is not None
    met: dict[str, bool] = {}
    for part in criteria.reward_basis:
        if part == "DB":
            met[part] = not has_state or world.keys() == _gold_keys(task, criteria)
        elif part == "ENV_ASSERTION":
            met[part] = all(world.holds(assertion) for assertion in criteria.env_assertions or ())
        elif part == "ACTION":
            met[part] = all(any(_matches(gold, call) for call in calls) for gold in criteria.actions or ())
        elif part == "COMMUNICATE":
            texts = [text.lower().replace(",", "") for text in said]
            met[part] = all(any(info.lower() in text for text in texts) for info in criteria.communicate_info or ())
    return met


def _gold_keys(task: PublishedTask, criteria: Criteria) -> tuple[str, str]:
    """Return hashes of the state after the published actions, between which tau2-bench does not let the sides sync."""
    world = task.begin()
    for action in criteria.actions or ():
        with contextlib.suppress(ToolError, TypeError):
            world.call(action.requestor, action.name, action.arguments, synced=False)
    return world.keys()


def _matches(gold: GoldAction, call: MadeCall) -> bool:
    """Return True if a call is a published action, by the arguments that count; by default, those of the call."""
    if gold.name != call.name:
        return False
    names = call.arguments if gold.compare_args is None else gold.compare_args
    made = {name: value for name, value in call.arguments.items() if name in names}
    wanted = {name: value for name, value in gold.arguments.items() if name in names}
    return made == wanted
