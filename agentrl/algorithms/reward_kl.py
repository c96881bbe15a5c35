"""KL to the reference as a part of the reward, with a fixed or an adaptive weight."""

from __future__ import annotations

from typing import Literal

import torch

from agentrl.algorithms.divergence import KLEstimator, kl_divergence
from agentrl.errors import ConfigError

LARGEST_ERROR = 0.2


class RewardKL:
    """r_t -= beta kl_t; adaptive with a target: beta *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon.

    Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593, section 2.2. kl_t is that of the policy that
    sampled, from the engine's own log-probabilities.

    Args:
        coef: beta, at the start.
        estimator: k1, k2 or k3.
        target: KL per token to steer to; beta stays as it is without.
        horizon: Episodes over which beta may change by a fifth.

    Raises:
        ConfigError: a number that is not positive, or a horizon without a target.
    """

    name = "kl"

    def __init__(
        self,
        *,
        coef: float,
        estimator: Literal["k1", "k2", "k3"] = "k1",
        target: float | None = None,
        horizon: float | None = None,
    ) -> None:
        for name, value in {"coef": coef, "target": target, "horizon": horizon}.items():
            if value is not None and not value > 0:
                raise ConfigError(f"shaping {self.name}: {name} is out of range", got=value, expected="above 0")
        if (target is None) != (horizon is None):
            raise ConfigError("shaping kl: target and horizon belong together", expected="both or none")
        self.coef = coef
        self._estimator, self._target, self._horizon = KLEstimator(estimator), target, horizon

    def penalty(self, behaviour_logp: torch.Tensor, reference_logp: torch.Tensor) -> torch.Tensor:
        """-beta kl_t: float64 [tokens]."""
        return -self.coef * self.divergence(behaviour_logp, reference_logp)

    def divergence(self, behaviour_logp: torch.Tensor, reference_logp: torch.Tensor) -> torch.Tensor:
        """kl_t: float64 [tokens]."""
        return kl_divergence(self._estimator, behaviour_logp.double(), reference_logp.double())

    def adapt(self, divergence: float, episodes: int) -> None:
        """Move beta after a step of `episodes` with a mean `divergence` per token."""
        if self._target is None or self._horizon is None:
            return
        error = min(max(divergence / self._target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.coef *= 1 + error * episodes / self._horizon


class TeacherKL(RewardKL):
    """r_t -= coef KL(mu, teacher) at each token: on-policy distillation as a reward (arXiv 2306.13649).

    Args:
        coef: Weight of the divergence; 1 with ``advantage: reinforce`` is the gradient of the reverse KL.
        estimator: k1, k2 or k3.

    Raises:
        ConfigError: the weight is not positive.
    """

    name = "distill"

    def __init__(self, *, coef: float = 1.0, estimator: Literal["k1", "k2", "k3"] = "k1") -> None:
        super().__init__(coef=coef, estimator=estimator)
