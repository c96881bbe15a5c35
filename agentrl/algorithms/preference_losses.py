"""Losses on pairs of trajectories of one task: the better one against the worse one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from agentrl.algorithms.marks import takes
from agentrl.algorithms.ranges import Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePairs:
    """Log-probabilities of trajectories, summed over their sampled tokens, in pairs; all [pairs]."""

    chosen_logp: torch.Tensor
    """log pi of the better one; the gradient flows through it."""
    rejected_logp: torch.Tensor
    """log pi of the worse one; the gradient flows through it."""
    chosen_reference_logp: torch.Tensor
    rejected_reference_logp: torch.Tensor


@takes("pairs of trajectories (PreferencePairs)")
def dpo(pairs: PreferencePairs, *, beta: Positive = 0.1) -> torch.Tensor:
    """-log sigmoid(beta (log pi / pi_ref of the better - that of the worse)): [pairs] (DPO, arXiv 2305.18290)."""
    better = pairs.chosen_logp - pairs.chosen_reference_logp
    worse = pairs.rejected_logp - pairs.rejected_reference_logp
    return -functional.logsigmoid(beta * (better - worse))


@takes("pairs of a demonstration and the previous policy's own trajectory (PreferencePairs)")
def spin(pairs: PreferencePairs, *, beta: Positive = 0.1) -> torch.Tensor:
    """`dpo` of demonstrations against what the previous policy, the reference, did: [pairs] (arXiv 2401.01335)."""
    return dpo(pairs, beta=beta)
