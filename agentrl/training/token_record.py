"""Record of each sampled token in the updates of a step: computed values, and the reason if it did not train.

    GradientPass ─► TokenRecord (log pi_old, values of each token's latest update) ─► TokenColumns ─► StepReport.tokens

The values are by-products of the step's own passes: nothing is computed twice. `agentrl.runs.token_tables` writes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from agentrl.algorithms.types import LossInput
from agentrl.observe.token_table import TokenColumns
from agentrl.training.batch import StepBatch
from agentrl.training.distributed import Ranks
from agentrl.training.optimizer import Update
from agentrl.trajectory import Trajectory, role_of

PRETRAINING = "pretraining"
"""Reason: the step trained only the signals' models."""
GROUP_EQUAL = "group equal"
"""Reason: the estimator does not tell the episodes of the group apart, so all advantages are 0."""
ZERO_ADVANTAGE = "zero advantage"
NOT_DRAWN = "shaping:pf_ppo"
"""Reason: resampling by return did not draw the episode."""
MAX_KL = "trainer.max_kl"
"""Reason: the update was left out because the policy had moved too far."""
UPDATE_SKIPPED = "update skipped"
"""Reason: the gradients of the update were not finite."""

_RATIO, _ENTROPY, _CLIPPED = range(3)


class TokenRecord:
    """Values of a step's sampled tokens: log pi_old, and values of the latest update that contained them.

    Args:
        trainer_logp: Log-probabilities that are known before the first update, NaN elsewhere: float32 [tokens].
    """

    def __init__(self, trainer_logp: torch.Tensor) -> None:
        self.trainer_logp = trainer_logp
        """Log-probability of each token under the policy before the first update; NaN if not computed yet."""
        self.values = trainer_logp.new_full((3, trainer_logp.numel()), math.nan)
        """Ratio, entropy and clipped (0 or 1) of each token; NaN if not computed: float32 [3, tokens]."""
        self.rejected = torch.zeros_like(trainer_logp, dtype=torch.uint8)
        """Part that rejected each token, see `agentrl.training.gradients.Objective.mark_rejected`: uint8 [tokens]."""

    def begin(self, index: torch.Tensor) -> None:
        """Reset the values of an update's tokens: `index` is int64 [selected]."""
        self.values[:, index] = math.nan

    def keep_first(self, where: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of some tokens before the first update: `logp`, unless they are known."""
        known = self.trainer_logp[where]
        self.trainer_logp[where] = first = torch.where(known.isnan(), logp, known)
        return first

    def add(self, where: torch.Tensor, tokens: LossInput, entropy: torch.Tensor) -> None:
        """Record a micro-batch, whose tokens are at the indices `where` of the step: int64 [selected].

        Called in the lanes' threads; `entropy` is the policy's: [selected].
        """
        self.values[_RATIO, where] = tokens.ratio.detach().float()
        self.values[_ENTROPY, where] = entropy.detach().float()

    def add_clipped(self, where: torch.Tensor, clipped: torch.Tensor) -> None:
        """Record which tokens of a micro-batch the loss clipped: bool [selected]; only those that train."""
        self.values[_CLIPPED, where] = clipped.float()

    def share(self, ranks: Ranks) -> None:
        """Combine the values that each rank computed."""
        self.trainer_logp, self.values = ranks.fill_missing(self.trainer_logp), ranks.fill_missing(self.values)


def reasons_not_trained(
    batch: StepBatch,
    record: TokenRecord,
    *,
    differing: torch.Tensor,
    rejecters: Sequence[str],
    updates: Sequence[Update],
    zero_is_idle: bool,
    pretraining: bool,
) -> tuple[npt.NDArray[np.uint8], tuple[str, ...]]:
    """Find why each sampled token of a step did not train.

    Args:
        batch: Batch of the step, with the sequences of each update.
        record: Values of its tokens.
        differing: True for groups whose episodes the estimator tells apart: bool [groups].
        rejecters: Names of the parts that may reject tokens; 1 in `TokenRecord.rejected` is the first one.
        updates: Updates that were made; the rest of the batch's parts were left out.
        zero_is_idle: True if a token with advantage 0 has no gradient.
        pretraining: True if the policy was not updated.

    Returns:
        Number of the reason of each token, 0 for tokens that train: uint8 [tokens]; and the reasons, from 1.
    """
    names = (*rejecters, PRETRAINING, UPDATE_SKIPPED, MAX_KL, NOT_DRAWN, GROUP_EQUAL, ZERO_ADVANTAGE)
    number = {name: place for place, name in enumerate(names, 1)}
    found, advantage = record.rejected.cpu().clone(), batch.advantage.cpu()
    owners = batch.owners
    if zero_is_idle:
        equal = (~differing.cpu())[owners.group] & (advantage == 0)
        found[(advantage == 0) & (found == 0)] = number[ZERO_ADVANTAGE]
        found[equal] = number[GROUP_EQUAL]
    if batch.sample_counts is not None:
        found[batch.sample_counts[owners.trajectory] == 0] = number[NOT_DRAWN]
    for reason, sequences in _untrained_sequences(batch, updates, pretraining=pretraining).items():
        if sequences:
            found[batch.token_index(sequences)] = number[reason]
    return found.numpy(), names


def _untrained_sequences(batch: StepBatch, updates: Sequence[Update], *, pretraining: bool) -> dict[str, list[int]]:
    """Return the sequences that no update trained, by reason."""
    if pretraining:
        return {PRETRAINING: list(range(len(batch.sequences)))}
    made = list(zip(batch.parts, updates, strict=False))
    trained = {sequence for part, update in made if not update.non_finite for sequence in part}
    skipped = {sequence for part, update in made if update.non_finite for sequence in part} - trained
    left_out = set(range(len(batch.sequences))) - trained - skipped
    return {UPDATE_SKIPPED: sorted(skipped), MAX_KL: sorted(left_out)}


def token_columns(
    batch: StepBatch, record: TokenRecord, masked_by: npt.NDArray[np.uint8], reasons: Sequence[str]
) -> TokenColumns:
    """Return the values of all sampled tokens of a step on the CPU, sequence after sequence.

    See `reasons_not_trained` for `masked_by` and `reasons`.
    """
    ratio, entropy, clipped = record.values.cpu().numpy()
    turns = [turn for trajectory in batch.trajectories for turn in trajectory.turns]
    engine_logprob = batch.behaviour_logp
    if batch.expert is not None:
        engine_logprob = engine_logprob.masked_fill(batch.expert, math.nan)
    return TokenColumns(
        episodes=[_episode_of(batch.trajectories[owner]) for owner in batch.sequence_trajectory],
        first_turns=[turns[number].index for number in batch.episodes.token_turn[list(batch.starts[:-1])].tolist()],
        counts=np.asarray(batch.lengths),
        position=torch.cat([sequence.positions + 1 for sequence in batch.sequences]).numpy(),
        token=torch.cat([sequence.targets for sequence in batch.sequences]).numpy(),
        advantage=batch.advantage.cpu().numpy(),
        episode_return=batch.episodes.to_tokens(batch.episodes.returns).float().cpu().numpy(),
        engine_logprob=engine_logprob.numpy(),
        trainer_logprob=record.trainer_logp.cpu().numpy(),
        ratio=ratio,
        entropy=entropy,
        clipped=clipped == 1,
        masked_by=masked_by,
        reasons=tuple(reasons),
    )


def _episode_of(member: Trajectory) -> str:
    """Return the id of a member's episode, which is its own id unless it is one of several roles."""
    return member.id.removesuffix(f":{role_of(member)}")
