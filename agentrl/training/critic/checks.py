"""Whether an algorithm and a critic fit each other."""

from __future__ import annotations

from transformers import PreTrainedModel

from agentrl.algorithms.marks import Input, needed_inputs
from agentrl.config.schema import AlgorithmConfig, TrainerConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.registry import Kind, lookup, names


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
