"""Runs that learn from pairs of stored episodes: a policy (`agentrl dpo`), or a reward model (`agentrl reward-model`).

trajectories of runs ─► pairs of one task ─► log-probabilities or rewards of all episodes ─► loss
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from agentrl.builders.adapter_checks import check_adapters, refuse_adapters, refuse_role_adapters
from agentrl.builders.models import build_renderer
from agentrl.builders.trainers import LearnerParts, build_learner, build_on_ranks, build_reward_model
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import SCRATCH, Config
from agentrl.config.estimate import counted
from agentrl.errors import ConfigError, UsageError
from agentrl.observe.model_folder import find_model
from agentrl.observe.progress import Phase
from agentrl.render.chat_template import TextEncoder
from agentrl.render.tokenizers import load_tokenizer
from agentrl.rollout.judges import transcript
from agentrl.runs.learning_run import LearningRun, Prepared, digest, digest_trajectories
from agentrl.training.distributed import Ranks
from agentrl.training.preferences import Pair, PreferenceLearner, TextPair, preference_loss
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
        self.say(f"{counted(len(pairs), 'pair')} from {', '.join(self.settings.sources)}")


class PreferenceRun(PairsRun):
    """A run that trains a policy to prefer the better episode of a pair."""

    name, command = "preferences", "dpo"

    async def prepare(self, *, resumes: bool) -> Prepared:
        """Find the model and the pairs of its episodes.

        Raises:
            UsageError: no episodes, pairs or model found, or the disk is full.
            ConfigError: the episodes belong to a model with other tokens.
        """
        base = await self.find_base()
        tokenizer = load_tokenizer(base)
        renderer = build_renderer(self.config, base, tokenizer)
        pairs = load_pairs(self.settings, base, renderer, max_tokens=self.config.agent.max_tokens, say=self.say)
        self._say_count(pairs)

        def load(model: str, ranks: Ranks) -> LearnerParts:
            learned = (PreferenceLearner, self.config, pairs, self.settings)
            return build_on_ranks(ranks, build_learner, *learned, model, base)

        found = digest_trajectories(side for pair in pairs for side in (pair.better, pair.worse))
        return Prepared(base=base, data=found, load=load, tokenizer=tokenizer, images=renderer.images)


class RewardRun(PairsRun):
    """A run that trains a reward model from ``model.path`` on episodes of ``preferences.sources``."""

    name, command = "reward_model", "reward-model"

    async def prepare(self, *, resumes: bool) -> Prepared:
        """Find the pairs, decoded to text, and the language model.

        Raises:
            UsageError: no episodes, pairs or model found, a source is not in a run's folder, or the disk is full.
        """
        pairs = _read_texts(find_pairs(self.settings), self.settings)
        self._say_count(pairs)

        def load(model: str, ranks: Ranks) -> LearnerParts:
            build = partial(build_reward_model, new_head=not resumes)
            return build_on_ranks(ranks, build, self.config, pairs, model)

        texts = digest(text.encode(errors="surrogatepass") for pair in pairs for text in (pair.better, pair.worse))
        base = await self.find_base()
        return Prepared(base=base, data=texts, load=load, tokenizer=load_tokenizer(base))


def _read_texts(pairs: Sequence[Pair], settings: PreferencesConfig) -> list[TextPair]:
    """Decode episodes with the tokenizer of the policy that played them."""
    decode = TextEncoder(load_tokenizer(policy_of(settings))).decode_plain
    return [TextPair(better=transcript(pair.better, decode), worse=transcript(pair.worse, decode)) for pair in pairs]


learn_preferences = PreferenceRun.start
"""Train a run's model on pairs of stored episodes; see `LearningRun.start`."""
train_reward = RewardRun.start
"""Train a reward model on pairs of stored episodes; see `LearningRun.start`."""


def check_preferences(config: Config) -> None:
    """Check the config of preference training.

    Raises:
        ConfigError: no sources, the loss is not a preference loss or does not accept an option, the adapters are
            invalid, or a model from scratch would be trained on a file.
        UsageError: a source does not exist.
    """
    refuse_role_adapters(config, "agentrl dpo")
    check_adapters(config)
    preference_loss(config.preferences or PreferencesConfig())
    files = [str(one) for one in check_sources(config.preferences or PreferencesConfig()) if is_preference_file(one)]
    if files and config.model.path == SCRATCH:
        raise ConfigError(
            "a file of pairs needs a model",
            got=f"{files[0]} and model.path scratch, whose vocabulary comes from an environment's text",
            expected="a folder or a name",
            hint="set model.path, or --model",
        )


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
