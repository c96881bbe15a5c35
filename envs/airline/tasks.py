"""The tasks of the airline's desk: scenarios drawn from the records of a split, or published ones."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agentrl.errors import ToolError, UsageError

from ..choices import choose_all
from ..option_types import typed_options
from ..retail.options import ROLE
from ..task_ids import TEST, TRAIN, VALID, NumberedTasks, check_split, parse_task_id
from .desk import Desk
from .generator import store_of
from .published import PublishedCase, read_published
from .records import Database, Store
from .requests import Persona, RequestKind, Scenario, draw_scenario

ENVIRONMENT = "airline"
MAX_STEPS = 40
SIZES = {TRAIN: 4400, VALID: 440, TEST: 440}
"""Number of tasks by split; the kinds of requests alternate."""
_KINDS = tuple(RequestKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class AirlineOptions:
    """Checked options of the environment and its task source."""

    max_steps: int
    task_types: tuple[RequestKind, ...]
    personas: tuple[Persona, ...]
    data: str | None
    """Folder of published tasks, which replace the generated ones of the test split."""


@typed_options("airline")
def parse_options(
    *,
    max_steps: int = MAX_STEPS,
    task_types: Iterable[str] | None = None,
    personas: Iterable[str] | None = None,
    data: str | None = None,
    customer: object = None,
) -> AirlineOptions:
    """Check the options of a config.

    Args:
        max_steps: Number of tool calls and messages after which an episode is truncated.
        task_types: Kinds of requests; all if left out.
        personas: Kinds of customers; all if left out.
        data: Folder with published data of tau-bench or tau2-bench, whose tasks are the test split.
        customer: ``role``, which `data` requires: the runtime plays the customer, as ``agent.roles.user``.

    Raises:
        UsageError: a value is not allowed.
    """
    if max_steps < 1:
        raise UsageError("the option max_steps of airline is too small", got=max_steps, expected="at least 1")
    if (data is None) != (customer is None) or customer not in (None, ROLE):
        raise UsageError(
            "the customers of published tasks are played by a model, and those of generated tasks by a script",
            got=f"data: {data}, customer: {customer}",
            expected=f"data with customer: {ROLE}, or neither option",
            hint="set the model that plays it in agent.roles.user.engine",
        )
    return AirlineOptions(
        max_steps=max_steps,
        task_types=choose_all(RequestKind, task_types, "airline task type"),
        personas=choose_all(Persona, personas, "airline persona"),
        data=data,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A scenario with its solution."""

    task_id: str
    store: Store
    scenario: Scenario
    gold_key: str
    """Hash of the database after all gold actions."""


class AirlineTasks(NumberedTasks):
    """The tasks of a split.

    Raises:
        UsageError: the split does not exist, or published data cannot be read.
    """

    def __init__(self, split: str, options: AirlineOptions) -> None:
        check_split(split, ENVIRONMENT)
        if options.data is not None:
            if split != TEST:
                raise UsageError("published tasks exist only in the split test", got=f"split {split}", expected=TEST)
            super().__init__(ENVIRONMENT, split, range(len(read_published(options.data))))
        else:
            super().__init__(ENVIRONMENT, split, _numbers(split, options))
        self._options = options

    def _task_fields(self, task_id: str) -> Mapping[str, Any]:
        return {} if self._options.data is not None else {"type": case_of(task_id).scenario.kind.value}


@functools.cache
def _numbers(split: str, options: AirlineOptions) -> Sequence[int]:
    """Return the numbers of a split's tasks with the selected kinds and personas; without a selection, all numbers."""
    numbers = [n for n in range(SIZES[split]) if _KINDS[n % len(_KINDS)] in options.task_types]
    if set(options.personas) == set(Persona):
        return numbers
    return [number for number in numbers if case_of(f"{split}-{number}").scenario.persona in options.personas]


@functools.lru_cache(maxsize=8192)
def case_of(task_id: str) -> Case:
    """Return the case of a task id such as ``valid-17``.

    Raises:
        UsageError: the task does not exist.
    """
    split, number = parse_task_id(task_id, ENVIRONMENT, SIZES.__getitem__)
    random, kind = Random(f"airline task {task_id}"), _KINDS[number % len(_KINDS)]
    store = store_of(split)
    while True:
        scenario = draw_scenario(store, random, kind)
        database = Database(store, {"seen": [scenario.user_id]})
        try:
            for action in scenario.actions:
                getattr(Desk(database), action.name)(**action.arguments)
        except ToolError:
            continue
        return Case(task_id=task_id, store=store, scenario=scenario, gold_key=database.key())


def published_case(task_id: str, folder: str) -> PublishedCase:
    """Return a published task.

    Raises:
        UsageError: the task does not exist.
    """
    found = read_published(folder)
    parse_task_id(task_id, ENVIRONMENT, lambda split: len(found) if split == TEST else 0)
    return found[task_id]
