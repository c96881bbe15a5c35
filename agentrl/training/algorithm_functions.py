"""Checks of the functions that a config names (estimator, loss, filters, shapings), of their options and results.

Users can supply such functions; their errors and invalid results are reported under their names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from agentrl.algorithms.correction import CorrectionMode
from agentrl.algorithms.options import check_options
from agentrl.algorithms.traits import (
    Input,
    choice_of,
    compares_group,
    couples_episodes,
    ignores_advantage,
    needed_inputs,
    other_input,
    weighs_behaviour,
)
from agentrl.algorithms.types import LossInput, TokenLoss
from agentrl.config.config import AlgorithmConfig, Config, TrainerConfig
from agentrl.config.derived import per_environment_configs
from agentrl.errors import AgentRLError, ConfigError, TrainingError, raised_in
from agentrl.registry import Kind, lookup

SIGNALLED = frozenset(
    {Input.BASELINE, Input.SCORE_NORM, Input.GREEDY_RETURN, Input.TEACHER, Input.TEACHER_TOP, Input.EXPERT}
)
"""Inputs that signals provide; each signal checks its own."""
PROVIDED = frozenset({Input.COMPONENTS, Input.ROLE_KIND, Input.REFERENCE, Input.ENTROPY})
"""Inputs that `agentrl.training.trainer.Trainer` can provide to estimators, losses and filters."""
_WHOLE_DISTRIBUTION = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def check_needs(kind: str, name: str, function: Callable[..., Any], *, also: frozenset[Input] = frozenset()) -> None:
    """Check that the trainer or a signal (`also`) provides all inputs of a function.

    Raises:
        ConfigError: an input is missing.
    """
    if missing := sorted(needed_inputs(function) - PROVIDED - also):
        raise ConfigError(
            f"the {kind} {name} needs inputs that this trainer does not have",
            got=f"no {' and no '.join(part.name.lower() for part in missing)}",
            expected=" and ".join(missing),
            hint="call it as a function in your own code instead: see docs/algorithms.md",
        )


def check_estimator(config: AlgorithmConfig, estimator: Callable[..., Any]) -> None:
    """Check that an advantage estimator fits the config.

    Raises:
        ConfigError: it needs inputs that the trainer does not have, or larger groups.
    """
    check_needs(
        "advantage estimator", config.advantage, estimator, also=SIGNALLED | {Input.VALUES, Input.PROCESS_REWARD}
    )
    _check_group_size(f"advantage estimator {config.advantage}", config, estimator)


def check_loss(config: AlgorithmConfig, loss: Callable[..., Any]) -> None:
    """Check that a policy loss fits the config.

    Raises:
        ConfigError: it needs inputs that the trainer does not have, would ignore options, contains a correction, or
            learns from groups that dynamic sampling drops.
    """
    if (what := other_input(loss)) is not None:
        raise ConfigError(f"the loss {config.loss} does not learn from episodes", got=what, expected="a policy loss")
    check_needs("loss", config.loss, loss, also=SIGNALLED)
    _check_group_size(f"loss {config.loss}", config, loss)
    if ignores_advantage.of(loss) and config.advantage_options:
        raise ConfigError(
            f"algorithm.advantage_options are ignored: the loss {config.loss} reads no advantage",
            got=config.advantage_options,
            expected="none",
        )
    if config.dynamic_sampling and not learns_from_rewards(config):
        raise ConfigError(
            "algorithm.dynamic_sampling drops groups with equal rewards, but this run also learns from such groups",
            got=f"algorithm.loss {config.loss}" if ignores_advantage.of(loss) else "algorithm.teacher",
            expected="algorithm.dynamic_sampling=false",
        )
    if weighs_behaviour.of(loss) and CorrectionMode(config.correction.mode) is not CorrectionMode.OFF:
        raise ConfigError(
            f"the loss {config.loss} already contains the weight pi_old / mu; a correction would apply it twice",
            got=f"algorithm.correction.mode {config.correction.mode}",
            expected="algorithm.correction.mode=off",
        )


def check_mini_batch_rows(config: AlgorithmConfig, trainer: TrainerConfig) -> None:
    """Check that the loss does not couple rows that may belong to different updates.

    Raises:
        ConfigError: it does.
    """
    if trainer.mini_batch_rows is not None and couples_episodes.of(lookup(Kind.LOSS, config.loss)):
        raise ConfigError(
            f"the loss {config.loss} compares the episodes of a group, which rows may train in different updates",
            got=f"trainer.mini_batch_rows {trainer.mini_batch_rows}",
            expected="trainer.mini_batches",
        )


def _check_group_size(what: str, config: AlgorithmConfig, function: Callable[..., Any]) -> None:
    if (compares_group.of(function) or couples_episodes.of(function)) and config.group_size < 2:
        raise ConfigError(
            f"the {what} compares the members of a group",
            got=f"algorithm.group_size {config.group_size}",
            expected="at least 2",
            hint="reinforce and reinforce++ do not compare episodes",
        )


def check_proximal(config: AlgorithmConfig, loss: Callable[..., Any], filters: Iterable[Callable[..., Any]]) -> None:
    """Check that the source of pi_old does not make a filter or the loss a no-op.

    Raises:
        ConfigError: it does.
    """
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


def check_loss_values(name: str, given: Any, tokens: LossInput) -> None:
    """Check that a loss returned one number with a gradient for each token.

    Raises:
        TrainingError: it did not.
    """
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


def check_kept(name: str, given: Any, tokens: LossInput) -> torch.Tensor:
    """Return the mask of a filter: bool [tokens].

    Raises:
        TrainingError: the filter returned something else.
    """
    shape = tokens.logp.shape
    if isinstance(given, torch.Tensor) and given.dtype is torch.bool and given.shape == shape:
        return given
    raise TrainingError(
        f"the filter {name} did not return a mask of the tokens to train",
        got=describe_value(given),
        expected=f"a bool tensor of shape {tuple(shape)}",
    )


def check_advantage(name: str, given: Any, tokens: int) -> torch.Tensor:
    """Return the advantages of an estimator in float32: [tokens].

    Raises:
        TrainingError: it returned another shape, or numbers that are not finite.
    """
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
        signature = inspect.signature(function)
        options = {one.name: None for one in signature.parameters.values() if one.kind is one.KEYWORD_ONLY}
        signature.bind(None, **options)
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


def run_learns_from_rewards(config: Config) -> bool:
    """Return True if, in all of its environments, a run learns from differences in returns only."""
    return all(learns_from_rewards(part.config.algorithm) for part in per_environment_configs(config))


def learns_from_rewards(config: AlgorithmConfig) -> bool:
    """Return True if an algorithm learns from differences in returns only: no teacher; its loss reads advantages."""
    return config.teacher is None and not ignores_advantage.of(lookup(Kind.LOSS, config.loss))


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
