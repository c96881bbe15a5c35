"""Signals: additional values of sampled tokens for advantages and losses, such as log-probabilities of a reference.

A signal is one class in this folder and one entry of `SIGNALS`, which lists them in the order in which they annotate a
batch. `agentrl.training.signals.base` defines the protocol.
"""

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.training.signals.base import SignalSetup, SignalUpdates, TokenSignal
from agentrl.training.signals.critic import Critic
from agentrl.training.signals.extra_rollouts import ExpertSignal, GreedyBaseline
from agentrl.training.signals.process_reward import ProcessRewardModel
from agentrl.training.signals.reference import ReferenceModel
from agentrl.training.signals.teacher import TeacherModel

SIGNALS: tuple[type[TokenSignal], ...] = (
    ExpertSignal,
    GreedyBaseline,
    ReferenceModel,
    TeacherModel,
    Critic,
    ProcessRewardModel,
)
__all__ = [
    "SIGNALS",
    "SignalSetup",
    "SignalUpdates",
    "TokenSignal",
    "build_signals",
    "check_signals",
    "joins_policy",
    "pretrain_steps",
]


def check_signals(algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool = False) -> None:
    """Check that an algorithm has all the signals that it reads, and reads all that it has.

    Raises:
        ConfigError: a signal is missing or unused.
        UnknownNameError: an estimator or loss is not registered.
    """
    for signal in SIGNALS:
        signal.check(algorithm, config, has_adapters=has_adapters)


def build_signals(setup: SignalSetup) -> dict[str, TokenSignal]:
    """Build the signals of an algorithm, by name, in the order of `SIGNALS`."""
    built = {signal.name: signal.build(setup) for signal in SIGNALS}
    return {name: signal for name, signal in built.items() if signal is not None}


def pretrain_steps(config: TrainerConfig) -> int:
    """Return the number of first steps in which only a signal's model trains."""
    return 0 if config.critic is None else config.critic.pretrain_steps


def joins_policy(config: TrainerConfig) -> bool:
    """Return True if the policy's loss includes the loss of a signal's model."""
    return config.critic is not None and config.critic.kind == "shared"
