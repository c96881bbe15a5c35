"""Runs that learn from pairs of stored episodes: a policy (`agentrl dpo`), or a reward model (`agentrl reward-model`).

trajectories of runs ─► pairs of one task ─► log-probabilities or rewards of all episodes ─► loss
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from agentrl.builders.adapter_checks import check_adapters, refuse_adapters, refuse_role_adapters
from agentrl.builders.models import build_renderer
from agentrl.builders.trainers import build_on_ranks, build_preferences, build_reward_model
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import SCRATCH, Config
from agentrl.errors import ConfigError, UsageError
from agentrl.observe.model_folder import find_model
from agentrl.observe.progress import Phase, RunWatcher
from agentrl.render.chat_template import TextEncoder
from agentrl.render.tokenizers import load_tokenizer, pad_id
from agentrl.rollout.judges import transcript
from agentrl.runs.learning_run import Learner, LearningRun
from agentrl.runs.start import Run, RunResult
from agentrl.training.distributed import Ranks
from agentrl.training.preferences import Pair, TextPair, preference_loss
from agentrl.training.stored_episodes import (
    check_pair_tokens,
    check_sources,
    find_pairs,
    is_preference_file,
    load_pairs,
    policy_of,
)


class PairsRun(LearningRun):
    """A run that learns from pairs."""

    section, phase = "preferences", Phase.PAIRS

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
        renderer = build_renderer(self.config, path, load_tokenizer(path))
        pairs = load_pairs(self.settings, path, renderer, max_tokens=self.config.agent.max_tokens, say=self.say)
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


def check_preferences(config: Config) -> None:
    """Check the config of preference training.

    Raises:
        ConfigError: the loss is not a preference loss or does not accept an option, or the adapters are invalid.
    """
    refuse_role_adapters(config, "agentrl dpo")
    check_adapters(config)
    preference_loss(config.preferences or PreferencesConfig())


def check_reward_training(config: Config) -> None:
    """Check the config of reward model training.

    Raises:
        ConfigError: no sources, a model from scratch, context or tensor parallelism, adapters, or loss settings.
        UsageError: a source does not exist, or is a file of pairs.
    """
    refuse_adapters(config, "agentrl reward-model")
    refuse_role_adapters(config, "agentrl reward-model")
    settings = config.preferences or PreferencesConfig()
    if files := [str(source) for source in check_sources(settings) if is_preference_file(source)]:
        raise UsageError(
            "a reward model learns from the episodes of runs", got=f"the pairs of {files[0]}", expected="--from RUN"
        )
    if config.model.path == SCRATCH:
        raise ConfigError(
            "a reward model starts from a language model",
            got=f"model.path {SCRATCH}",
            expected="--model, a folder, a name or a run",
        )
    trainer = config.trainer
    if trainer.kernels == "liger":
        raise ConfigError(
            "Liger's kernels do not support reward models", got="trainer.kernels liger", expected="other kernels"
        )
    if trainer.context_parallel * trainer.tensor_parallel > 1:
        raise ConfigError(
            "a reward model supports only sharding across processes",
            got=f"trainer.context_parallel {trainer.context_parallel}, trainer.tensor_parallel "
            f"{trainer.tensor_parallel}",
            expected="1 and 1; trainer.processes may be more than 1",
        )
    if settings.loss != PreferencesConfig().loss or settings.loss_options:
        raise ConfigError(
            "preferences.loss is ignored: a reward model uses the Bradley-Terry loss",
            got=f"{settings.loss} {settings.loss_options or ''}".strip(),
            expected="no preferences.loss and no preferences.loss_options",
        )


def check_preferences_start(config: Config, *, fetch: bool = True, say: Callable[[str], None] = lambda _: None) -> None:
    """Check that the episodes were sampled with the model's tokenizer; see `StartCheck`."""
    path = config.model.path
    check_pair_tokens(config.preferences or PreferencesConfig(), None if path == SCRATCH else find_model(path))
