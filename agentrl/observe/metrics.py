"""Metrics of training steps: computed from trajectories, and stored exactly in ``metrics.jsonl``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentrl.errors import Outcome
from agentrl.observe.files import JsonLinesWriter, numbered_records, warn_damaged
from agentrl.trajectory import REPAIRED_CALLS, SOLE_ROLE, Trajectory, base_role

TIMING_PREFIX = "time/"
"""Prefix of measured times, the only metrics in which two equal runs differ."""

ENVIRONMENT_PREFIX = "env/"
"""Prefix of metrics of one of several environments: ``env/LABEL/success``."""

BIAS_PREFIX = "bias/"
"""Prefix of the differences between the trained episodes and those that were started: ``bias/turns``."""

MARGIN_SUFFIX = "_margin"
"""Suffix of the half-width of the interval that a difference by chance stays in: ``bias/turns_margin``."""

MARGIN_ERRORS = 1.96
"""Number of standard errors in a margin: an interval of 95 %."""

_MAX_STEP = 2**62
_TIMINGS = ("queue", "prefill", "decode", "tool", "env")


class MetricsFile(JsonLinesWriter):
    """Writer of one line per step: ``{"step": 3, "reward/mean": 0.25, …}``. Floats are exact, non-finite ones null."""

    def append_step(self, step: int, values: Mapping[str, float | int]) -> None:
        """Write the metrics of one step.

        Raises:
            UsageError: the disk is full.
        """
        numbers = {name: int(value) if isinstance(value, int) else float(value) for name, value in values.items()}
        self.append({"step": step, **numbers})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the metrics of all steps; none if the file does not exist.

    Damaged lines are skipped with a warning; values that are not numbers, such as null, are left out.
    """
    lines, damaged = [], list[int]()
    for number, record in numbered_records(path, damaged) if path.exists() else ():
        if type(step := record.get("step")) is int and 0 <= step < _MAX_STEP:
            lines.append({key: value for key, value in record.items() if isinstance(value, int | float)})
        else:
            damaged.append(number)
    warn_damaged(path, damaged)
    return lines


def trajectory_metrics(
    trajectories: Sequence[Trajectory], *, version: int, adapters: Mapping[str, int] = MappingProxyType({})
) -> dict[str, float]:
    """Return reward, success, outcomes, lengths, staleness and measured seconds of a step's trajectories.

    Args:
        trajectories: All trajectories of the step, including failed ones; their order determines the last bits of
            means.
        version: Version of the weights at the start of the step.
        adapters: Versions of several adapters, by name.
    """
    trained = [t for t in trajectories if t.is_trainable]
    return {
        "episodes": len(trajectories),
        **_spread("reward", [t.reward for t in trained if t.reward is not None]),
        **mean_metric("success/mean", successes(trained)),
        **_identical(trained),
        **_outcomes(trajectories),
        **_spread("turns", [float(len(t.turns)) for t in trained]),
        **_tokens(trained),
        **_staleness(trained, version, adapters),
        **_counts(trained),
        **_repaired_calls(trained),
        **_roles(trained),
        **_seconds(trajectories),
    }


def successes(trajectories: Iterable[Trajectory]) -> list[float]:
    """Return 1 for each solved episode and 0 for others, without those of environments that never report success.

    An episode that a limit ended has none in many environments; it has failed if others of its environment report it.
    """
    episodes = list(trajectories)
    reporting = {one.environment for one in episodes if one.success is not None}
    return [float(one.success or False) for one in episodes if one.environment in reporting]


@dataclass(slots=True)
class SuccessCounts:
    """Counts of solved and failed episodes by the rule of `successes`, one episode after another."""

    solved: int = 0
    by_environment: Counter[str] = field(default_factory=Counter)
    """Episodes by environment."""
    reporting: set[str] = field(default_factory=set)
    """Environments that have reported success; their other episodes count as failures."""

    @property
    def judged(self) -> int:
        """Number of solved and of failed episodes."""
        return sum(self.by_environment[name] for name in self.reporting)

    def count_success(self, trajectory: Trajectory) -> None:
        """Count an episode without infrastructure failure."""
        self.by_environment[trajectory.environment] += 1
        if trajectory.success is not None:
            self.reporting.add(trajectory.environment)
            self.solved += trajectory.success


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    mean = math.fsum(values) / len(values)
    return {
        f"{name}/mean": mean,
        f"{name}/std": math.hypot(*(value - mean for value in values)) / math.sqrt(max(1, len(values) - 1)),
        f"{name}/min": min(values),
        f"{name}/max": max(values),
    }


def mean_metric(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean of values as a metric; empty without values."""
    return {name: math.fsum(values) / len(values)} if values else {}


def _identical(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of groups with several members whose members all sampled the same tokens."""
    groups: dict[str, list[bytes]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(sampled_bytes(trajectory))
    several = [members for members in groups.values() if len(members) > 1]
    return mean_metric("groups/identical", [float(len(set(members)) == 1) for members in several])


def sampled_bytes(trajectory: Trajectory) -> bytes:
    """Return the sampled tokens of an episode as bytes, for comparisons."""
    return b"".join(sequence.token_ids[sequence.loss_mask].tobytes() + b"|" for sequence in trajectory.sequences)


def _outcomes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    counts = Counter(t.outcome for t in trajectories)
    return {f"outcome/{outcome.value}": counts[outcome] / max(1, len(trajectories)) for outcome in Outcome}


def _tokens(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    totals = [sum(len(s) - s.shared for s in t.sequences) for t in trajectories]
    sampled = [t.sampled_tokens for t in trajectories]
    return {
        "tokens/total": sum(totals),
        "tokens/sampled": sum(sampled),
        **mean_metric("tokens/per_episode", [float(total) for total in totals]),
        **mean_metric("tokens/sampled_per_episode", [float(count) for count in sampled]),
        "tokens/longest_sequence": max((len(s) for t in trajectories for s in t.sequences), default=0),
    }


def _staleness(trajectories: Sequence[Trajectory], version: int, adapters: Mapping[str, int]) -> dict[str, float]:
    ages = [float(age) for t in trajectories if (age := t.staleness(version, adapters)) is not None]
    return {**mean_metric("staleness/mean", ages), "staleness/max": max(ages, default=0.0)}


def _counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return means of the episodes' own metrics (invalid answers, tool calls, …) and reward components."""
    counts = {}
    for name, value in _means(t.metrics for t in trajectories).items():
        if name == REPAIRED_CALLS:
            continue
        counts[f"{TIMING_PREFIX if name.endswith(('_s', 'seconds')) else ''}episode/{name}"] = value
    for name, value in _means(t.reward_components for t in trajectories).items():
        counts[f"reward/component/{name}"] = value
    return counts


def _repaired_calls(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the number of repaired tool calls, if there were tools."""
    counts = [t.metrics[REPAIRED_CALLS] for t in trajectories if REPAIRED_CALLS in t.metrics]
    return {REPAIRED_CALLS: math.fsum(counts)} if counts else {}


def _means(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over all records of each name; a record without the name counts as 0."""
    rows = list(records)
    names = sorted({name for row in rows for name in row})
    return {name: math.fsum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}


def _roles(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the returns and the numbers of turns of each role, in episodes with several agents."""
    spoken: dict[str, list[float]] = {}
    returned: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for role, value in trajectory.role_returns.items():
            returned.setdefault(base_role(role), []).append(value)
        for role, count in Counter(base_role(turn.role) for turn in trajectory.turns).items():
            spoken.setdefault(role, []).append(float(count))
    metrics: dict[str, float] = {}
    for role in sorted(spoken) if spoken.keys() - {SOLE_ROLE} else ():
        returns = _spread(f"role/{role}/return", returned.get(role, []))
        metrics |= {**returns, **mean_metric(f"role/{role}/turns/mean", spoken[role])}
    return metrics


def _seconds(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the seconds and shares of the engine, tools and environments in the episodes."""
    sums = {name: math.fsum(getattr(t.timings, name) for x in trajectories for t in x.turns) for name in _TIMINGS}
    engine = sums["queue"] + sums["prefill"] + sums["decode"]
    whole = engine + sums["tool"] + sums["env"]
    shares = {"engine": engine, "tool": sums["tool"], "environment": sums["env"]}
    return {
        **{f"{TIMING_PREFIX}turns/{name}_s": value for name, value in sums.items()},
        **{f"{TIMING_PREFIX}share/{name}": value / whole if whole else 0.0 for name, value in shares.items()},
    }
