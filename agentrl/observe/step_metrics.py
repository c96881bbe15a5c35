"""The numbers of one training step that follow from its trajectories."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from agentrl.errors import Outcome
from agentrl.observe.metrics import TIMING_PREFIX
from agentrl.trajectory import Trajectory

_TIMINGS = ("queue", "prefill", "decode", "tool", "env")


def trajectory_metrics(trajectories: Sequence[Trajectory], *, version: int) -> dict[str, float]:
    """Reward, success, outcomes, lengths, staleness and measured seconds of a step's trajectories.

    Args:
        trajectories: Everything that was delivered for the step, failed episodes too; their order decides the last
            bits of means.
        version: Version of the weights that the step starts from.
    """
    trained = [t for t in trajectories if t.outcome is not None and t.outcome.is_trainable and t.reward is not None]
    return {
        "episodes": len(trajectories),
        **_spread("reward", [t.reward for t in trained if t.reward is not None]),
        **_mean("success/mean", [float(t.success) for t in trained if t.success is not None]),
        **_outcomes(trajectories),
        **_spread("turns", [float(len(t.turns)) for t in trained]),
        **_tokens(trained),
        **_staleness(trained, version),
        **_counts(trained),
        **_seconds(trajectories),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return {
        f"{name}/mean": mean,
        f"{name}/std": math.sqrt(variance),
        f"{name}/min": min(values),
        f"{name}/max": max(values),
    }


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: math.fsum(values) / len(values)} if values else {}


def _outcomes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    counts = Counter(t.outcome for t in trajectories)
    return {f"outcome/{outcome.value}": counts[outcome] / max(1, len(trajectories)) for outcome in Outcome}


def _tokens(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    totals = [sum(len(s) - s.shared for s in t.sequences) for t in trajectories]
    sampled = [t.sampled_tokens for t in trajectories]
    return {
        "tokens/total": sum(totals),
        "tokens/sampled": sum(sampled),
        **_mean("tokens/per_episode", [float(total) for total in totals]),
        **_mean("tokens/sampled_per_episode", [float(count) for count in sampled]),
        "tokens/longest_sequence": max((len(s) for t in trajectories for s in t.sequences), default=0),
    }


def _staleness(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    ages = [float(version - oldest) for t in trajectories if (oldest := t.oldest_version) is not None]
    return {**_mean("staleness/mean", ages), "staleness/max": max(ages, default=0.0)}


def _counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means of what episodes counted themselves (invalid answers, tool calls, …)."""
    return {
        f"{TIMING_PREFIX if _is_time(name) else ''}episode/{name}": value
        for name, value in _means(t.metrics for t in trajectories).items()
    } | {f"reward/component/{name}": value for name, value in _means(t.reward_components for t in trajectories).items()}


def _means(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean over all records of every name; a record without it counts as 0."""
    rows = list(records)
    names = sorted({name for row in rows for name in row})
    return {name: math.fsum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}


def _is_time(name: str) -> bool:
    return name.endswith(("_s", "seconds"))


def _seconds(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Seconds that episodes spent on the engine, on tools and in the environment, and the shares of them."""
    sums = {name: math.fsum(getattr(t.timings, name) for x in trajectories for t in x.turns) for name in _TIMINGS}
    engine = sums["queue"] + sums["prefill"] + sums["decode"]
    whole = engine + sums["tool"] + sums["env"]
    shares = {"engine": engine, "tool": sums["tool"], "environment": sums["env"]}
    return {
        **{f"{TIMING_PREFIX}turns/{name}_s": value for name, value in sums.items()},
        **{f"{TIMING_PREFIX}share/{name}": value / whole if whole else 0.0 for name, value in shares.items()},
    }
