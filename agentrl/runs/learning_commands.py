"""The commands that learn from fixed data, for the command line and for Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl.config.config import Config
from agentrl.runs.preferences import check_preferences, check_reward_training, learn_preferences, train_reward
from agentrl.runs.sft import check_warm_start, warm_start
from agentrl.runs.start import RunResult


@dataclass(frozen=True, slots=True)
class LearningCommand:
    """Command that learns from fixed data."""

    name: str
    section: str
    """Config section from which it reads its learning rate."""
    check: Callable[[Config], None]
    """Check of a config."""
    run: Callable[..., RunResult]
    """Function that starts or resumes a run."""


SFT = LearningCommand("sft", "sft", check_warm_start, warm_start)
DPO = LearningCommand("dpo", "preferences", check_preferences, learn_preferences)
REWARD_MODEL = LearningCommand("reward-model", "preferences", check_reward_training, train_reward)
LEARNING_COMMANDS: Mapping[str, LearningCommand] = {command.name: command for command in (SFT, DPO, REWARD_MODEL)}
