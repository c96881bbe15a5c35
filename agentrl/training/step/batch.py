"""The batch of a training step: trajectories as sequences to score and flat tensors over their sampled tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from agentrl.algorithms.aggregation import TokenOwners
from agentrl.algorithms.episodes import EpisodeBatch
from agentrl.errors import LedgerError, TrainingError
from agentrl.training.scoring.sequences import ScoredSequence, scored_sequence
from agentrl.training.step.anchor_states import turn_states
from agentrl.training.step.rewards import RewardShaping
from agentrl.trajectory import Source, TokenSequence, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step's sampled tokens, laid out sequence after sequence; observations exist only inside `sequences`."""

    sequences: tuple[ScoredSequence, ...]
    """Those with sampled tokens of their own; what a fork shares with its parent is the parent's."""
    starts: tuple[int, ...]
    """Index of each sequence's first token in the flat tensors, and after the last one the number of tokens."""
    sequence_trajectory: tuple[int, ...]
    """Trajectory of each sequence."""
    trajectory_group: tuple[int, ...]
    """Group of each trajectory."""
    behaviour_logp: torch.Tensor
    """log mu: float32 [tokens]."""
    version: torch.Tensor
    """Weight version that sampled each token: int32 [tokens]."""
    owners: TokenOwners
    episodes: EpisodeBatch
    """What advantage estimators read."""
    expert: torch.Tensor | None = None
    """Tokens that an expert wrote, whose log mu stands as 0: bool [tokens]; ``None`` where there are none."""

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return self.starts[-1]

    @property
    def lengths(self) -> list[int]:
        """Number of sampled tokens of each sequence."""
        return [end - start for start, end in itertools.pairwise(self.starts)]

    def token_index(self, sequences: Sequence[int]) -> torch.Tensor:
        """Flat indices of the tokens of some sequences, in their order: int64 [tokens]."""
        return torch.cat([torch.arange(self.starts[i], self.starts[i + 1]) for i in sequences])

    def sampled_index(self, sequences: Sequence[int]) -> torch.Tensor:
        """The same without an expert's tokens."""
        index = self.token_index(sequences)
        return index if self.expert is None else index[~self.expert[index]]


def step_batch(
    trajectories: Sequence[Trajectory],
    shaping: RewardShaping,
    *,
    experts: Set[str] = frozenset(),
    routes: bool = False,
) -> StepBatch:
    """Lay out trajectories that `agentrl.training.step.selection.select` has kept.

    Args:
        trajectories: Their sampled tokens train.
        shaping: Of the rewards.
        experts: Ids of those whose forced tokens train instead.
        routes: Take along which experts an engine routed their tokens to.

    Raises:
        LedgerError: a sampled token belongs to no turn.
        TrainingError: a sampled token has no log-probability.
    """
    rewards = shaping(trajectories)
    rows = [
        row
        for e, trajectory in enumerate(trajectories)
        for row in _rows(trajectory, e, trajectory.id in experts, routes=routes)
    ]
    groups = {group: i for i, group in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
    trajectory_group = torch.tensor([groups[t.group_id] for t in trajectories])
    first_turn = torch.cat([torch.zeros(1), torch.bincount(rewards.turn_episode, minlength=len(trajectories))]).cumsum(
        0
    )
    counts = torch.tensor([row.scored.targets.numel() for row in rows])
    trajectory = torch.tensor([row.trajectory for row in rows])
    token_trajectory = trajectory.repeat_interleave(counts)
    return StepBatch(
        sequences=tuple(row.scored for row in rows),
        starts=(0, *counts.cumsum(0).tolist()),
        sequence_trajectory=tuple(trajectory.tolist()),
        trajectory_group=tuple(trajectory_group.tolist()),
        behaviour_logp=torch.from_numpy(np.concatenate([row.logprobs for row in rows])),
        version=torch.from_numpy(np.concatenate([row.versions for row in rows])),
        owners=TokenOwners(
            sequence=torch.arange(len(rows)).repeat_interleave(counts),
            trajectory=token_trajectory,
            group=trajectory_group[token_trajectory],
        ),
        episodes=EpisodeBatch(
            returns=rewards.returns,
            group=trajectory_group,
            turn_reward=rewards.turn_reward,
            turn_episode=rewards.turn_episode,
            turn_state=turn_states(trajectories),
            token_turn=torch.from_numpy(np.concatenate([row.turn for row in rows]))
            + first_turn.long()[token_trajectory],
            components=_components(trajectories),
        ),
        expert=torch.tensor([trajectories[row.trajectory].id in experts for row in rows]).repeat_interleave(counts)
        if experts
        else None,
    )


def _components(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Reward components by name: float64 [episodes]; NaN where an episode lacks one."""
    names = dict.fromkeys(name for t in trajectories for name in t.reward_components)
    return {
        name: torch.tensor([t.reward_components.get(name, math.nan) for t in trajectories], dtype=torch.float64)
        for name in names
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    scored: ScoredSequence
    trajectory: int
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    turn: npt.NDArray[np.int64]
    """Of each sampled token, counted within the trajectory."""


def _rows(trajectory: Trajectory, number: int, by_expert: bool, *, routes: bool) -> list[_Row]:
    order = {id(turn): k for k, turn in enumerate(trajectory.turns)}
    found = []
    for sequence in trajectory.sequences:
        mask = trained_mask(sequence, by_expert=by_expert)
        if mask.any():
            logprobs = np.zeros(len(sequence), dtype=np.float32) if by_expert else sequence.logprobs
            found.append(_row(trajectory, number, sequence, mask, logprobs[mask], order, routes=routes))
    return found


def trained_mask(sequence: TokenSequence, *, by_expert: bool) -> npt.NDArray[np.bool_]:
    """Which tokens of a sequence train: what was sampled in it, or what an expert wrote in it: bool [T]."""
    if not by_expert:
        return sequence.loss_mask
    mask: npt.NDArray[np.bool_] = np.equal(sequence.sources, Source.FORCED)
    mask[: sequence.shared] = False
    return mask


def _row(
    trajectory: Trajectory,
    number: int,
    sequence: TokenSequence,
    mask: npt.NDArray[np.bool_],
    logprobs: npt.NDArray[np.float32],
    order: dict[int, int],
    *,
    routes: bool,
) -> _Row:
    turn = np.full(len(sequence), -1, dtype=np.int64)
    for own in sequence.turns:
        turn[own.start : own.end] = order[id(own)]
    if (turn[mask] < 0).any():
        first = int(np.flatnonzero(mask & (turn < 0))[0])
        raise LedgerError(f"a sampled token of trajectory {trajectory.id} belongs to no turn", got=f"token {first}")
    if not np.isfinite(logprobs).all():
        raise TrainingError(
            f"a sampled token of trajectory {trajectory.id} has no log-probability",
            got=logprobs[~np.isfinite(logprobs)][0],
            expected="a finite number",
            hint="use an engine that returns log-probabilities",
        )
    scored = scored_sequence(sequence.token_ids, mask, sequence.images, sequence.routes if routes else None)
    versions = sequence.versions[mask]
    return _Row(scored=scored, trajectory=number, logprobs=logprobs, versions=versions, turn=turn[mask])
