"""Loads environments of `verifiers`, and makes tasks of their data."""

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
"""Where an environment has no evaluation data, every so many-th row is one of the test split."""


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
    """Where the rows of a split are: whether in the evaluation data, and at which index.

    Raises:
        UsageError: no such split.
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
    """A row of a split; an index beyond the last one starts again.

    Raises:
        UsageError: no such split.
    """
    rows = rows_of(environment, split)
    is_evaluation, place = rows[index % len(rows)]
    data = environment.get_eval_dataset() if is_evaluation else environment.get_dataset()
    row: Mapping[str, Any] = data[place]
    return row


def load(environment: str | None, arguments: Mapping[str, Any]) -> Any:
    """The environment; one object for the same arguments, because it is made to play many rollouts at once.

    Raises:
        UsageError: it is not installed, cannot be made, or judges whole groups of rollouts.
    """
    if not environment:
        raise UsageError(
            "no environment of verifiers is named",
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
            expected="0.2",
            hint='install it: pip install "agentrl[verifiers]"',
        )
    make = registry.load(reference) if ":" in reference else functools.partial(verifiers.load_environment, reference)
    with _signal_handlers_kept():
        try:
            made = make(**json.loads(arguments))
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"environment {reference} of verifiers cannot be made", got=error) from error
    if getattr(made, "requires_group_rollouts", False):
        raise UsageError(f"environment {reference} judges groups of rollouts", expected="a reward for each rollout")
    return made


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """An environment of verifiers takes the handlers of the process for itself: they are put back, and in a thread that
    may set none, the attempt comes to nothing.
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
