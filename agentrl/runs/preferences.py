"""A run that learns from pairs of stored episodes. Driven by `agentrl dpo`.

trajectories of runs ─► pairs of one task ─► log-probabilities of all episodes ─► loss ─► checkpoints/step-N/model

- A run that trains a reward model on pairs of stored episodes. Driven by `agentrl reward-model`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentrl.builders.models import (
    build_renderer,
    load_tokenizer,
    pad_id,
    prepare_model,
)
from agentrl.builders.pairs import (
    BUILD_PREFERENCES,
    BUILD_REWARD_MODEL,
    build_preferences,
    build_reward_model,
    find_pairs,
    load_pairs,
    policy_of,
)
from agentrl.builders.record import UpdateLog
from agentrl.builders.run import Run, RunResult
from agentrl.config.algorithm import PreferencesConfig
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.metrics import TIMING_PREFIX
from agentrl.observe.model_folder import MODEL
from agentrl.observe.progress import Phase, RunStatus, RunWatcher
from agentrl.observe.run_folder import logging_to
from agentrl.render.tokens import TextEncoder
from agentrl.rollout.judges import transcript
from agentrl.training.distributed.launch import open_ranks
from agentrl.training.preferences import Pair, PreferenceProgress
from agentrl.training.reward_model import RewardProgress, TextPair
from agentrl.training.weights import save_policy_folder


class PreferenceRun:
    """One such run.

    Args:
        run: Folder and config.
        watcher: Is told how it goes.
    """

    def __init__(self, run: Run, *, watcher: RunWatcher | None = None) -> None:
        self.config, self.folder = run.config, run.folder
        self.status = RunStatus()
        self._watcher = watcher or RunWatcher()
        self._log = UpdateLog(run, self.status, self._watcher)

    def run(self) -> RunResult:
        """Pair, learn, save.

        Raises:
            UsageError: no episodes, no pairs, no model, a full disk.
            ConfigError: a loss that does not learn from pairs, or episodes of a model with other tokens.
            TrainingError: the loss is not finite, or a rank was lost.
        """
        with self.folder.in_use(), logging_to(self.folder.run_log, self._watcher.on_message), self._log:
            self._watcher.on_start(self.folder.path, self.status)
            self._enter(Phase.PREPARE)
            path = asyncio.run(prepare_model(self.config, self.folder))
            return self._learn(path, self.config.preferences or PreferencesConfig())

    def _learn(self, path: str, settings: PreferencesConfig) -> RunResult:
        tokenizer = load_tokenizer(path)
        reader = build_renderer(self.config, path, tokenizer).images
        pairs = load_pairs(settings, path)
        self._watcher.on_message(f"{len(pairs)} pairs from {', '.join(settings.sources)}")
        with open_ranks(self.config.trainer.processes, logs=self.folder.logs) as ranks:
            config, filler = self.config.model_dump(mode="json"), pad_id(tokenizer)
            with ranks.led(BUILD_PREFERENCES, config, pairs, path, filler):
                parts = build_preferences(
                    self.config, pairs, model_path=path, pad_id=filler, reader=reader, ranks=ranks
                )
            self._enter(Phase.PAIRS)
            final = parts.learn(self._record)
            self._enter(Phase.CHECKPOINT)
            checkpoints = Checkpoints(self.folder.checkpoints, keep=self.config.checkpoint.keep)
            saved = checkpoints.save(
                final.update, lambda folder: save_policy_folder(parts.source, tokenizer, folder / MODEL, reader)
            )
        self._watcher.on_checkpoint(final.update, saved.path)
        return RunResult(
            folder=self.folder.path,
            step=final.update,
            checkpoint=str(saved.path),
            metrics=self._log.last,
            interrupted=False,
        )

    def _record(self, progress: PreferenceProgress) -> None:
        metrics = {
            "preferences/loss": progress.loss,
            "preferences/accuracy": progress.accuracy,
            "preferences/better_gain": progress.better_gain,
            "preferences/worse_gain": progress.worse_gain,
            "preferences/grad_norm": progress.grad_norm,
            "preferences/learning_rate": progress.learning_rate,
            "preferences/updates_skipped": float(bool(progress.non_finite)),
            f"{TIMING_PREFIX}preferences_s": progress.seconds,
        }
        self._log.record(progress.update, metrics, updates=progress.updates, skipped=bool(progress.non_finite))

    def _enter(self, phase: Phase) -> None:
        self.status.phase = phase
        self._watcher.on_status(self.status)


def learn_preferences(run: Run, *, watcher: RunWatcher | None = None) -> RunResult:
    """Train a run's model on pairs of stored episodes; see `PreferenceRun.run` for what it raises."""
    return PreferenceRun(run, watcher=watcher).run()


def train_reward(run: Run, *, watcher: RunWatcher | None = None) -> RunResult:
    """Train a reward model; what it starts from is ``model.path``, its episodes are ``preferences.sources``.

    Raises:
        UsageError: no episodes, no pairs, no model, sources that lie in no run, a full disk.
        TrainingError: the loss is not finite, or a rank was lost.
    """
    watcher, status, settings = watcher or RunWatcher(), RunStatus(), run.config.preferences or PreferencesConfig()
    log = UpdateLog(run, status, watcher)
    with run.folder.in_use(), logging_to(run.folder.run_log, watcher.on_message), log:
        watcher.on_start(run.folder.path, status)
        pairs = _texts(find_pairs(settings), settings)
        watcher.on_message(f"{len(pairs)} pairs from {', '.join(settings.sources)}")
        path = asyncio.run(prepare_model(run.config, run.folder))

        def record(progress: RewardProgress) -> None:
            skipped = bool(progress.non_finite)
            log.record(progress.update, _metrics(progress), updates=progress.updates, skipped=skipped)

        with open_ranks(run.config.trainer.processes, logs=run.folder.logs) as ranks:
            with ranks.led(BUILD_REWARD_MODEL, run.config.model_dump(mode="json"), pairs, path):
                parts = build_reward_model(run.config, pairs, model_path=path, ranks=ranks)
            status.phase = Phase.PAIRS
            final = parts.learn(record)
            checkpoints = Checkpoints(run.folder.checkpoints, keep=run.config.checkpoint.keep)
            saved = checkpoints.save(final.update, lambda folder: parts.model.save(folder / MODEL))
        watcher.on_checkpoint(final.update, saved.path)
        return RunResult(
            folder=run.folder.path, step=final.update, checkpoint=str(saved.path), metrics=log.last, interrupted=False
        )


def _texts(pairs: Sequence[Pair], settings: PreferencesConfig) -> list[TextPair]:
    """What a reader is shown of the episodes, by the tokenizer of the policy that played them."""
    decode = TextEncoder(load_tokenizer(policy_of(settings))).decode_plain
    return [TextPair(better=transcript(pair.better, decode), worse=transcript(pair.worse, decode)) for pair in pairs]


def _metrics(progress: RewardProgress) -> dict[str, float]:
    return {
        "reward_model/loss": progress.loss,
        "reward_model/accuracy": progress.accuracy,
        "reward_model/margin": progress.margin,
        "reward_model/grad_norm": progress.grad_norm,
        "reward_model/learning_rate": progress.learning_rate,
        "reward_model/updates_skipped": float(bool(progress.non_finite)),
        f"{TIMING_PREFIX}reward_model_s": progress.seconds,
    }
