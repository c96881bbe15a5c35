"""Loading of `verifiers` environments, and tasks from their data."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from agentrl import registry
from agentrl.errors import UsageError
from agentrl.registry import Extra
from agentrl.task import Task

EXTRA = Extra(name="verifiers", module="verifiers")
NAME, TRAIN, TEST = "verifiers", "train", "test"
EVERY = 10
"""Without evaluation data, every tenth row belongs to the test split."""


class VerifiersTasks:
    """The rows of a split as tasks."""

    def __init__(self, split: str, *, environment: str | None = None, **arguments: Any) -> None:
        self.split = split
        self._size = len(rows_of(load(environment, arguments), split))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self._size:
            raise IndexError(index)
        options = {"split": self.split, "row": index}
        return Task(id=f"{self.split}-{index}", environment=NAME, seed=index, options=options)


def rows_of(environment: Any, split: str) -> Sequence[tuple[bool, int]]:
    """Return the place of each row of a split: True for the evaluation data, and the index.

    Raises:
        UsageError: the split is unknown.
    """
    if split not in (TRAIN, TEST):
        raise UsageError("environment verifiers has no split of this name", got=split, expected=f"{TRAIN} or {TEST}")
    if environment.build_eval_dataset() is not None:
        if split == TEST:
            return [(True, index) for index in range(len(environment.get_eval_dataset()))]
        trained = environment.build_dataset()
        return [(False, index) for index in range(len(trained or ()))]
    indices = range(len(environment.get_dataset()))
    return [(False, index) for index in indices if (index % EVERY == EVERY - 1) == (split == TEST)]


def row_at(environment: Any, split: str, index: int) -> Mapping[str, Any]:
    """Return a row of a split; the index is taken modulo the number of rows.

    Raises:
        UsageError: the split is unknown.
    """
    rows = rows_of(environment, split)
    is_evaluation, place = rows[index % len(rows)]
    data = environment.get_eval_dataset() if is_evaluation else environment.get_dataset()
    row: Mapping[str, Any] = data[place]
    return row


def load(environment: str | None, arguments: Mapping[str, Any]) -> Any:
    """Return the environment; equal arguments return the same object, which plays many rollouts at once.

    Raises:
        UsageError: the environment is not installed, cannot be created, or judges whole groups of rollouts.
    """
    if not environment:
        raise UsageError(
            "the option environment of verifiers is not set",
            expected="environment=module:load_environment, or environment=NAME of an installed one",
        )
    return _load(environment, json.dumps(arguments, sort_keys=True))


@functools.lru_cache(maxsize=8)
def _load(reference: str, arguments: str) -> Any:
    verifiers = EXTRA.load()
    if not hasattr(verifiers, "__all__") or "MultiTurnEnv" not in verifiers.__all__:
        raise UsageError(
            "this version of verifiers has no v0 environments",
            got=getattr(verifiers, "__version__", "unknown"),
            expected="0.3.1 or earlier",
            hint='install it: pip install "verifiers==0.3.1"; for tasksets of verifiers.v1, use verifiers_v1',
        )
    make = registry.load(reference) if ":" in reference else functools.partial(verifiers.load_environment, reference)
    with _signal_handlers_kept():
        try:
            made = make(**json.loads(arguments))
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"environment {reference} of verifiers cannot be created", got=error) from error
    if getattr(made, "requires_group_rollouts", False):
        raise UsageError(f"environment {reference} judges groups of rollouts", expected="a reward for each rollout")
    return made


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the process's signal handlers, which an environment of verifiers replaces; in other threads than the
    main one, which may not set handlers, make the attempt do nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        with mock.patch.object(signal, "signal"):
            yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
