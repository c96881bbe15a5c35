"""Metrics of groups by environment, and selection bias: differences between trained and started episodes.

Dropped groups (too stale, or with too few episodes left) bias training if they differ from the others: usually they are
slow, long or hard. Groups that dynamic sampling filters out are ignored, because they are left out on purpose.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from agentrl.observe.metrics import (
    BIAS_PREFIX,
    ENVIRONMENT_PREFIX,
    MARGIN_ERRORS,
    MARGIN_SUFFIX,
    TIMING_PREFIX,
    mean_metric,
    successes,
)
from agentrl.rollout.groups import EXPERT, GREEDY, Group
from agentrl.trajectory import Trajectory

HORIZON = "curriculum/turns"
"""Metric name: maximum number of turns that the horizon allowed in the step."""
WINDOW = 50
"""Number of newest steps that are compared."""


def environment_metrics(groups: Sequence[Group], *, has_signal: Callable[[Group], bool]) -> dict[str, float]:
    """Return success, reward, turns, tokens and horizon by environment; only the horizon if there is one environment.

    `has_signal` returns True if the advantage estimator can distinguish the episodes of a group.
    """
    labels = dict.fromkeys(group.draw.environment for group in groups)
    by_label = {label: [group for group in groups if group.draw.environment == label] for label in labels}
    tokens = sum(_tokens(found) for found in by_label.values())
    metrics = _horizon(HORIZON, groups)
    for label, found in sorted(by_label.items()):
        if label:
            metrics |= _metrics_of_one(f"{ENVIRONMENT_PREFIX}{label}", found, tokens, has_signal)
    return metrics


def extra_rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return success and reward of extra rollouts under ``greedy/`` and ``expert/``."""
    greedy = [group.extra_rollouts[GREEDY] for group in groups if GREEDY in group.extra_rollouts]
    experts = [trajectory for group in groups for trajectory in group.experts]
    return {**_scores(GREEDY, greedy), **_scores(EXPERT, experts)}


def _scores(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    return {
        **mean_metric(f"{name}/success", successes(trajectories)),
        **mean_metric(f"{name}/reward", [t.reward for t in trajectories if t.reward is not None]),
    }


def _metrics_of_one(
    name: str, groups: Sequence[Group], tokens: int, has_signal: Callable[[Group], bool]
) -> dict[str, float]:
    trained = _trainable(groups)
    return {
        f"{name}/groups": float(len(groups)),
        f"{name}/zero_variance": float(sum(not has_signal(group) for group in groups)),
        **_scores(name, trained),
        **mean_metric(f"{name}/turns", [float(len(t.turns)) for t in trained]),
        **mean_metric(f"{name}/tokens", [float(t.sampled_tokens) for t in trained]),
        f"{name}/token_share": _tokens(groups) / tokens if tokens else 0.0,
        **_horizon(f"{name}/horizon", groups),
    }


def _trainable(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trainable]


def _tokens(groups: Sequence[Group]) -> int:
    return sum(trajectory.sampled_tokens for trajectory in _trainable(groups))


def _horizon(name: str, groups: Sequence[Group]) -> dict[str, float]:
    turns = [group.draw.horizon for group in groups if group.draw.horizon is not None]
    return {name: float(max(turns))} if turns else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over the values of episodes: all of them, and those that train.

    Example: episodes of 2 and 4 turns, of which the first trains: ``groups=1, episodes=2, total=6, size=6, squares=20,
    trained=1, trained_total=2``.
    """

    groups: int = 0
    episodes: int = 0
    total: float = 0.0
    size: float = 0.0
    """Sum of absolute values."""
    squares: float = 0.0
    trained: int = 0
    trained_total: float = 0.0

    @classmethod
    def add_up(cls, parts: Sequence[Sums]) -> Sums:
        """Return the sums over the episodes of all parts."""
        return cls(**{name: sum(map(attrgetter(name), parts)) for name in cls.__slots__})

    @property
    def bias(self) -> float:
        """Mean of the trained episodes minus the mean of all, relative to the mean absolute value."""
        if not self.size:
            return 0.0
        return (self.trained_total / self.trained - self.total / self.episodes) / (self.size / self.episodes)

    @property
    def margin(self) -> float:
        """Half-width of the 95 % interval of `bias` if a random choice of groups were trained.

        The variance of the mean of a simple random sample without replacement (Cochran, Sampling Techniques, 1977,
        eq. 2.14), with groups as units, because the episodes of a group resemble one another.
        """
        left_out = self.episodes - self.trained
        if not self.size or not left_out or self.episodes < 2:
            return 0.0
        mean = self.total / self.episodes
        variance = max(0.0, self.squares - mean * self.total) / (self.episodes - 1)
        error = math.sqrt(variance * left_out / (self.trained * self.groups))
        return MARGIN_ERRORS * error / (self.size / self.episodes)


class BiasMeter:
    """Comparison of trained and started episodes over a sliding window of steps.

    Args:
        environments: Labels of the environments; their shares are compared if there are several.
    """

    def __init__(self, environments: Sequence[str]) -> None:
        self._environments = environments if len(environments) > 1 else ()
        self._steps: deque[dict[str, Sums]] = deque(maxlen=WINDOW)
        self._groups: dict[int, dict[str, Sums]] = {}
        """Sums of the current step's groups by position."""

    def add(self, position: int, environment: str, trajectories: Sequence[Trajectory], *, trained: bool) -> None:
        """Add the episodes of a group that has been taken for training, or dropped."""
        ended = [(trajectory, trained and trajectory.is_trainable) for trajectory in trajectories]
        self._groups[position] = {name: _sum_up(values) for name, values in self._values(environment, ended)}

    def _values(
        self, environment: str, ended: Sequence[tuple[Trajectory, bool]]
    ) -> Iterator[tuple[str, list[tuple[float, bool]]]]:
        """Yield the values of a group's episodes by metric; lengths and results only of episodes that did not fail."""
        whole = [(trajectory, trains) for trajectory, trains in ended if trajectory.is_trainable]
        yield f"{BIAS_PREFIX}turns", [(float(len(t.turns)), trains) for t, trains in whole]
        yield f"{TIMING_PREFIX}{BIAS_PREFIX}seconds", [(t.metrics.get("seconds", 0.0), trains) for t, trains in whole]
        yield f"{BIAS_PREFIX}success", [(float(t.success), trains) for t, trains in whole if t.success is not None]
        yield f"{BIAS_PREFIX}reward", [(t.reward, trains) for t, trains in whole if t.reward is not None]
        for label in self._environments:
            share = float(label == environment)
            yield f"{BIAS_PREFIX}{ENVIRONMENT_PREFIX}{label}", [(share, trains) for _, trains in ended]

    def end_step(self) -> None:
        """Close the step of the groups added since the last one; only closed steps are measured."""
        self._steps.append(_merge(self._groups[position] for position in sorted(self._groups)))
        self._groups = {}

    def metrics(self) -> dict[str, float]:
        """Return the bias and its margin by metric name."""
        known = {name: sums for name, sums in sorted(_merge(self._steps).items()) if sums.trained}
        return {
            **{name: sums.bias for name, sums in known.items()},
            **{name + MARGIN_SUFFIX: sums.margin for name, sums in known.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the window's steps and of the current step's groups in plain JSON types."""
        return {
            "steps": [_to_record(step) for step in self._steps],
            "groups": [[position, _to_record(group)] for position, group in self._groups.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._steps.extend(_from_record(step) for step in state["steps"])
        self._groups = {position: _from_record(group) for position, group in state["groups"]}


def _sum_up(values: Sequence[tuple[float, bool]]) -> Sums:
    """Sum the values of a group's episodes, each paired with whether it is trained."""
    trained = [value for value, trains in values if trains]
    return Sums(
        groups=min(1, len(values)),
        episodes=len(values),
        total=math.fsum(value for value, _ in values),
        size=math.fsum(abs(value) for value, _ in values),
        squares=math.fsum(value * value for value, _ in values),
        trained=len(trained),
        trained_total=math.fsum(trained),
    )


def _merge(parts: Iterable[Mapping[str, Sums]]) -> dict[str, Sums]:
    found: dict[str, list[Sums]] = {}
    for part in parts:
        for name, sums in part.items():
            found.setdefault(name, []).append(sums)
    return {name: Sums.add_up(sums) for name, sums in found.items()}


def _to_record(part: Mapping[str, Sums]) -> dict[str, dict[str, float]]:
    return {name: asdict(sums) for name, sums in part.items()}


def _from_record(record: Mapping[str, Mapping[str, Any]]) -> dict[str, Sums]:
    return {name: Sums(**sums) for name, sums in record.items()}
