"""Signals: additional values of sampled tokens for advantages and losses, such as log-probabilities of a reference.

A signal is one class in this folder and one entry of `SIGNALS`, which lists them in the order in which they annotate a
batch. One with a model of its own has its own file. `agentrl.training.signals.base` defines the protocol.
"""

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.training.signals.base import JoinedUpdates, SignalSetup, SignalUpdates, TokenSignal
from agentrl.training.signals.critic import Critic
from agentrl.training.signals.process_reward import ProcessRewardModel
from agentrl.training.signals.reference import ReferenceModel
from agentrl.training.signals.teacher import TeacherModel
from agentrl.training.signals.without_model import (
    ExpertSignal,
    GreedyBaseline,
    ObservationLoss,
    RunningBaseline,
    ScoreNorm,
    WindowEntropy,
)

SIGNALS: tuple[type[TokenSignal], ...] = (
    ExpertSignal,
    GreedyBaseline,
    RunningBaseline,
    ScoreNorm,
    WindowEntropy,
    ReferenceModel,
    TeacherModel,
    Critic,
    ProcessRewardModel,
    ObservationLoss,
)
__all__ = [
    "SIGNALS",
    "JoinedUpdates",
    "SignalSetup",
    "SignalUpdates",
    "TokenSignal",
    "build_signals",
    "check_signals",
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
