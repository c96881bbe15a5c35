"""Whether the parts of an algorithm fit one another, and the trainer has what they need.

- Whether an algorithm has the guides that its parts need, and uses those that it has.
- Whether an algorithm and a critic fit each other.
- Whether an algorithm and an implicit process reward model fit each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedModel

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
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.registry import Kind, lookup, names

GUIDED = frozenset({Input.GREEDY_RETURN, Input.TEACHER, Input.TEACHER_TOP, Input.EXPERT})
"""What `agentrl.training.reference.Guides` and ``algorithm.teacher`` give a step. A run plays the greedy rollouts of
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
    """Check the advantage estimator of a config; `agentrl.training.checks` looks after its critic, and
    `agentrl.training.checks` after its process reward model.

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


def check_critic(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> None:
    """Check that an estimator that reads a critic's values has a critic, and that a critic is read.

    Raises:
        ConfigError: one is there without the other.
        UnknownNameError: no such estimator.
    """
    reads = Input.VALUES in needed_inputs(lookup(Kind.ADVANTAGE, algorithm.advantage))
    if reads and trainer.critic is None:
        raise ConfigError(
            f"the advantage estimator {algorithm.advantage} needs a critic",
            got="no trainer.critic",
            expected="trainer.critic={kind: own} or trainer.critic={kind: shared}",
            hint="grpo, rloo and reinforce++ need none",
        )
    if trainer.critic is not None and not reads:
        raise ConfigError(
            f"trainer.critic is ignored: the advantage estimator {algorithm.advantage} reads no values",
            got=f"trainer.critic of kind {trainer.critic.kind}",
            expected=f"algorithm.advantage={' or '.join(value_estimators())}",
            hint="or remove trainer.critic",
        )


def check_vocabulary(critic: PreTrainedModel, policy: PreTrainedModel, *, what: str = "the critic") -> None:
    """Check that a critic, or another model beside the policy, reads what the policy writes.

    Raises:
        UsageError: it has another number of token ids.
    """
    own, expected = (model.config.get_text_config().vocab_size for model in (critic, policy))
    if own != expected:
        raise UsageError(
            f"{what}'s model has another vocabulary than the policy's",
            got=f"{own} token ids ({critic.config._name_or_path or 'no name'})",
            expected=f"{expected}",
            hint="it reads the policy's tokens: take a model of the same family, or leave its path out",
        )


def value_estimators() -> list[str]:
    """The shipped estimators that read a critic's values."""
    shipped = [name for name in names(Kind.ADVANTAGE) if ":" not in name]
    return [name for name in shipped if Input.VALUES in needed_inputs(lookup(Kind.ADVANTAGE, name))]


def check_process_reward(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> None:
    """Check that an estimator that reads process rewards has a model for them, and that such a model is read.

    Raises:
        ConfigError: one is there without the other.
        UnknownNameError: no such estimator.
    """
    reads = Input.PROCESS_REWARD in needed_inputs(lookup(Kind.ADVANTAGE, algorithm.advantage))
    if reads and trainer.process_reward is None:
        raise ConfigError(
            f"the advantage estimator {algorithm.advantage} needs {Input.PROCESS_REWARD}",
            got="no trainer.process_reward",
            expected="trainer.process_reward={}, or {path: MODEL, learning_rate: 1e-6}",
        )
    if trainer.process_reward is not None and not reads:
        raise ConfigError(
            f"trainer.process_reward is ignored: the estimator {algorithm.advantage} reads no process rewards",
            expected="algorithm.advantage=prime",
            hint="or remove trainer.process_reward",
        )
