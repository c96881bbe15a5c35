"""The tasks of the code environment: generated functions, or problems of files.

The checksum of its code decides the split of a generated function, so no two splits share a solution.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from agentrl.errors import UsageError

from ..task_ids import TEST, TRAIN, VALID, NumberedTasks, check_split, parse_task_id
from . import pipelines, tiny
from .dataset import read_problems
from .options import MAX_LEVEL, CodeOptions, Size
from .problem import Problem

ENVIRONMENT = "code"
PLANS = {TRAIN: 2400, VALID: 240, TEST: 240}
"""Number of generated small functions by split; their levels alternate."""
_TENTHS = {TRAIN: range(8), VALID: range(8, 9), TEST: range(9, 10)}


class CodeTasks(NumberedTasks):
    """The tasks of a split that the options allow.

    Raises:
        UsageError: the split does not exist, or its file is not valid.
    """

    def __init__(self, split: str, options: CodeOptions) -> None:
        super().__init__(ENVIRONMENT, split, _numbers(check_split(split, ENVIRONMENT), options))
        self._options = options

    def _task_fields(self, task_id: str) -> Mapping[str, Any]:
        problem = problem_of(task_id, self._options)
        return {"ground_truth": problem.solution, "type": problem.type}


def problem_of(task_id: str, options: CodeOptions) -> Problem:
    """Return the problem of a task id such as ``valid-17``.

    Raises:
        UsageError: the task does not exist.
    """
    split, number = parse_task_id(task_id, ENVIRONMENT, lambda split: _size(split, options))
    if options.files is not None:
        return read_problems(_file(split, options), split, options.shown)[task_id]
    return _generate(task_id, split, number, options.size)


def _size(split: str, options: CodeOptions) -> int:
    """Count the problems of a split, of all levels."""
    if options.files is not None:
        return len(read_problems(_file(split, options), split, options.shown))
    return len(_lines(split) if options.size is Size.TINY else _plans(split))


def _file(split: str, options: CodeOptions) -> str:
    files = options.files or {}
    if split not in files:
        raise UsageError(f"code has no file for split {split}", got=", ".join(files), expected=split)
    return files[split]


@functools.lru_cache(maxsize=8192)
def _generate(task_id: str, split: str, number: int, size: Size) -> Problem:
    if size is Size.TINY:
        return tiny.problem_of(_lines(split)[number], task_id)
    return pipelines.problem_of(_plans(split)[number], task_id)


def _numbers(split: str, options: CodeOptions) -> Sequence[int]:
    """Return the numbers of the tasks of a level."""
    if options.files is not None:
        return range(_size(split, options))
    levels = [item.level for item in (_lines(split) if options.size is Size.TINY else _plans(split))]
    chosen = [number for number, level in enumerate(levels) if options.level in (0, level)]
    if not chosen:
        raise UsageError("no function of this size has this level", got=f"{options.size}, level {options.level}")
    return chosen


def _belongs(text: str, split: str) -> bool:
    return int.from_bytes(_digest(text)) % 10 in _TENTHS[split]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


@functools.cache
def _lines(split: str) -> Sequence[tiny.Line]:
    """Return the tiny functions of a split, in pseudo-random order."""
    own = [line for line in tiny.lines() if _belongs(line.code, split)]
    return sorted(own, key=lambda line: _digest(f"order {line.code}"))


@functools.cache
def _plans(split: str) -> Sequence[pipelines.Plan]:
    """Return the small functions of a split, each once."""
    random, plans = Random(f"code plans {split}"), dict[str, pipelines.Plan]()
    while len(plans) < PLANS[split]:
        plan = pipelines.draw_plan(random, 1 + len(plans) % MAX_LEVEL)
        code = plan.solution
        if _belongs(code, split) and code not in plans and pipelines.is_varied(plan):
            plans[code] = plan
    return list(plans.values())
