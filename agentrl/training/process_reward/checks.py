"""Whether an algorithm and an implicit process reward model fit each other."""

from __future__ import annotations

from agentrl.algorithms.marks import Input, needed_inputs
from agentrl.config.schema import AlgorithmConfig, TrainerConfig
from agentrl.errors import ConfigError
from agentrl.registry import Kind, lookup


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
