"""Diagnosis of a training run: warnings during the run, and its worst problems at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agentrl.errors import SourceLocation
from agentrl.observe.files import replace_file
from agentrl.observe.incidents import Incidents
from agentrl.observe.learning import LearningWatch, learns_nothing
from agentrl.observe.problems import (
    CONSTANT,
    MANY,
    Evidence,
    Problem,
    episode_problems,
    failures,
    reward_problems,
    top_problems,
)
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.signs import SIGNS, Sign, signs
from agentrl.trajectory import Trajectory

FACTOR = 3
"""A lasting problem is reported at its 1st, 3rd, 9th, … step."""
CALM = 10
"""Number of steps without a problem after which its next occurrence counts as the first."""


class Reminder:
    """Schedule of repeated warnings about a lasting problem."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def is_due(self, kind: str, step: int) -> bool:
        """Record that a step shows a problem; return True if it should be reported."""
        if step - self._last.get(kind, step) > CALM:
            self._times.pop(kind, None)
        times = self._times[kind] = self._times.get(kind, 0) + 1
        self._last[kind] = step
        while times % FACTOR == 0:
            times //= FACTOR
        return times == 1


class RunDiagnosis:
    """Diagnosis of a run, updated with every step.

    Args:
        incidents: Counts of failures of rewards, environments and tools.
        definitions: Reward functions by their names in messages; empty if the environment gives the rewards.
        lines: Metrics of earlier steps, for a resumed run.
        learns_from_rewards: True if nothing is learned in a step whose groups do not differ.
    """

    def __init__(
        self,
        incidents: Incidents,
        definitions: Mapping[str, SourceLocation | None],
        lines: Sequence[Mapping[str, Any]] = (),
        *,
        learns_from_rewards: bool = True,
    ) -> None:
        self._incidents, self._definitions = incidents, definitions
        self._lines = list(lines)
        self._learning = LearningWatch() if learns_from_rewards else None
        self._evidence = Evidence()
        self._signs: dict[str, list[tuple[int, Sign]]] = {}
        self._reminder = Reminder()

    def look(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> list[str]:
        """Add a step, and return the warnings that are due.

        Args:
            step: Number of the step.
            metrics: Metrics of the step.
            trajectories: Trajectories of the step.
        """
        self._lines.append({"step": step, **metrics})
        for trajectory in trajectories:
            self._evidence.add(trajectory)
        warnings = []
        for sign in signs(self._lines):
            self._signs.setdefault(sign.kind, []).append((step, sign))
            if self._reminder.is_due(sign.kind, step):
                warnings.append(sign.text)
        rewards = reward_problems(self._evidence, self._definitions)
        constant = next((problem.text for problem in rewards if problem.kind == CONSTANT), None)
        urgent = [*failures(self._incidents), *rewards]
        warnings += [
            problem.text
            for problem in urgent
            if problem.kind != CONSTANT and self._reminder.is_due(f"{problem.kind} {problem.file}", step)
        ]
        idle = None if self._learning is None else self._learning.look(metrics, trajectories, cause=constant)
        return [*warnings, *([] if idle is None else [idle])]

    def problems(self) -> tuple[Problem, ...]:
        """Return the worst problems of the run so far."""
        rewards = reward_problems(self._evidence, self._definitions)
        is_constant = any(problem.kind == CONSTANT for problem in rewards)
        return top_problems(
            [
                *failures(self._incidents),
                *rewards,
                *([] if is_constant else self._idle()),
                *episode_problems(self._evidence),
                *self._seen_signs(),
            ]
        )

    def _idle(self) -> list[Problem]:
        steps = len(self._lines)
        idle = sum(learns_nothing(line) for line in self._lines)
        if self._learning is None or not steps or idle < MANY * steps:
            return []
        return [
            Problem(
                kind="nothing_learned",
                text=f"nothing was learned in {idle} of {steps} steps: all episodes of a task had the same return. "
                f"{self._learning.cause}",
                count=idle,
                of=steps,
                weight=0.5 + 0.4 * idle / steps,
            )
        ]

    def _seen_signs(self) -> list[Problem]:
        return [
            Problem(
                kind=kind,
                text=f"{_when([step for step, _ in seen])}: {seen[-1][1].text}",
                count=len(seen),
                of=len(self._lines),
                weight=0.9 - 0.02 * list(SIGNS).index(kind),
            )
            for kind, seen in self._signs.items()
        ]


def _when(steps: Sequence[int]) -> str:
    """Describe the steps with a sign."""
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, the last one {steps[-1]}"


def save_problems(folder: RunDirectory, problems: Sequence[Problem]) -> None:
    """Write the problems of a run into its folder, unless the folder was moved or removed.

    Raises:
        UsageError: the disk is full.
    """
    if not folder.path.is_dir():
        return
    record = {"problems": [problem.to_json() for problem in problems]}
    replace_file(folder.diagnosis_file, orjson.dumps(record, option=orjson.OPT_INDENT_2))


def read_problems(folder: RunDirectory) -> tuple[Problem, ...]:
    """Read the problems of a run; none if it has not ended."""
    if not folder.diagnosis_file.is_file():
        return ()
    try:
        record = orjson.loads(folder.diagnosis_file.read_bytes())
        return tuple(Problem(**problem) for problem in record["problems"])
    except (orjson.JSONDecodeError, KeyError, TypeError):  # a file of another version, or damaged
        return ()
