"""Training on pairs of better and worse episodes: preference losses such as DPO, and reward models."""

from agentrl.training.preferences.dpo import Pair, make_pairs, preference_loss, train_preferences
from agentrl.training.preferences.reward_model import RewardModel, TextPair, train_reward_model

__all__ = [
    "Pair",
    "RewardModel",
    "TextPair",
    "make_pairs",
    "preference_loss",
    "train_preferences",
    "train_reward_model",
]
