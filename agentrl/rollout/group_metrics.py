"""The numbers of a training step that follow from its groups: of each environment, and of the horizon."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentrl.observe.metrics import ENVIRONMENT_PREFIX
from agentrl.rollout.group import EXPERT, GREEDY, Group
from agentrl.trajectory import Trajectory

HORIZON = "curriculum/turns"
"""The most turns that an episode of the step could have, where a horizon grows."""


def environment_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Success, return, turns, tokens and horizon, for each environment of several; the horizon alone for one.

    Args:
        groups: Of one training step, complete; their order decides the last bits of means.
    """
    labels = dict.fromkeys(group.draw.environment for group in groups)
    by_label = {label: [group for group in groups if group.draw.environment == label] for label in labels}
    tokens = sum(_tokens(found) for found in by_label.values())
    metrics = _horizon(HORIZON, groups)
    for label, found in sorted(by_label.items()):
        if label:
            metrics |= _of_one(f"{ENVIRONMENT_PREFIX}{label}", found, tokens)
    return metrics


def companion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return and success of who played beside the members: ``greedy/``, ``expert/``; nothing where nobody did."""
    greedy = [group.beside[GREEDY] for group in groups if GREEDY in group.beside]
    experts = [trajectory for group in groups for trajectory in group.experts]
    return {**_played(GREEDY, greedy), **_played(EXPERT, experts)}


def _played(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    return {
        **_mean(f"{name}/success", [float(t.success) for t in trajectories if t.success is not None]),
        **_mean(f"{name}/reward", [t.reward for t in trajectories if t.reward is not None]),
    }


def _of_one(name: str, groups: Sequence[Group], tokens: int) -> dict[str, float]:
    trained = _trained(groups)
    return {
        f"{name}/groups": float(len(groups)),
        f"{name}/zero_variance": sum(not group.returns_differ for group in groups) / len(groups),
        **_mean(f"{name}/success", [float(t.success) for t in trained if t.success is not None]),
        **_mean(f"{name}/reward", [t.reward for t in trained if t.reward is not None]),
        **_mean(f"{name}/turns", [float(len(t.turns)) for t in trained]),
        **_mean(f"{name}/tokens", [float(t.sampled_tokens) for t in trained]),
        f"{name}/token_share": _tokens(groups) / tokens if tokens else 0.0,
        **_horizon(f"{name}/horizon", groups),
    }


def _trained(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trainable]


def _tokens(groups: Sequence[Group]) -> int:
    return sum(trajectory.sampled_tokens for trajectory in _trained(groups))


def _horizon(name: str, groups: Sequence[Group]) -> dict[str, float]:
    turns = [group.draw.horizon for group in groups if group.draw.horizon is not None]
    return {name: float(max(turns))} if turns else {}


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: math.fsum(values) / len(values)} if values else {}
