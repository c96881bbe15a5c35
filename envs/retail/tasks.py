"""The tasks of the desk: scenarios drawn from the shop of a split, with their solutions."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agentrl.errors import ToolError

from ..task_ids import TEST, TRAIN, VALID, NumberedTasks, check_split, parse_task_id
from .database import Database, Store
from .desk import Desk
from .generator import store_of
from .options import RetailOptions
from .requests import Persona, RequestKind, Scenario, TaskType
from .scenarios import draw_scenario

ENVIRONMENT = "retail"
SIZES = {TRAIN: 9000, VALID: 900, TEST: 900}
"""Number of tasks by split; the kinds of the first request alternate."""
_KINDS = tuple(RequestKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A scenario with its solution."""

    task_id: str
    store: Store
    scenario: Scenario
    expected: tuple[Mapping[str, Any], ...]
    """Order of each request after the gold actions; empty without an order."""
    gold_key: str
    """Hash of the database after all gold actions."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Texts that the agent has to say."""
        return tuple(output for request in self.scenario.requests for output in request.outputs)


class RetailTasks(NumberedTasks):
    """The tasks of a split.

    Args:
        split: Name of the split.
        options: Options, which select types of tasks, personas and users.

    Raises:
        UsageError: the split does not exist.
    """

    def __init__(self, split: str, options: RetailOptions) -> None:
        super().__init__(ENVIRONMENT, split, _numbers(check_split(split, ENVIRONMENT), options))
        self._users = options.users

    def _task_fields(self, task_id: str) -> Mapping[str, Any]:
        return {"type": case_of(task_id, self._users).scenario.task_type.value}


@functools.cache
def _numbers(split: str, options: RetailOptions) -> Sequence[int]:
    """Return the numbers of a split's tasks with the selected types and personas; without a selection, all numbers."""
    numbers = range(SIZES[split])
    if set(options.task_types) == set(TaskType) and set(options.personas) == set(Persona):
        return numbers
    scenarios = ((number, case_of(f"{split}-{number}", options.users).scenario) for number in numbers)
    return [number for number, it in scenarios if it.task_type in options.task_types and it.persona in options.personas]


@functools.lru_cache(maxsize=4096)
def case_of(task_id: str, users: int | None = None) -> Case:
    """Return the case of a task id such as ``valid-17``, in a shop with a number of users.

    Raises:
        UsageError: the task does not exist.
    """
    split, number = parse_task_id(task_id, ENVIRONMENT, SIZES.__getitem__)
    random, kind = Random(f"retail task {task_id}"), _KINDS[number % len(_KINDS)]
    store = store_of(split, users)
    while True:
        case = _solve(task_id, store, draw_scenario(store, random, kind))
        if case is not None:
            return case


def _solve(task_id: str, store: Store, scenario: Scenario) -> Case | None:
    """Carry out the gold actions; return ``None`` if the rules do not allow them together."""
    desk = Desk(Database(store, {"identified": [scenario.user_id]}))
    expected = []
    try:
        for request in scenario.requests:
            for action in request.actions:
                getattr(desk, action.name)(**action.arguments)
            order = desk.database.order(request.order_id or "")
            expected.append(dict(order or {}))
    except ToolError:
        return None
    return Case(task_id=task_id, store=store, scenario=scenario, expected=tuple(expected), gold_key=desk.database.key())
