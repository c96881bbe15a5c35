"""The configured algorithm as functions: advantages of a step, which tokens train, and the loss of some of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from agentrl.algorithms.aggregation import Aggregation, TokenOwners, token_weights
from agentrl.algorithms.correction import Correction, CorrectionMode, correction
from agentrl.algorithms.divergence import KLEstimator, kl_divergence
from agentrl.algorithms.episodes import EpisodeBatch, Estimate
from agentrl.algorithms.loss_input import LossInput, TokenLoss
from agentrl.algorithms.marks import (
    Input,
    choice_of,
    is_advantage_weighted,
    is_blind_to_advantage,
    needed_inputs,
    requires_group,
)
from agentrl.algorithms.options import check_options
from agentrl.config.policy_reference import ReferenceConfig
from agentrl.config.schema import AlgorithmConfig
from agentrl.registry import Kind, lookup
from agentrl.training.named_functions import bind, check_advantage, check_kept, check_loss_values
from agentrl.training.objective_checks import check_estimator, check_loss, check_needs, check_proximal
from agentrl.training.step.guide_checks import check_guides


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenObjective:
    """The parts of the loss of the tokens that train; all [tokens]."""

    values: torch.Tensor
    """Policy loss times correction weight, plus KL and entropy terms; carries the gradient."""
    clipped: torch.Tensor
    """Bool: by the policy loss."""
    truncated: torch.Tensor
    """Bool: the correction's weight reached its cap."""
    kl: torch.Tensor | None
    """To the reference; ``None`` without ``kl_coef``."""


def learns_from_rewards(config: AlgorithmConfig) -> bool:
    """Return True if a run learns from differences in returns only: no teacher, and a loss that reads advantages."""
    return config.teacher is None and not is_blind_to_advantage(lookup(Kind.LOSS, config.loss))


class Objective:
    """Estimator, loss, correction, filters and regularisers of a config, with their options checked.

    Args:
        config: The algorithm.
        shared_critic: The policy's passes also compute the loss of a critic.

    Raises:
        ConfigError: an option that the chosen functions do not take, or that conflicts with another, or that another
            part would ignore; functions that need what the trainer does not have.
        UnknownNameError: no such estimator, loss or filter.
    """

    def __init__(self, config: AlgorithmConfig, *, shared_critic: bool = False) -> None:
        estimator, loss = lookup(Kind.ADVANTAGE, config.advantage), lookup(Kind.LOSS, config.loss)
        filters = {name: lookup(Kind.FILTER, name) for name in config.filters}
        check_estimator(config, estimator)
        check_loss(config, loss)
        check_proximal(config, loss, filters.values())
        check_guides(config, loss)
        for name, function in filters.items():
            check_needs("filter", name, function)
        self._config = config
        self._estimate: Callable[[EpisodeBatch], torch.Tensor | Estimate] = bind(
            "advantage estimator", config.advantage, estimator, config.advantage_options
        )
        self._loss: Callable[[LossInput], TokenLoss] = bind("loss", config.loss, loss, config.loss_options)
        self._filters: dict[str, Callable[[LossInput], torch.Tensor]] = {
            name: bind("filter", name, function, config.filters[name]) for name, function in filters.items()
        }
        self._choice, self._choose = choice_of(loss), _bound_choice(loss, config.loss_options)
        self._kl_estimator = KLEstimator((config.reference or ReferenceConfig()).kl_estimator)
        self._mode = CorrectionMode(config.correction.mode)
        self.proximal: Literal["trainer", "behaviour", "loglinear"] = config.correction.proximal
        """Where pi_old comes from."""
        self.compares_groups = requires_group(estimator)
        self.drops_tokens = bool(
            self._mode.drops_tokens or self._filters or (self._choice is not None and self._choice.drops)
        )
        """Tokens may leave the loss, so that pi_old must be known before anything is counted."""
        self.masks_tokens = self._mode.drops_tokens
        """The correction drops tokens, instead of truncating their weights."""
        self.chooses_tokens = self._choice is not None and not self._choice.drops
        """The loss looks at all tokens of an update, under the current policy, before it is computed."""
        self.uses_reference = config.keeps_reference or Input.REFERENCE in needed_inputs(loss)
        self.uses_expert = Input.EXPERT in needed_inputs(loss)
        """The loss tells an expert's tokens from the policy's."""
        self.uses_teacher = config.teacher is not None
        """A teacher's log-probabilities are read, by the loss or by the rewards."""
        self.uses_entropy = config.entropy_coef != 0
        regularised = config.kl_coef != 0 or self.uses_entropy or shared_critic
        self.zero_advantage_is_idle = is_advantage_weighted(loss) and not regularised
        """A sequence whose advantages are exactly 0 has no gradient."""

    @property
    def looks_ahead(self) -> bool:
        """Something is decided over all tokens of an update before its loss."""
        return self.drops_tokens or self.chooses_tokens

    def estimate(self, episodes: EpisodeBatch) -> Estimate:
        """Advantage of every sampled token, float32 [tokens], and what a critic learns, if there is one.

        Raises:
            TrainingError: the estimator gave another shape, or numbers that are not finite.
        """
        found = self._estimate(episodes)
        values = check_advantage(
            self._config.advantage,
            found.advantage if isinstance(found, Estimate) else found,
            episodes.token_turn.numel(),
        )
        target = found.value_target if isinstance(found, Estimate) else None
        return Estimate(advantage=values.float(), value_target=None if target is None else target.float())

    def correction(self, old_logp: torch.Tensor, behaviour_logp: torch.Tensor, sequence: torch.Tensor) -> Correction:
        """Train/inference correction of tokens of whole sequences: see `agentrl.algorithms.correction`."""
        settings = self._config.correction
        return correction(self._mode, old_logp, behaviour_logp, sequence, cap=settings.cap, band=settings.band)

    def kept(self, tokens: LossInput) -> torch.Tensor:
        """Which tokens of an update train: bool [tokens], from all of them; nobody knows how far an expert's are."""
        kept = self.correction(tokens.old_logp, tokens.behaviour_logp, tokens.sequence).kept
        for name, keep in self._filters.items():
            kept = kept & check_kept(name, keep(tokens), tokens)
        if tokens.expert is not None:
            kept = kept | tokens.expert
        if self._choice is None or not self._choice.drops:
            return kept
        return kept.masked_scatter(kept, self._choose(tokens.select(kept)))

    def chosen(self, tokens: LossInput) -> torch.Tensor | None:
        """What the loss chooses among the tokens that train: bool [tokens]; ``None`` when it chooses nothing."""
        return self._choose(tokens) if self.chooses_tokens else None

    def weights(self, owners: TokenOwners) -> torch.Tensor:
        """Share of each token in the loss of an optimizer step, from all of its tokens: float64 [tokens]."""
        return token_weights(Aggregation(self._config.aggregation), owners, norm_length=self._config.norm_length)

    def loss(self, tokens: LossInput, entropy: torch.Tensor) -> TokenObjective:
        """Loss of tokens of whole sequences, before aggregation.

        Args:
            tokens: Those that train; what `kept` rejects is not among them.
            entropy: Of the current policy at each of them: [tokens].

        Raises:
            TrainingError: the loss gave something else than one number with a gradient for each token.
        """
        policy = self._loss(tokens)
        check_loss_values(self._config.loss, policy, tokens)
        corrected = self.correction(tokens.old_logp, tokens.behaviour_logp, tokens.sequence)
        weights = corrected.weights
        if tokens.expert is not None:
            weights = torch.where(tokens.expert, 1.0, weights)
        values = policy.values * weights
        kl = None
        if self._config.kl_coef and tokens.reference_logp is not None:
            kl = kl_divergence(self._kl_estimator, tokens.logp, tokens.reference_logp)
            values = values + self._config.kl_coef * kl
        if self.uses_entropy:
            values = values - self._config.entropy_coef * entropy
        return TokenObjective(values=values, clipped=policy.clipped, truncated=corrected.truncated, kl=kl)


def _bound_choice(loss: Callable[..., Any], options: dict[str, Any]) -> Callable[[LossInput], torch.Tensor]:
    """The loss's choice, with those of the loss's options that it takes."""
    choice = choice_of(loss)
    if choice is None:
        return lambda tokens: torch.ones_like(tokens.logp, dtype=torch.bool)
    known = inspect.signature(choice.choose).parameters
    own = {name: value for name, value in check_options(loss, options).items() if name in known}
    return functools.partial(choice.choose, **own)
