"""The updates of a training step: epochs and mini-batches, of the policy and of a critic, until the policy is far off.

The KL of the policy to that of the start of the step is measured on each mini-batch before its update. Above a limit
that update and those after it are left out; a critic with a model of its own takes them all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from agentrl.training.critic.step import CriticStep
from agentrl.training.gradient_pass import GradientPass
from agentrl.training.numerics.watch import WatchedUpdates
from agentrl.training.optimizer import Update


@dataclass(slots=True)
class StepUpdates:
    """What the updates of a step were."""

    updates: list[Update] = field(default_factory=list)
    """Of the policy, in order."""
    losses: list[float] = field(default_factory=list)
    """Of the policy, before each update; also before one that was left out."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the critic and of the limit, under their final names."""


def take_updates(
    parts: Sequence[list[int]],
    watched: WatchedUpdates,
    model: PreTrainedModel,
    *,
    critic: CriticStep | None,
    max_kl: float | None,
) -> StepUpdates:
    """Train the policy, and the critic if there is one.

    Args:
        parts: The sequences of every update.
        watched: Adds up the policy's gradients, and applies them.
        model: The policy.
        critic: Learns from the same parts.
        max_kl: The limit; ``None`` sets none.
    """
    taken, stopped = StepUpdates(), False
    for part in parts:
        if critic is not None and not (stopped and critic.joins_policy):
            critic.accumulate(part)
        if not stopped:
            taken.losses.append(watched.accumulate(part))
            stopped = max_kl is not None and watched.kl_old > max_kl
            if not stopped:
                taken.updates.append(watched.apply())
            else:
                model.zero_grad(set_to_none=True)
                taken.metrics["train/kl_stop"] = watched.kl_old
        if critic is not None and not (stopped and critic.joins_policy):
            critic.update()
        elif critic is not None:
            critic.leave_out()
    if max_kl is not None:
        taken.metrics["train/updates_left_out"] = float(len(parts) - len(taken.updates))
    if critic is not None:
        taken.metrics |= critic.metrics()
    return taken


def pretrain_critic(parts: Sequence[list[int]], gradient: GradientPass, critic: CriticStep) -> StepUpdates:
    """Train the critic alone; the policy is measured, and stays as it is.

    Args:
        parts: The sequences of every update.
        gradient: Of a policy that does not learn.
        critic: Learns from the parts.
    """
    everything = sorted({sequence for part in parts for sequence in part})
    taken = StepUpdates(losses=[gradient.accumulate(everything)])
    for part in parts:
        critic.accumulate(part)
        critic.update()
    taken.metrics |= critic.metrics()
    return taken
