"""The tasks and their splits: the goal of each task id.

WebShop's published splits: the first 500 goals, in the shop's order, are for tests, the next 1,000 (or the option
``valid_goals``) for validation, the rest for training. The test split has at most a sixth of all goals, the validation
split at most a third.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl.errors import UsageError
from agentrl.task import Task

from ..task_ids import parse_task_id
from .goals import Goals
from .options import VALID_GOALS, ShopOptions
from .shop import CatalogueSource, open_shop

ENVIRONMENT = "webshop"
TRAIN, VALID, TEST = SPLITS = ("train", "valid", "test")
TEST_GOALS = 500
RESET_OPTIONS = ("task_id", "goal")


def source_of(options: ShopOptions) -> CatalogueSource:
    """Return the source of the catalogue for the options."""
    return CatalogueSource(data=options.data, products=options.products)


@functools.lru_cache(maxsize=64)
def split_goals(split: str, goals: int, valid_goals: int = VALID_GOALS) -> range:
    """Return the goals of a split by number.

    Args:
        split: Name of the split.
        goals: Total number of goals.
        valid_goals: Number of goals for validation.

    Raises:
        UsageError: the split does not exist.
    """
    test = min(TEST_GOALS, goals // 6)
    valid = test + min(valid_goals, goals // 3)
    ranges = {TEST: range(test), VALID: range(test, valid), TRAIN: range(valid, goals)}
    if split not in ranges:
        raise UsageError("environment webshop has no split of this name", got=split, expected=" or ".join(SPLITS))
    return ranges[split]


def goal_number(task_id: str, goals: int, valid_goals: int = VALID_GOALS) -> int:
    """Return the number of the goal of a task id such as ``valid-17``.

    Args:
        task_id: Split and number within the split.
        goals: Total number of goals.
        valid_goals: Number of goals for validation.

    Raises:
        UsageError: the task does not exist.
    """
    split, number = parse_task_id(task_id, ENVIRONMENT, lambda split: len(split_goals(split, goals, valid_goals)))
    return split_goals(split, goals, valid_goals)[number]


def chosen_goal(options: Mapping[str, Any], goals: int, valid_goals: int = VALID_GOALS) -> int | None:
    """Return the number of the goal in the options of a reset; ``None`` if they have none.

    Args:
        options: ``task_id``, or ``goal``, or none.
        goals: Total number of goals.
        valid_goals: Number of goals for validation.

    Raises:
        UsageError: an option is unknown, or the goal does not exist.
    """
    if len(options) > 1 or not options.keys() <= set(RESET_OPTIONS):
        raise UsageError(
            "webshop cannot reset with these options", got=", ".join(options), expected="task_id, or goal, or none"
        )
    if "task_id" in options:
        return goal_number(options["task_id"], goals, valid_goals)
    if "goal" not in options:
        return None
    if not 0 <= options["goal"] < goals:
        raise UsageError("no such webshop goal", got=options["goal"], expected=f"0 to {goals - 1}")
    return int(options["goal"])


def draw_goal(goals: Goals, seed: int, valid_goals: int = VALID_GOALS) -> int:
    """Draw the number of a training goal by weight."""
    train = split_goals(TRAIN, len(goals), valid_goals)
    sums = np.cumsum(goals.weights[train.start :])
    share = random.Random(f"goal {seed}").random()
    return train[min(int(np.searchsorted(sums, share * sums[-1], side="right")), len(train) - 1)]


class WebShopTasks:
    """The tasks of a split.

    Raises:
        UsageError: the split does not exist, or the catalogue has no goals for it.
    """

    def __init__(self, split: str, options: ShopOptions) -> None:
        self._shop = open_shop(source_of(options))
        self._goals = self._shop.goals(options.goals)
        self._split = split
        self._range = split_goals(split, len(self._goals), options.valid_goals)
        if not self._range:
            raise UsageError(
                f"webshop/{split} contains no task",
                got=f"{len(self._goals)} {options.goals} goals",
                hint="use a larger catalogue, the other kind of goals, or more valid_goals",
            )

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int) -> Task:
        number = self._range[index]
        task_id = f"{self._split}-{index}"
        return Task(
            id=task_id,
            environment=ENVIRONMENT,
            seed=number,
            options={"task_id": task_id},
            type=self._shop.goal(self._goals, number).category,
        )
