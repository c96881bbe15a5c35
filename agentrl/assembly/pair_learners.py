"""What learns from pairs of episodes, as every rank builds it: a policy, or a reward model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.assembly.trainers import load_policy
from agentrl.config.preferences import PreferencesConfig
from agentrl.config.schema import Config
from agentrl.image import ImageReader
from agentrl.training.models.weights import ModelWeights
from agentrl.training.preferences.pairs import Pair
from agentrl.training.preferences.reward_model import RewardModel
from agentrl.training.preferences.reward_training import RewardProgress, TextPair, train_reward_model
from agentrl.training.preferences.trainer import PreferenceProgress, train_preferences
from agentrl.training.ranks import Ranks

BUILD_PREFERENCES, BUILD_REWARD_MODEL = "build preferences", "build reward model"
"""The first calls of rank 0 to the others."""
LEARN = "learn"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceParts:
    """A rank's policy that learns from pairs."""

    source: ModelWeights
    config: Config
    pairs: Sequence[Pair]
    pad_id: int
    reader: ImageReader | None

    def learn(self, progress: Callable[[PreferenceProgress], None]) -> PreferenceProgress:
        """Learn everything; the other ranks do it, too.

        Args:
            progress: Called in this process after every optimizer step.

        Raises:
            TrainingError: see `train_preferences`, or a rank was lost.
        """
        with self.source.ranks.led(LEARN):
            return self._learn(progress)

    def _learn(self, progress: Callable[[PreferenceProgress], None] = lambda _: None) -> PreferenceProgress:
        return train_preferences(
            self.source.model,
            self.pairs,
            self.config.preferences or PreferencesConfig(),
            self.config.trainer,
            seed=self.config.run.seed,
            pad_id=self.pad_id,
            progress=progress,
            reader=self.reader,
            ranks=self.source.ranks,
        )

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """What rank 0 asks of other ranks, by name."""
        return {LEARN: self._learn, **self.source.calls()}


def build_preferences(
    config: Config, pairs: Sequence[Pair], *, model_path: str, pad_id: int, reader: ImageReader | None, ranks: Ranks
) -> PreferenceParts:
    """Load the policy, whole or in shards; every rank does.

    Args:
        config: The run.
        pairs: What is learnt.
        model_path: Weights to start from.
        pad_id: Any id of the vocabulary.
        reader: Prepares images.
        ranks: Learn together.

    Raises:
        ConfigError: ranks that do not fit the machine.
        UsageError: a model that is not there.
    """
    ranks.arrange(context=config.trainer.context_parallel, tensor=config.trainer.tensor_parallel)
    model = load_policy(config, model_path, ranks=ranks)
    source = ModelWeights(model, ranks=ranks, dtype=config.model.dtype)
    return PreferenceParts(source=source, config=config, pairs=pairs, pad_id=pad_id, reader=reader)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """A rank's reward model that learns from pairs."""

    model: RewardModel
    config: Config
    pairs: Sequence[TextPair]

    def learn(self, progress: Callable[[RewardProgress], None]) -> RewardProgress:
        """Learn everything; the other ranks do it, too.

        Args:
            progress: Called in this process after every optimizer step.

        Raises:
            TrainingError: see `train_reward_model`, or a rank was lost.
        """
        with self.model.ranks.led(LEARN):
            return self._learn(progress)

    def _learn(self, progress: Callable[[RewardProgress], None] = lambda _: None) -> RewardProgress:
        settings, config = self.config.preferences or PreferencesConfig(), self.config
        return train_reward_model(
            self.model, self.pairs, settings, config.trainer, seed=config.run.seed, progress=progress
        )

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """What rank 0 asks of other ranks, by name."""
        return {LEARN: self._learn, **self.model.source.calls()}


def build_reward_model(config: Config, pairs: Sequence[TextPair], *, model_path: str, ranks: Ranks) -> RewardParts:
    """Load the language model with a new output, whole or in shards; every rank does.

    Args:
        config: The run.
        pairs: What is learnt.
        model_path: The language model.
        ranks: Learn together.

    Raises:
        ConfigError: ranks that do not fit the machine.
        UsageError: a model that is not there.
    """
    ranks.arrange(context=1, tensor=1)
    model = RewardModel(
        model_path,
        dtype=config.model.dtype,
        device=config.model.device,
        new_head=True,
        seed=config.run.seed,
        ranks=ranks,
        sharding=config.trainer.fsdp,
    )
    return RewardParts(model=model, config=config, pairs=pairs)
