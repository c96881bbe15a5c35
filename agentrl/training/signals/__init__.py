"""Signals: what is added to sampled tokens before their advantages are estimated, in the order in which it is added.

A signal is one file here and one entry of `SIGNALS`; `agentrl.training.signals.base` has the protocol.
"""

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.training.signals.base import SignalSetup, SignalUpdates, TokenSignal
from agentrl.training.signals.critic import Critic
from agentrl.training.signals.expert import ExpertSignal
from agentrl.training.signals.greedy_baseline import GreedyBaseline
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


def check_signals(algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool = False) -> None:
    """Check that an algorithm has the signals that its parts read, and reads those that it has.

    Raises:
        ConfigError: one is missing, or of no use.
        UnknownNameError: no such estimator or loss.
    """
    for signal in SIGNALS:
        signal.check(algorithm, config, has_adapters=has_adapters)


def build_signals(setup: SignalSetup) -> dict[str, TokenSignal]:
    """Make the signals of an algorithm, by name, in their order."""
    built = {signal.name: signal.build(setup) for signal in SIGNALS}
    return {name: signal for name, signal in built.items() if signal is not None}


def pretrain_steps(config: TrainerConfig) -> int:
    """Count the first steps, in which the policy waits for a signal's model to learn."""
    return 0 if config.critic is None else config.critic.pretrain_steps


def joins_policy(config: TrainerConfig) -> bool:
    """Return True if the loss of a signal's model is a part of the policy's."""
    return config.critic is not None and config.critic.kind == "shared"


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
