"""Whether an algorithm has the guides that its parts need, and uses those that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl.algorithms.marks import Input, needed_inputs
from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import ConfigError

GUIDED = frozenset({Input.GREEDY_RETURN, Input.TEACHER, Input.TEACHER_TOP, Input.EXPERT})
"""What `agentrl.training.step.guides.Guides` and ``algorithm.teacher`` give a step. A run plays the greedy rollouts of
its own accord; `check_guides` looks after the others."""
LOSS_INPUTS = frozenset({Input.TEACHER, Input.TEACHER_TOP})
"""What losses read of a teacher."""
DISTILL = "distill"
"""The shaping that reads a teacher."""


def check_guides(config: AlgorithmConfig, loss: Callable[..., Any]) -> None:
    """Check that there are a teacher and an expert where they are needed, and only there.

    Raises:
        ConfigError: one is missing, is of no use, or another setting makes no sense beside it.
    """
    needed = needed_inputs(loss)
    if Input.TEACHER in needed:
        _require_teacher(config, f"the loss {config.loss}")
    if DISTILL in config.shaping:
        _require_teacher(config, f"the shaping {DISTILL}")
    _check_top(config, uses=Input.TEACHER_TOP in needed)
    if config.teacher is not None and not needed & LOSS_INPUTS and DISTILL not in config.shaping:
        raise ConfigError(
            "algorithm.teacher is ignored: nothing reads its log-probabilities",
            got=f"algorithm.loss {config.loss} and no shaping {DISTILL}",
            expected=f"algorithm.loss=distill, or algorithm.shaping={{{DISTILL}: {{coef: 1.0}}}}",
        )
    _check_expert(config, uses=Input.EXPERT in needed)


def _check_top(config: AlgorithmConfig, *, uses: bool) -> None:
    named = None if config.teacher is None else config.teacher.top_k
    if uses and named is None:
        raise ConfigError(
            f"the loss {config.loss} needs {Input.TEACHER_TOP}",
            got="no algorithm.teacher" if config.teacher is None else "no algorithm.teacher.top_k",
            expected="algorithm.teacher={path: MODEL, top_k: 20}",
        )
    if named is not None and not uses:
        raise ConfigError(
            f"algorithm.teacher.top_k is ignored: the loss {config.loss} reads the sampled tokens only",
            got=named,
            expected="algorithm.loss=distill_top_k",
            hint="or remove algorithm.teacher.top_k",
        )


def _require_teacher(config: AlgorithmConfig, what: str) -> None:
    if config.teacher is None:
        raise ConfigError(
            f"{what} needs {Input.TEACHER}",
            got="no algorithm.teacher",
            expected="algorithm.teacher={path: MODEL}",
        )


def _check_expert(config: AlgorithmConfig, *, uses: bool) -> None:
    expert = config.expert
    if expert is None:
        if uses:
            raise ConfigError(
                f"the loss {config.loss} needs {Input.EXPERT}",
                got="no algorithm.expert",
                expected="algorithm.expert={members: 1}",
            )
        return
    if not uses:
        raise ConfigError(
            f"algorithm.expert plays members of the groups, and the loss {config.loss} has no place for tokens that "
            "the policy did not sample",
            expected="algorithm.loss=luffy, or no algorithm.expert",
        )
    if expert.members >= config.group_size:
        raise ConfigError(
            "the expert leaves no episode of a group to the policy",
            got=f"algorithm.expert.members {expert.members} of algorithm.group_size {config.group_size}",
            expected=f"at most {config.group_size - 1}",
        )
    if config.correction.proximal != "trainer":
        raise ConfigError(
            "nobody knows the probability mu with which an expert wrote its tokens",
            got=f"algorithm.correction.proximal {config.correction.proximal}",
            expected="algorithm.correction.proximal=trainer",
        )
    if "kl" in config.shaping:
        raise ConfigError(
            "the shaping kl measures the divergence of what was sampled, and an expert's tokens were not",
            got="algorithm.expert and the shaping kl",
            expected="algorithm.kl_coef, which measures it in the loss",
        )
