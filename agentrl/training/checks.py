"""Checks that estimator, loss, filters and the source of pi_old fit one another; signals check what they give."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from agentrl.algorithms.correction import CorrectionMode
from agentrl.algorithms.traits import (
    Input,
    choice_of,
    corrects_itself,
    is_blind_to_advantage,
    needed_inputs,
    other_input,
    requires_group,
)
from agentrl.config.config import AlgorithmConfig
from agentrl.errors import ConfigError

GUIDED = frozenset({Input.GREEDY_RETURN, Input.TEACHER, Input.TEACHER_TOP, Input.EXPERT})
"""What episodes and answers from outside the policy give a step; the signals look after these."""
PROVIDED = frozenset({Input.COMPONENTS, Input.REFERENCE, Input.ENTROPY})
"""What `agentrl.training.trainer.Trainer` can give to estimators, losses and filters."""


def check_needs(kind: str, name: str, function: Callable[..., Any], *, also: frozenset[Input] = frozenset()) -> None:
    """Check that a function can be called with what a step has.

    Args:
        kind: What the function is, for the message.
        name: Its own.
        function: What is called.
        also: Inputs that are there, or looked after elsewhere.

    Raises:
        ConfigError: it needs what nobody provides.
    """
    if missing := sorted(needed_inputs(function) - PROVIDED - also):
        raise ConfigError(
            f"the {kind} {name} needs what this trainer does not have",
            got=f"no {' and no '.join(part.name.lower() for part in missing)}",
            expected=" and ".join(missing),
            hint="it can be called as a function: see docs/algorithms.md",
        )


def check_estimator(config: AlgorithmConfig, estimator: Callable[..., Any]) -> None:
    """Check the advantage estimator of a config; signals look after the inputs that they give.

    Raises:
        ConfigError: it needs what nobody provides, or groups that the config does not have.
    """
    check_needs("advantage estimator", config.advantage, estimator, also=GUIDED | {Input.VALUES, Input.PROCESS_REWARD})
    if requires_group(estimator) and config.group_size < 2:
        raise ConfigError(
            f"the advantage estimator {config.advantage} compares the members of a group",
            got=f"algorithm.group_size {config.group_size}",
            expected="at least 2",
            hint="reinforce and reinforce++ compare nothing",
        )


def check_loss(config: AlgorithmConfig, loss: Callable[..., Any]) -> None:
    """Check the loss of a config, and that no other setting is ignored beside it.

    Raises:
        ConfigError: it is no loss of a policy on episodes, needs what nobody provides, or makes a setting idle.
    """
    if (what := other_input(loss)) is not None:
        raise ConfigError(f"the loss {config.loss} does not learn from episodes", got=what, expected="a policy loss")
    check_needs("loss", config.loss, loss, also=GUIDED)
    if is_blind_to_advantage(loss) and config.advantage_options:
        raise ConfigError(
            f"algorithm.advantage_options are ignored: the loss {config.loss} reads no advantage",
            got=config.advantage_options,
            expected="none",
        )
    if corrects_itself(loss) and CorrectionMode(config.correction.mode) is not CorrectionMode.OFF:
        raise ConfigError(
            f"the loss {config.loss} holds the weight pi_old / mu itself, and a correction would apply it twice",
            got=f"algorithm.correction.mode {config.correction.mode}",
            expected="algorithm.correction.mode=off",
        )


def check_proximal(config: AlgorithmConfig, loss: Callable[..., Any], filters: Iterable[Callable[..., Any]]) -> None:
    """Check that pi_old comes from where the other parts can use it.

    Raises:
        ConfigError: without a policy pi_old of its own a part would do nothing, or the forward pass is needed anyway.
    """
    proximal = config.correction.proximal
    if proximal == "trainer":
        return
    choice = choice_of(loss)
    by_distance = [name for name, f in zip(config.filters, filters, strict=True) if not needed_inputs(f)]
    idle = by_distance or ([config.loss] if corrects_itself(loss) or (choice is not None and choice.drops) else [])
    if idle:
        raise ConfigError(
            f"{idle[0]} compares pi_old of the trainer with mu",
            got=f"algorithm.correction.proximal {proximal}",
            expected="algorithm.correction.proximal=trainer",
        )
