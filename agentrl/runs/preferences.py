"""Runs that learn from pairs of stored episodes: a policy (`agentrl dpo`), or a reward model (`agentrl reward-model`).

trajectories of runs ─► pairs of one task ─► log-probabilities or rewards of all episodes ─► loss
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from agentrl.builders.models import build_renderer
from agentrl.builders.pairs import (
    build_preferences,
    build_reward_model,
    find_pairs,
    load_pairs,
    policy_of,
)
from agentrl.builders.trainers import build_on_ranks
from agentrl.config.algorithm import PreferencesConfig
from agentrl.observe.progress import Phase, RunWatcher
from agentrl.render.tokenizers import load_tokenizer, pad_id
from agentrl.render.tokens import TextEncoder
from agentrl.rollout.judges.transcripts import transcript
from agentrl.runs.learning_run import Learner, LearningRun
from agentrl.runs.start import Run, RunResult
from agentrl.training.distributed import Ranks
from agentrl.training.preferences import Pair
from agentrl.training.reward_model import TextPair


class PairsRun(LearningRun):
    """A run that learns from pairs."""

    phase = Phase.PAIRS

    @property
    def settings(self) -> PreferencesConfig:
        """The ``preferences`` section."""
        return self.config.preferences or PreferencesConfig()

    def _say_count(self, pairs: Sequence[object]) -> None:
        self.say(f"{len(pairs)} pairs from {', '.join(self.settings.sources)}")


class PreferenceRun(PairsRun):
    """A run that trains a policy to prefer the better episode of a pair."""

    name = "preferences"

    async def prepare(self) -> Callable[[Ranks], Learner]:
        """Find the model and the pairs of its episodes.

        Raises:
            UsageError: no episodes, pairs or model found, or the disk is full.
            ConfigError: the episodes belong to a model with other tokens.
        """
        path = await self.find_model()
        pairs = load_pairs(self.settings, path)
        self._say_count(pairs)
        return partial(self._load, path, pairs)

    def _load(self, path: str, pairs: Sequence[Pair], ranks: Ranks) -> Learner:
        config, tokenizer = self.config, load_tokenizer(path)
        images = build_renderer(config, path, tokenizer).images
        parts = build_on_ranks(ranks, build_preferences, config, pairs, path, pad_id(tokenizer))

        def save(folder: Path) -> None:
            parts.source.save(folder, tokenizer, images)

        return Learner(learn=parts.learn, save=save)


class RewardRun(PairsRun):
    """A run that trains a reward model from ``model.path`` on episodes of ``preferences.sources``."""

    name = "reward_model"

    async def prepare(self) -> Callable[[Ranks], Learner]:
        """Find the pairs, decoded to text, and the language model.

        Raises:
            UsageError: no episodes, pairs or model found, a source is not in a run's folder, or the disk is full.
        """
        pairs = _read_texts(find_pairs(self.settings), self.settings)
        self._say_count(pairs)
        return partial(self._load, await self.find_model(), pairs)

    def _load(self, path: str, pairs: Sequence[TextPair], ranks: Ranks) -> Learner:
        parts = build_on_ranks(ranks, build_reward_model, self.config, pairs, path)
        return Learner(learn=parts.learn, save=parts.model.save)


def _read_texts(pairs: Sequence[Pair], settings: PreferencesConfig) -> list[TextPair]:
    """Decode episodes with the tokenizer of the policy that played them."""
    decode = TextEncoder(load_tokenizer(policy_of(settings))).decode_plain
    return [TextPair(better=transcript(pair.better, decode), worse=transcript(pair.worse, decode)) for pair in pairs]


def learn_preferences(run: Run, *, watcher: RunWatcher | None = None) -> RunResult:
    """Train a run's model on pairs of stored episodes; raises the errors of `LearningRun.run`."""
    return PreferenceRun(run, watcher=watcher).run()


def train_reward(run: Run, *, watcher: RunWatcher | None = None) -> RunResult:
    """Train a reward model on pairs of stored episodes; raises the errors of `LearningRun.run`."""
    return RewardRun(run, watcher=watcher).run()
