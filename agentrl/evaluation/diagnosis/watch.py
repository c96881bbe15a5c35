"""Diagnosis that follows a run step by step: its warnings, and its findings at any time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from agentrl.evaluation.diagnosis.finding import Finding, rank
from agentrl.evaluation.diagnosis.policy import has_risen
from agentrl.evaluation.diagnosis.rules import apply_rules
from agentrl.evaluation.diagnosis.summary import RunSummary
from agentrl.observe.files import replace_file
from agentrl.observe.run_folder import RunDirectory
from agentrl.trajectory import Trajectory

LASTING = 3
"""A problem of fewer steps than this has passed when it has been away for as many."""
PASSED = 0.6
"""Factor of the weight of a problem that a run has overcome."""
CALM = 10
"""Number of steps without a problem after which its next occurrence counts as the first."""
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


class Reminder:
    """Record of the problems that warnings have told: a lasting one is told once, and again when it has returned."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def is_due(self, kind: str, step: int) -> bool:
        """Record that a step shows a problem; return True if it should be reported."""
        before = self._last.get(kind)
        self._last[kind] = step
        return before is None or step - before > CALM


def _kind_of(warning: str) -> str:
    """Return a warning without its numbers, which is the same at every step."""
    return _NUMBER.sub("#", warning)


class RunDiagnosis:
    """Diagnosis of a run, updated with every step.

    Args:
        run: Summary of the run, which receives the steps.
        lines: Metrics of earlier steps, for a resumed run.
    """

    def __init__(self, run: RunSummary, lines: Sequence[Mapping[str, Any]] = ()) -> None:
        self.run = run
        self.run.lines.extend(lines)
        self._seen: dict[str, list[tuple[int, Finding]]] = {}
        self._reminder = Reminder()

    def add_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        trajectories: Sequence[Trajectory],
        warnings: Sequence[str] = (),
    ) -> list[str]:
        """Add a step, and return the warnings that are due, each problem once: the trainer's, then the root cause.

        Args:
            step: Number of the step.
            metrics: Metrics of the step.
            trajectories: Trajectories of the step.
            warnings: The trainer's warnings about the step.
        """
        found = self.record_step(step, metrics, trajectories)
        whole = list(apply_rules(self.run, of_newest_step=False))
        found += [finding for rule, finding in whole if rule.warns and finding.is_current]
        others = [finding for rule, finding in whole if not rule.warns]
        ranked, kinds = rank([*found, *others]), {finding.kind for finding in found}
        causes = {one.kind: one for one in reversed(ranked) if one.kind not in kinds}
        due = [one for one in ranked if one.kind in kinds and self._reminder.is_due(f"{one.kind} {one.file}", step)]
        told = [warning for warning in warnings if self._reminder.is_due(_kind_of(warning), step)]
        return [*told, *(_warning(finding, _root_cause(finding, causes)) for finding in due)]

    def record_step(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> list[Finding]:
        """Add a step, and return what the rules that look at the newest step find, if they warn."""
        self.run.add_step({"step": step, **metrics}, trajectories)
        found = []
        for rule, finding in apply_rules(self.run, of_newest_step=True):
            self._seen.setdefault(finding.kind, []).append((step, finding))
            found += [finding] if rule.warns else []
        return found

    def findings(self) -> tuple[Finding, ...]:
        """Return everything that is wrong with the run so far, ranked."""
        whole = [finding for _, finding in apply_rules(self.run, of_newest_step=False)]
        return rank([*whole, *self._seen_findings()])

    def _seen_findings(self) -> list[Finding]:
        found = (self._seen_finding(*zip(*seen, strict=True)) for seen in self._seen.values())
        return [finding for finding in found if finding is not None]

    def _seen_finding(self, steps: Sequence[int], findings: Sequence[Finding]) -> Finding | None:
        """Join the findings of a kind; those that have passed weigh less, or nothing if success has risen."""
        last, now = findings[-1], self.run.lines[-1]["step"]
        has_passed = len(steps) < LASTING and now - steps[-1] >= LASTING
        if has_passed and has_risen(self.run.lines, "success/mean"):
            return None
        return replace(
            last,
            sentence=f"{_when(steps)}: {last.sentence}",
            count=len(steps),
            of=len(self.run.lines),
            weight=last.weight * (PASSED if has_passed else 1.0),
        )


def _root_cause(finding: Finding, causes: Mapping[str, Finding]) -> Finding | None:
    """Return the first cause in a chain of explanations, as far as `causes` has them; a chain may be a circle."""
    found: dict[str, Finding] = {}
    while (cause := causes.get(finding.because_of or "")) is not None and cause.kind not in found:
        finding = found[cause.kind] = cause
    return finding if found else None


def _warning(finding: Finding, cause: Finding | None) -> str:
    """Return the text of a warning, with the finding that explains it and is not a warning of its own."""
    if cause is None:
        return finding.text
    return f"{finding.sentence}. {cause.text[:1].upper()}{cause.text[1:]}"


def _when(steps: Sequence[int]) -> str:
    """Describe the steps with a sign."""
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, the last one {steps[-1]}"


def save_findings(folder: RunDirectory, findings: Sequence[Finding]) -> None:
    """Write the findings of a run into its folder, unless the folder was moved or removed.

    Raises:
        UsageError: the disk is full.
    """
    if not folder.path.is_dir():
        return
    record = {"problems": [finding.to_json() for finding in findings]}
    replace_file(folder.diagnosis_file, orjson.dumps(record, option=orjson.OPT_INDENT_2))


def read_findings(folder: RunDirectory) -> tuple[Finding, ...]:
    """Read the findings that a run wrote at its end; none if it has not ended."""
    if not folder.diagnosis_file.is_file():
        return ()
    try:
        record = orjson.loads(folder.diagnosis_file.read_bytes())
        return tuple(Finding.from_json(finding) for finding in record["problems"])
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):  # a file of another version, or damaged
        return ()
