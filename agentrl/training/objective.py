"""The configured algorithm as two functions: advantages of a step, and the loss of some of its tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.algorithms.aggregation import Aggregation, TokenOwners, token_weights
from agentrl.algorithms.correction import Correction, CorrectionMode, correction
from agentrl.algorithms.divergence import KLEstimator, kl_divergence
from agentrl.algorithms.episodes import EpisodeBatch, Estimate
from agentrl.algorithms.loss_input import LossInput, TokenLoss
from agentrl.algorithms.marks import Input, is_advantage_weighted, needed_inputs, requires_group
from agentrl.algorithms.options import check_options
from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import ConfigError, TrainingError
from agentrl.registry import Kind, lookup


PROVIDED = frozenset({Input.COMPONENTS, Input.REFERENCE, Input.ENTROPY})
"""What `agentrl.training.trainer.Trainer` can give to estimators and losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenObjective:
    """The parts of the loss of some tokens; all [tokens]."""

    values: torch.Tensor
    """Policy loss times correction weight, plus KL and entropy terms; carries the gradient."""
    clipped: torch.Tensor
    """Bool: by the policy loss."""
    truncated: torch.Tensor
    """Bool: by the correction."""
    kl: torch.Tensor | None
    """To the reference; ``None`` without one."""


class Objective:
    """Estimator, loss, correction and regularisers of a config, with their options checked.

    Args:
        config: The algorithm.

    Raises:
        ConfigError: an option that the chosen functions do not take, or that conflicts with another, groups of one
            for an estimator that compares members, or functions that need what nobody provides.
        UnknownNameError: no such estimator or loss.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        estimator, loss = lookup(Kind.ADVANTAGE, config.advantage), lookup(Kind.LOSS, config.loss)
        self._config = config
        _check_needs("advantage estimator", config.advantage, estimator)
        _check_needs("loss", config.loss, loss)
        self._estimate: Callable[[EpisodeBatch], torch.Tensor | Estimate] = _bind(estimator, config.advantage_options)
        self._loss: Callable[[LossInput], TokenLoss] = _bind(loss, config.loss_options)
        self._mode = CorrectionMode(config.correction.mode)
        self.compares_groups = requires_group(estimator)
        if self.compares_groups and config.group_size < 2:
            raise ConfigError(
                f"the advantage estimator {config.advantage} compares the members of a group",
                got=f"algorithm.group_size {config.group_size}",
                expected="at least 2",
                hint="reinforce and reinforce++ compare nothing",
            )
        self.drops_tokens = self._mode.drops_tokens
        self.uses_reference = config.kl_coef != 0
        self.uses_entropy = config.entropy_coef != 0
        self.zero_advantage_is_idle = is_advantage_weighted(loss) and not self.uses_reference and not self.uses_entropy
        """A token with an advantage of exactly 0 has no gradient."""

    def advantages(self, episodes: EpisodeBatch) -> torch.Tensor:
        """Advantage of every sampled token: float32 [tokens].

        Raises:
            TrainingError: the estimator gave another shape, or numbers that are not finite.
        """
        found = self._estimate(episodes)
        values = found.advantage if isinstance(found, Estimate) else found
        if values.shape != episodes.token_turn.shape or not bool(values.isfinite().all()):
            raise TrainingError(
                f"the advantage estimator {self._config.advantage} gave unusable numbers",
                got=f"shape {tuple(values.shape)}, {int((~values.isfinite()).sum())} not finite",
                expected=f"{episodes.token_turn.numel()} finite numbers, one for each sampled token",
            )
        return values.float()

    def correction(self, old_logp: torch.Tensor, behaviour_logp: torch.Tensor, sequence: torch.Tensor) -> Correction:
        """Train/inference correction of tokens of whole sequences: see `agentrl.algorithms.correction`."""
        settings = self._config.correction
        return correction(self._mode, old_logp, behaviour_logp, sequence, cap=settings.cap, band=settings.band)

    def weights(self, owners: TokenOwners) -> torch.Tensor:
        """Share of each token in the loss of an optimizer step, from all of its tokens: float64 [tokens]."""
        return token_weights(Aggregation(self._config.aggregation), owners, norm_length=self._config.norm_length)

    def loss(self, tokens: LossInput, entropy: torch.Tensor, reference_logp: torch.Tensor | None) -> TokenObjective:
        """Loss of the tokens of whole sequences, before aggregation."""
        policy = self._loss(tokens)
        corrected = self.correction(tokens.old_logp, tokens.behaviour_logp, tokens.sequence)
        values = policy.values * corrected.weights
        kl = None
        if reference_logp is not None:
            kl = kl_divergence(KLEstimator(self._config.kl_estimator), tokens.logp, reference_logp)
            values = values + self._config.kl_coef * kl
        if self.uses_entropy:
            values = values - self._config.entropy_coef * entropy
        return TokenObjective(values=values, clipped=policy.clipped, truncated=corrected.truncated, kl=kl)


def _check_needs(kind: str, name: str, function: Callable[..., Any]) -> None:
    if missing := sorted(needed_inputs(function) - PROVIDED):
        raise ConfigError(
            f"the {kind} {name} needs what this trainer does not have",
            got=" and ".join(missing),
            expected=f"one without, or {name} called as a function: see docs/algorithms.md",
        )


def _bind(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    return functools.partial(function, **check_options(function, options))
