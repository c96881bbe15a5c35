"""The tasks of the telephone company's desk: problems drawn from the records of a split."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ..task_ids import TEST, TRAIN, VALID, NumberedTasks, check_split, parse_task_id
from .faults import CallerPersona, ProblemKind, Trouble, actions_of, draw_trouble
from .generator import store_of
from .options import ENVIRONMENT, TelecomOptions
from .records import TelecomDatabase, TelecomStore
from .system import CustomerSystem

SIZES = {TRAIN: 4500, VALID: 450, TEST: 450}
"""Number of tasks by split; the kinds of problems alternate."""
_SOLVABLE = (ProblemKind.NO_SERVICE, ProblemKind.NO_DATA, ProblemKind.SLOW_DATA, ProblemKind.MMS)
_KINDS = (*_SOLVABLE, *_SOLVABLE, ProblemKind.UNSOLVABLE)
"""Kinds of successive tasks: one in nine cannot be solved at the desk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelecomCase:
    """A customer's problem with its solution."""

    task_id: str
    store: TelecomStore
    trouble: Trouble
    gold_key: str
    """Hash of the database after all gold actions."""


class TelecomTasks(NumberedTasks):
    """The tasks of a split.

    Raises:
        UsageError: the split does not exist.
    """

    def __init__(self, split: str, options: TelecomOptions) -> None:
        check_split(split, ENVIRONMENT)
        super().__init__(ENVIRONMENT, split, _numbers(split, options))

    def _task_fields(self, task_id: str) -> Mapping[str, Any]:
        return {"type": case_of(task_id).trouble.kind.value}


@functools.cache
def _numbers(split: str, options: TelecomOptions) -> Sequence[int]:
    """Return the numbers of a split's tasks with the selected kinds and personas; without a selection, all numbers."""
    numbers = [n for n in range(SIZES[split]) if _KINDS[n % len(_KINDS)] in options.task_types]
    if set(options.personas) == set(CallerPersona):
        return numbers
    return [number for number in numbers if case_of(f"{split}-{number}").trouble.persona in options.personas]


@functools.lru_cache(maxsize=8192)
def case_of(task_id: str) -> TelecomCase:
    """Return the case of a task id such as ``valid-17``.

    Raises:
        UsageError: the task does not exist.
    """
    split, number = parse_task_id(task_id, ENVIRONMENT, SIZES.__getitem__)
    store = store_of(split)
    trouble = draw_trouble(store, Random(f"telecom task {task_id}"), _KINDS[number % len(_KINDS)])
    database = TelecomDatabase(store, {**trouble.changes, "seen": [trouble.customer_id]})
    system, customer = CustomerSystem(database), store.customers[trouble.customer_id]
    for action in actions_of(trouble, database):
        getattr(system, action.name)(**action.arguments)
        database.pay(customer)
    return TelecomCase(task_id=task_id, store=store, trouble=trouble, gold_key=database.key())
