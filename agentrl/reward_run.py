"""A run that trains a reward model on pairs of stored episodes. Driven by `agentrl reward-model`.

trajectories of runs ─► pairs of one task ─► transcripts ─► Bradley-Terry loss ─► checkpoints/step-N/model
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentrl.assembly.models import load_tokenizer, prepare_model
from agentrl.assembly.pair_learners import BUILD_REWARD_MODEL, build_reward_model
from agentrl.assembly.run_result import RunResult
from agentrl.assembly.runs import Run
from agentrl.assembly.stored_pairs import find_pairs, policy_of
from agentrl.assembly.update_log import UpdateLog
from agentrl.config.preferences import PreferencesConfig
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.metrics import TIMING_PREFIX
from agentrl.observe.model_folder import MODEL
from agentrl.observe.progress import Phase, RunStatus, RunWatcher
from agentrl.observe.run_log import logging_to
from agentrl.render.encoding import TextEncoder
from agentrl.rollout.transcript import transcript
from agentrl.training.preferences.pairs import Pair
from agentrl.training.preferences.reward_training import RewardProgress, TextPair
from agentrl.training.ranks.processes import open_ranks


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
