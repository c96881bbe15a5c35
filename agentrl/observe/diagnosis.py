"""Diagnosis of a training run: signs of failing training in the newest steps, and its worst problems at its end.

sign              condition on the newest step
----------------  -------------------------------------------------------------------------------------------
entropy_rises     entropy is at least `RISE` times the lowest of the last five steps
entropy_falls     entropy is at most a third of the highest of the last five steps, and success has not risen
members_alike     the members of most groups give the same answers, token by token
groups_alike      returns no longer differ within groups, for two steps or after a jump in entropy
gradient_jumps    the gradient is over `SPIKE` times the median of earlier steps, too few for the trainer's alarm
trains_selection  trained episodes differ from started ones by over `BIASED`, and by more than chance explains
success_falls     success is significantly lower, but the reward significantly higher than in the first steps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeAlias

import orjson

from agentrl.errors import SourceLocation
from agentrl.observe.files import replace_file
from agentrl.observe.incidents import Incidents
from agentrl.observe.learning import LearningWatch, learns_nothing, share_that_differs
from agentrl.observe.metrics import BIAS_PREFIX, MARGIN_ERRORS, MARGIN_SUFFIX, TIMING_PREFIX
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
from agentrl.trajectory import Trajectory

Line: TypeAlias = Mapping[str, Any]
"""Metrics of a step."""
BACK = 5
"""Number of earlier steps with which the newest one is compared."""
RISE, FALL = 3.0, 1 / 3
LEAST_CHANGE = 0.5
"""Minimum change of the entropy, in nats; small entropies change by large factors without a problem."""
ALIKE = 0.5
"""Minimum share of groups with identical members for a sign."""
SOLVED = 0.95
"""Success rate from which groups with identical members are expected."""
SPIKE = 20.0
EARLY_NORMS = (2, 8)
"""Range of the number of earlier gradient norms for this check; with more norms, the trainer's alarm takes over."""
WINDOW = 5
"""Number of steps whose mean success and reward are compared."""
CERTAIN = 3.0
"""Minimum difference of two windows, in standard errors, that counts as certain."""
BIASED = 0.03
"""Minimum relative difference between trained and started episodes for a sign."""
LOWER_RATE = "lower trainer.learning_rate{rate} or add a warm-up (trainer.warmup_steps)"
FACTOR = 3
"""A lasting problem is reported at its 1st, 3rd, 9th, … step."""
CALM = 10
"""Number of steps without a problem after which its next occurrence counts as the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A sign of failing training in the newest step."""

    kind: str
    text: str


def signs(lines: Sequence[Line]) -> list[Sign]:
    """Return the signs in the newest step; `lines` are in order, the newest last."""
    if not lines:
        return []
    return [Sign(kind=kind, text=text) for kind, detect in SIGNS.items() if (text := detect(lines)) is not None]


def _recent(lines: Sequence[Line], name: str) -> list[float]:
    """Return the known values of at most `BACK` earlier steps and the newest one; empty if the newest is unknown."""
    now = _value(lines[-1], name)
    if now is None:
        return []
    before = [value for line in lines[-BACK - 1 : -1] if (value := _value(line, name)) is not None]
    return [*before, now]


def _value(line: Line, name: str) -> float | None:
    value = line.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def _lower_rate(line: Line) -> str:
    rate = _value(line, "train/learning_rate")
    return LOWER_RATE.format(rate="" if rate is None else f" (now {rate:g})")


def _success_change(lines: Sequence[Line], back: int) -> str:
    """Describe the change of success over some steps, if it has fallen."""
    now, before = _value(lines[-1], "success/mean"), _value(lines[-1 - back], "success/mean")
    if now is None or before is None or now >= before:
        return ""
    return f", and success fell from {before:.0%} to {now:.0%}"


def _entropy_rises(lines: Sequence[Line]) -> str | None:
    values = _recent(lines, "train/entropy")
    if len(values) < 2:
        return None
    now, lowest = values[-1], min(values[:-1])
    if now < RISE * lowest or now - lowest < LEAST_CHANGE:
        return None
    back = len(values) - 1 - max(i for i, value in enumerate(values[:-1]) if value == lowest)
    times = f"{now / lowest:.1f}-fold" if lowest > 0 else "from 0"
    return (
        f"entropy rose {times} within {_steps(back)} (train/entropy {lowest:.3g} to {now:.3g})"
        f"{_success_change(lines, min(back, len(lines) - 1))}: {_lower_rate(lines[-1])}"
    )


def _entropy_falls(lines: Sequence[Line]) -> str | None:
    values = _recent(lines, "train/entropy")
    if len(values) < 2:
        return None
    now, highest = values[-1], max(values[:-1])
    if now > FALL * highest or highest - now < LEAST_CHANGE:
        return None
    back = len(values) - 1 - max(i for i, value in enumerate(values[:-1]) if value == highest)
    success, before = _value(lines[-1], "success/mean"), _value(lines[max(-len(lines), -1 - back)], "success/mean")
    if success is not None and before is not None and success > before:
        return None
    return (
        f"entropy fell to {now / highest:.0%} within {_steps(back)} (train/entropy {highest:.3g} to {now:.3g}) and "
        f"success did not rise: the policy is collapsing to a few answers; {_lower_rate(lines[-1])}, or set "
        "algorithm.entropy_coef or algorithm.loss_options.clip_high"
    )


def _members_alike(lines: Sequence[Line]) -> str | None:
    now = lines[-1]
    share, success = _value(now, "groups/identical"), _value(now, "success/mean")
    if share is None or share < ALIKE or (success is not None and success >= SOLVED):
        return None
    return (
        f"in {share:.0%} of the groups all members gave the same answers, token by token, so there is nothing to "
        f"compare: {_lower_rate(now)}, raise sampling.temperature, or go back to an earlier checkpoint"
    )


def _groups_alike(lines: Sequence[Line]) -> str | None:
    shares = [share for line in lines[-BACK - 2 :] if (share := share_that_differs(line)) is not None]
    if len(shares) < 3 or shares[-1] > 0:
        return None
    jumped = any(_entropy_rises(lines[: len(lines) - i]) for i in range(min(BACK, len(lines) - 1)))
    before = fmean(shares[:-2] if not jumped else shares[:-1])
    if (shares[-2] > 0 and not jumped) or before < ALIKE / 2:
        return None
    return (
        f"returns no longer differ within groups: in every group all were equal, while {before:.0%} of the groups "
        f"differed a few steps ago{_success_change(lines, min(BACK, len(lines) - 1))}; {_lower_rate(lines[-1])}"
    )


def _gradient_jumps(lines: Sequence[Line]) -> str | None:
    norms = [norm for line in lines if (norm := _value(line, "train/grad_norm"))]
    now, (least, most) = _value(lines[-1], "train/grad_norm"), EARLY_NORMS
    if now is None or not least <= len(norms) - 1 < most:
        return None
    usual = median(norms[:-1])
    if now <= SPIKE * usual:
        return None
    return (
        f"the gradient is {now / usual:.0f} times as large as before (train/grad_norm {usual:.3g} to {now:.3g}): "
        f"{_lower_rate(lines[-1])}, or trainer.max_grad_norm"
    )


def _success_falls(lines: Sequence[Line]) -> str | None:
    """Compare the first steps with the newest ones, by the standard deviations within steps."""
    known = [
        line for line in lines if _value(line, "success/mean") is not None and _value(line, "reward/mean") is not None
    ]
    window = min(WINDOW, len(known) // 2)
    if window < 2:
        return None
    first, last = known[:window], known[-window:]
    success, reward = _change(first, last, "success/mean"), _change(first, last, "reward/mean")
    success_error = math.sqrt(sum(_success_error(part) for part in (first, last)))
    reward_error = math.sqrt(sum(_reward_error(part) for part in (first, last)))
    if success > -CERTAIN * success_error or reward < CERTAIN * reward_error or not success or not reward:
        return None
    before, now = _mean(first, "success/mean"), _mean(last, "success/mean")
    return (
        f"success fell from {before:.0%} to {now:.0%} while the reward rose from {_mean(first, 'reward/mean'):.3g} to "
        f"{_mean(last, 'reward/mean'):.3g}: the reward depends on something other than success, or its sign is wrong"
    )


def _trains_selection(lines: Sequence[Line]) -> str | None:
    now = lines[-1]
    found = []
    for name in sorted(now):
        quantity = name.removeprefix(TIMING_PREFIX)
        bias, margin = _value(now, name), _value(now, name + MARGIN_SUFFIX)
        if not quantity.startswith(BIAS_PREFIX) or bias is None or margin is None:
            continue
        if abs(bias) >= max(BIASED, CERTAIN / MARGIN_ERRORS * margin):
            found.append(f"{bias:+.0%} {quantity.removeprefix(BIAS_PREFIX)} (chance alone: ±{margin:.0%})")
    if not found:
        return None
    stale = any(_value(line, "rollout/groups_stale") for line in lines)
    remedy = (
        "slow groups are too stale when they end: set rollout.batch_order=windowed, or raise rollout.max_staleness"
        if stale
        else "groups fail (rollout/groups_failed): look at the failed episodes with: agentrl view"
    )
    return f"the trained episodes are not like those that were started: {', '.join(found)}; {remedy}"


def _mean(lines: Sequence[Line], name: str) -> float:
    return fmean(float(line[name]) for line in lines)


def _change(first: Sequence[Line], last: Sequence[Line], name: str) -> float:
    return _mean(last, name) - _mean(first, name)


def _episodes(line: Line) -> float:
    return max(1.0, _value(line, "episodes") or 1.0)


def _success_error(lines: Sequence[Line]) -> float:
    """Return the squared standard error of the mean success, with one success and one failure added."""
    episodes = sum(map(_episodes, lines))
    share = (_mean(lines, "success/mean") * episodes + 1) / (episodes + 2)
    return share * (1 - share) / episodes


def _reward_error(lines: Sequence[Line]) -> float:
    """Return the squared standard error of the mean reward."""
    return fmean((_value(line, "reward/std") or 0.0) ** 2 for line in lines) / sum(map(_episodes, lines))


def _steps(count: int) -> str:
    return "one step" if count == 1 else f"{count} steps"


SIGNS: Mapping[str, Callable[[Sequence[Line]], str | None]] = {
    "success_falls": _success_falls,
    "entropy_rises": _entropy_rises,
    "entropy_falls": _entropy_falls,
    "members_alike": _members_alike,
    "groups_alike": _groups_alike,
    "gradient_jumps": _gradient_jumps,
    "trains_selection": _trains_selection,
}


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

    def add_step(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> list[str]:
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
        idle = None if self._learning is None else self._learning.add_step(metrics, trajectories, cause=constant)
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
