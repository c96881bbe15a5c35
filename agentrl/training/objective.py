"""The configured algorithm as functions: advantages of a step, the tokens that train, and their loss.

Some functions may be a user's: errors in them, and wrong results, are reported under their names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from agentrl.algorithms.aggregation import Aggregation, TokenOwners, token_weights
from agentrl.algorithms.correction import Correction, CorrectionMode, KLEstimator, correction, kl_divergence
from agentrl.algorithms.differences import groups_with_advantages, groups_with_different_rewards, uses_own_advantages
from agentrl.algorithms.options import check_options
from agentrl.algorithms.traits import (
    Input,
    advantage_weighted,
    choice_of,
    compares_group,
    ignores_advantage,
    needed_inputs,
    other_input,
    weighs_behaviour,
)
from agentrl.algorithms.types import EpisodeBatch, Estimate, LossInput, TokenLoss
from agentrl.config.algorithm import ReferenceConfig
from agentrl.config.config import AlgorithmConfig, Config
from agentrl.errors import AgentRLError, ConfigError, TrainingError, raised_in
from agentrl.registry import Kind, lookup
from agentrl.training.forward.runner import SumsByName

SIGNALLED = frozenset({Input.GREEDY_RETURN, Input.TEACHER, Input.TEACHER_TOP, Input.EXPERT})
"""Inputs that signals provide; each signal checks its own."""
PROVIDED = frozenset({Input.COMPONENTS, Input.REFERENCE, Input.ENTROPY})
"""Inputs that `agentrl.training.trainer.Trainer` can provide to estimators, losses and filters."""


def _check_needs(kind: str, name: str, function: Callable[..., Any], *, also: frozenset[Input] = frozenset()) -> None:
    """Refuse a function that needs an input that neither the trainer nor a signal (`also`) provides."""
    if missing := sorted(needed_inputs(function) - PROVIDED - also):
        raise ConfigError(
            f"the {kind} {name} needs inputs that this trainer does not have",
            got=f"no {' and no '.join(part.name.lower() for part in missing)}",
            expected=" and ".join(missing),
            hint="call it as a function instead: see docs/algorithms.md",
        )


def _check_estimator(config: AlgorithmConfig, estimator: Callable[..., Any]) -> None:
    _check_needs(
        "advantage estimator", config.advantage, estimator, also=SIGNALLED | {Input.VALUES, Input.PROCESS_REWARD}
    )
    if compares_group.of(estimator) and config.group_size < 2:
        raise ConfigError(
            f"the advantage estimator {config.advantage} compares the members of a group",
            got=f"algorithm.group_size {config.group_size}",
            expected="at least 2",
            hint="reinforce and reinforce++ do not compare episodes",
        )


def _check_loss(config: AlgorithmConfig, loss: Callable[..., Any]) -> None:
    if (what := other_input(loss)) is not None:
        raise ConfigError(f"the loss {config.loss} does not learn from episodes", got=what, expected="a policy loss")
    _check_needs("loss", config.loss, loss, also=SIGNALLED)
    if ignores_advantage.of(loss) and config.advantage_options:
        raise ConfigError(
            f"algorithm.advantage_options are ignored: the loss {config.loss} reads no advantage",
            got=config.advantage_options,
            expected="none",
        )
    if weighs_behaviour.of(loss) and CorrectionMode(config.correction.mode) is not CorrectionMode.OFF:
        raise ConfigError(
            f"the loss {config.loss} already contains the weight pi_old / mu; a correction would apply it twice",
            got=f"algorithm.correction.mode {config.correction.mode}",
            expected="algorithm.correction.mode=off",
        )


def _check_proximal(config: AlgorithmConfig, loss: Callable[..., Any], filters: Iterable[Callable[..., Any]]) -> None:
    """Refuse a source of pi_old that would make a filter or the loss a no-op, or that saves no forward pass."""
    proximal = config.correction.proximal
    if proximal == "trainer":
        return
    choice = choice_of(loss)
    by_distance = [name for name, f in zip(config.filters, filters, strict=True) if not needed_inputs(f)]
    idle = by_distance or ([config.loss] if weighs_behaviour.of(loss) or (choice is not None and choice.drops) else [])
    if idle:
        raise ConfigError(
            f"{idle[0]} compares the trainer's pi_old with mu",
            got=f"algorithm.correction.proximal {proximal}",
            expected="algorithm.correction.proximal=trainer",
        )


def bind(kind: str, name: str, function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Check and bind a function's options; the result takes one argument, and its errors name a user's function.

    Raises:
        ConfigError: `function` is not a function, does not take one argument, or does not accept the options.
    """
    if ":" not in name:
        return functools.partial(function, **check_options(function, options, name=name))
    _check_callable(kind, name, function)
    return _report_failures(kind, name, functools.partial(function, **check_options(function, options)))


def _check_loss_values(name: str, given: Any, tokens: LossInput) -> None:
    if not isinstance(given, TokenLoss):
        raise TrainingError(
            f"the loss {name} did not return a TokenLoss",
            got=type(given).__name__,
            expected="agentrl.algorithms.types.plain_loss(values), where values has one number for each token",
        )
    for part, found in (("values", given.values), ("clipped", given.clipped)):
        if not isinstance(found, torch.Tensor) or found.shape != tokens.logp.shape:
            raise TrainingError(
                f"the loss {name} returned {part} of the wrong shape",
                got=describe_value(found),
                expected=f"shape {tuple(tokens.logp.shape)}: one for each sampled token, before any mean or sum",
            )
    if tokens.logp.requires_grad and not given.values.requires_grad:
        raise TrainingError(
            f"the loss {name} has no gradient",
            got="values that do not depend on logp",
            expected="values computed from tokens.logp, without detach()",
        )


def _check_kept(name: str, given: Any, tokens: LossInput) -> torch.Tensor:
    shape = tokens.logp.shape
    if isinstance(given, torch.Tensor) and given.dtype is torch.bool and given.shape == shape:
        return given
    raise TrainingError(
        f"the filter {name} did not return a mask of the tokens that train",
        got=describe_value(given),
        expected=f"a bool tensor of shape {tuple(shape)}",
    )


def _check_advantage(name: str, given: Any, tokens: int) -> torch.Tensor:
    if isinstance(given, torch.Tensor) and given.shape == (tokens,):
        numbers = given.float()
        if bool(numbers.isfinite().all()):
            return numbers
        if bool(given.isfinite().all()):
            raise TrainingError(
                f"the advantage estimator {name} returned numbers that are too large",
                got=f"an advantage of {float(given.abs().max()):g}",
                expected=f"at most {torch.finfo(torch.float32).max:.3g}, the largest float32",
                hint="scale the rewards: agent.reward takes weights, and algorithm.shaping.clip bounds returns",
            )
    raise TrainingError(
        f"the advantage estimator {name} returned unusable numbers",
        got=describe_value(given),
        expected=f"{tokens} finite numbers, one for each sampled token",
    )


def describe_value(given: Any) -> str:
    """Describe the return value of a user's function for an error message."""
    if not isinstance(given, torch.Tensor):
        return type(given).__name__
    wrong = int((~given.isfinite()).sum())
    return f"{str(given.dtype).removeprefix('torch.')} of shape {tuple(given.shape)}, {wrong} not finite"


def _check_callable(kind: str, name: str, function: Any) -> None:
    if not callable(function):
        raise ConfigError(f"the {kind} {name} is not a function", got=type(function).__name__, expected="a function")
    try:
        inspect.signature(function).bind_partial(None)
    except TypeError as error:
        raise ConfigError(
            f"the {kind} {name} cannot be called",
            got=f"{name.rpartition(':')[2]}{inspect.signature(function)}",
            expected="a function of one argument, with its options as keyword-only parameters",
            hint="see docs/algorithms.md#your-own",
        ) from error


def _report_failures(kind: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(given: Any) -> Any:
        try:
            return function(given)
        except (AgentRLError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the user's code may raise anything; the run ends with the place in that code
            got = f"{type(error).__name__}: {error}"
            raise TrainingError(f"the {kind} {name} failed", got=got, hint=raised_in(error)) from error

    return call


def learns_from_rewards(config: AlgorithmConfig) -> bool:
    """Return True if a run learns from differences in returns only: no teacher, and a loss that reads advantages."""
    return config.teacher is None and not ignores_advantage.of(lookup(Kind.LOSS, config.loss))


class Objective:
    """Estimator, loss, correction, filters and regularisers of a config, with their options checked.

    With `joint_loss`, the policy's passes also compute the loss of a signal.

    Raises:
        ConfigError: the functions do not take an option, an option conflicts with another or would be ignored, or a
            function needs inputs that the trainer does not have.
        UnknownNameError: an estimator, loss or filter is not registered.
    """

    def __init__(self, config: AlgorithmConfig, *, joint_loss: bool = False) -> None:
        estimator, loss = lookup(Kind.ADVANTAGE, config.advantage), lookup(Kind.LOSS, config.loss)
        filters = {name: lookup(Kind.FILTER, name) for name in config.filters}
        _check_estimator(config, estimator)
        _check_loss(config, loss)
        _check_proximal(config, loss, filters.values())
        for name, function in filters.items():
            _check_needs("filter", name, function)
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
        self.compares_groups = compares_group.of(estimator)
        self._uses_own_advantages = uses_own_advantages(estimator)
        self.drops_tokens = bool(
            self._mode.drops_tokens or self._filters or (self._choice is not None and self._choice.drops)
        )
        """True if tokens may leave the loss, so that pi_old must be known before the denominators are computed."""
        self.masks_tokens = self._mode.drops_tokens
        """True if the correction drops tokens instead of truncating their weights."""
        self.chooses_tokens = self._choice is not None and not self._choice.drops
        """True if the loss chooses among all tokens of an update, under the current policy, before it is computed."""
        self.uses_entropy = config.entropy_coef != 0
        regularised = config.kl_coef != 0 or self.uses_entropy or joint_loss
        self.zero_advantage_is_idle = advantage_weighted.of(loss) and not regularised
        """True if a sequence whose advantages are exactly 0 has no gradient."""

    @property
    def looks_ahead(self) -> bool:
        """True if filters or the loss must see all tokens of an update before its loss is computed."""
        return self.drops_tokens or self.chooses_tokens

    def estimate(self, episodes: EpisodeBatch) -> Estimate:
        """Compute the advantage of every sampled token, float32 [tokens], and a critic's value targets, if any.

        Raises:
            TrainingError: the estimator returned another shape, or numbers that are not finite.
        """
        found = self._estimate(episodes)
        values = _check_advantage(
            self._config.advantage,
            found.advantage if isinstance(found, Estimate) else found,
            episodes.token_turn.numel(),
        )
        target = found.value_target if isinstance(found, Estimate) else None
        return Estimate(advantage=values, value_target=None if target is None else target.float())

    def differing_groups(self, episodes: EpisodeBatch) -> torch.Tensor:
        """Mark the groups whose episodes the estimator tells apart: bool [groups]; see `algorithms.differences`.

        Raises:
            TrainingError: the estimator failed.
        """
        if self._uses_own_advantages:
            return groups_with_advantages(self.estimate, episodes)
        return groups_with_different_rewards(episodes)

    def correction(self, old_logp: torch.Tensor, behaviour_logp: torch.Tensor, sequence: torch.Tensor) -> Correction:
        """Compute the train/inference correction of whole sequences' tokens: see `agentrl.algorithms.correction`."""
        settings = self._config.correction
        return correction(self._mode, old_logp, behaviour_logp, sequence, cap=settings.cap, band=settings.band)

    def mark_kept(self, tokens: LossInput) -> torch.Tensor:
        """Mark the tokens that train among all tokens of an update: bool [tokens]; an expert's tokens always train."""
        kept = self.correction(tokens.old_logp, tokens.behaviour_logp, tokens.sequence).kept
        for name, keep in self._filters.items():
            kept = kept & _check_kept(name, keep(tokens), tokens)
        if tokens.expert is not None:
            kept = kept | tokens.expert
        if self._choice is None or not self._choice.drops:
            return kept
        return kept.masked_scatter(kept, self._choose(tokens.select(kept)))

    def choose(self, tokens: LossInput) -> torch.Tensor | None:
        """Compute the loss's choice among the tokens that train: 0 to 1, [tokens]; ``None`` if it does not choose."""
        return self._choose(tokens) if self.chooses_tokens else None

    def weights(self, owners: TokenOwners) -> torch.Tensor:
        """Compute the weight of each token in the loss of an optimizer step; needs all its tokens: float64 [tokens]."""
        return token_weights(Aggregation(self._config.aggregation), owners, norm_length=self._config.norm_length)

    def loss(self, tokens: LossInput, entropy: torch.Tensor, tally: SumsByName) -> torch.Tensor:
        """Compute the loss of the tokens that train, before aggregation: [tokens].

        It is the policy loss times the correction weight, plus the KL and entropy terms.

        Args:
            tokens: Tokens of whole sequences.
            entropy: Entropy of the policy: [tokens].
            tally: Sums to which measurements of these tokens are added.

        Raises:
            TrainingError: the loss did not return one number with a gradient for each token.
        """
        policy = self._loss(tokens)
        _check_loss_values(self._config.loss, policy, tokens)
        corrected = self.correction(tokens.old_logp, tokens.behaviour_logp, tokens.sequence)
        weights = corrected.weights
        if tokens.expert is not None:
            weights = torch.where(tokens.expert, 1.0, weights)
        values = policy.values * weights
        tally.add("train/clip_share", policy.clipped)
        if not self.masks_tokens:
            tally.add("mismatch/clip_share", corrected.truncated)
        if self._config.kl_coef and tokens.reference_logp is not None:
            kl = kl_divergence(self._kl_estimator, tokens.logp, tokens.reference_logp)
            values = values + self._config.kl_coef * kl
            tally.add("train/kl_reference", kl)
        if self.uses_entropy:
            values = values - self._config.entropy_coef * entropy
        return values


def _bound_choice(loss: Callable[..., Any], options: dict[str, Any]) -> Callable[[LossInput], torch.Tensor]:
    """Bind the loss's choice to those of the loss's options that it takes."""
    choice = choice_of(loss)
    if choice is None:
        return lambda tokens: torch.ones_like(tokens.logp, dtype=torch.bool)
    known = inspect.signature(choice.choose).parameters
    own = {name: value for name, value in check_options(loss, options).items() if name in known}
    return functools.partial(choice.choose, **own)


_WHOLE_DISTRIBUTION = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def check_sampling(config: Config) -> None:
    """Check that sampling uses the whole distribution, without truncation and at a temperature above 0.

    Raises:
        ConfigError: it does not.
    """
    sampling = config.sampling
    wrong = {name: value for name, whole in _WHOLE_DISTRIBUTION.items() if (value := getattr(sampling, name)) != whole}
    if sampling.temperature == 0:
        wrong["temperature"] = 0
    if wrong:
        raise ConfigError(
            "training must sample from the policy's whole distribution",
            got=", ".join(f"sampling.{name} {value}" for name, value in wrong.items()),
            expected="a temperature above 0, and no top_p, top_k or min_p",
            hint="evaluations may sample otherwise: evaluation.sampling={temperature: 0}",
        )
