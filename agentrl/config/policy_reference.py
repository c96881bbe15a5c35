"""The frozen policy that losses and KL compare with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config.section import Section


class ReferenceConfig(Section):
    """Of ``algorithm.kl_coef``, the shaping ``kl``, and losses such as ``sppo``."""

    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3+"
    """Estimator of the KL of ``algorithm.kl_coef``. With a plus it has its own value and the gradient of k2, which is
    an unbiased estimate of the divergence's; the gradient of k3 (GRPO's paper, verl, TRL) is another divergence's."""
    refresh_every: int = Field(0, ge=0)
    """Steps of a round, after which the reference becomes the policy of then: self-play with ``loss: sppo``, or a KL
    that forgets. 0 keeps the policy of the start of the run."""
