"""Functions that a config names, a user's own among them: what they raise and give back is told under their names."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable
from typing import Any

import torch

from agentrl.algorithms.loss_input import LossInput, TokenLoss
from agentrl.algorithms.options import check_options
from agentrl.algorithms.shaping import EpisodeRewards
from agentrl.errors import AgentRLError, ConfigError, TrainingError


def bind(kind: str, name: str, function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A function of one argument, with its options checked and bound; one of the user's says so when it fails.

    Args:
        kind: What the function is, for messages.
        name: Its own, as in the config.
        function: What stands behind the name.
        options: Its keyword arguments.

    Raises:
        ConfigError: no function, one that does not take one argument, or wrong options.
    """
    if ":" not in name:
        return functools.partial(function, **check_options(function, options))
    _check_callable(kind, name, function)
    return _owned(kind, name, functools.partial(function, **check_options(function, options)))


def check_loss_values(name: str, given: Any, tokens: LossInput) -> None:
    """Check what a loss gave for some tokens.

    Raises:
        TrainingError: no `TokenLoss`, not one number for each token, or numbers without a gradient.
    """
    if not isinstance(given, TokenLoss):
        raise TrainingError(
            f"the loss {name} gave no TokenLoss",
            got=type(given).__name__,
            expected="agentrl.algorithms.loss_input.unclipped(values), values being one number for each token",
        )
    for part, found in (("values", given.values), ("clipped", given.clipped)):
        if not isinstance(found, torch.Tensor) or found.shape != tokens.logp.shape:
            raise TrainingError(
                f"the loss {name} gave {part} of a wrong shape",
                got=_described(found),
                expected=f"shape {tuple(tokens.logp.shape)}: one for each sampled token, before any mean or sum",
            )
    if tokens.logp.requires_grad and not given.values.requires_grad:
        raise TrainingError(
            f"the loss {name} has no gradient",
            got="values that do not depend on logp",
            expected="values computed from tokens.logp, without detach()",
        )


def check_kept(name: str, given: Any, tokens: LossInput) -> torch.Tensor:
    """What a filter keeps: bool [tokens].

    Raises:
        TrainingError: it gave something else.
    """
    shape = tokens.logp.shape
    if isinstance(given, torch.Tensor) and given.dtype is torch.bool and given.shape == shape:
        return given
    raise TrainingError(
        f"the filter {name} does not say which tokens train",
        got=_described(given),
        expected=f"a bool tensor of shape {tuple(shape)}",
    )


def check_advantage(name: str, given: Any, tokens: int) -> torch.Tensor:
    """What an estimator gave: [tokens].

    Raises:
        TrainingError: another shape, or numbers that are not finite.
    """
    if not isinstance(given, torch.Tensor) or given.shape != (tokens,) or not bool(given.isfinite().all()):
        raise TrainingError(
            f"the advantage estimator {name} gave unusable numbers",
            got=_described(given),
            expected=f"{tokens} finite numbers, one for each sampled token",
        )
    return given


def check_shaped(name: str, given: Any, before: EpisodeRewards) -> EpisodeRewards:
    """What a shaping made of rewards.

    Raises:
        TrainingError: no rewards, those of other turns, or some that are not finite.
    """
    if not isinstance(given, EpisodeRewards):
        raise TrainingError(
            f"the shaping {name} gave no rewards",
            got=type(given).__name__,
            expected="EpisodeRewards, as rewards.with_turns and rewards.with_episodes give",
        )
    for part in ("turn_reward", "final"):
        found, shape = getattr(given, part), getattr(before, part).shape
        if found.shape != shape or not bool(found.isfinite().all()):
            raise TrainingError(
                f"the shaping {name} gave unusable rewards",
                got=f"{part}: {_described(found)}",
                expected=f"finite numbers of shape {tuple(shape)}",
            )
    return given


def _described(given: Any) -> str:
    if not isinstance(given, torch.Tensor):
        return type(given).__name__
    wrong = int((~given.isfinite()).sum())
    return f"{str(given.dtype).removeprefix('torch.')} of shape {tuple(given.shape)}, {wrong} not finite"


def _check_callable(kind: str, name: str, function: Any) -> None:
    if not callable(function):
        raise ConfigError(f"the {kind} {name} is no function", got=type(function).__name__, expected="a function")
    try:
        inspect.signature(function).bind_partial(None)
    except TypeError as error:
        raise ConfigError(
            f"the {kind} {name} cannot be called",
            got=f"{name.rpartition(':')[2]}{inspect.signature(function)}",
            expected="a function of one argument, with options after an asterisk",
            hint="see docs/algorithms.md#your-own",
        ) from error


def _owned(kind: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(given: Any) -> Any:
        try:
            return function(given)
        except (AgentRLError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the user's own code may raise anything; the run ends with where it was
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise TrainingError(
                f"the {kind} {name} failed",
                got=f"{type(error).__name__}: {error}",
                hint=f"it was raised in {where.filename} line {where.lineno}: {where.line}",
            ) from error

    return called
