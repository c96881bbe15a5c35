"""The batch of a training step: the trained trajectories, their sampled tokens as flat tensors, the mini-batches.

A trajectory's token sequences become `ScoredSequence`s; a `StepBatch` holds one number per sampled token.
"""

from __future__ import annotations

import itertools
import math
import random
import shlex
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from agentrl.algorithms.aggregation import TokenOwners
from agentrl.algorithms.types import EpisodeBatch
from agentrl.engine import TopTokens
from agentrl.errors import A_REWARD, LedgerError, TrainingError, bounded_reward
from agentrl.render.translation import Translation
from agentrl.training.forward.logprobs import TeacherLogprobs
from agentrl.training.forward.sequences import ScoredSequence, scored_sequence
from agentrl.training.rewards import RewardShaping, ShapedRewards
from agentrl.trajectory import Source, TokenSequence, Trajectory, base_role, role_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExtras:
    """Extra rollouts of a step's groups and log-probabilities of a served teacher."""

    greedy: Mapping[str, Trajectory] = field(default_factory=dict)
    """Greedy rollout of each group's task, by group id, for ``remax``; it does not train."""
    experts: Sequence[Trajectory] = ()
    """Additional group members whose forced tokens are trained, for ``luffy``."""
    teacher_logp: Mapping[str, Sequence[npt.NDArray[np.float32]]] = field(default_factory=dict)
    """log p of a served teacher, by trajectory id: float32 [T] for each sequence, NaN for its first token. With
    `translations`, log p of the tokens of `Translation.scored_groups` instead."""
    teacher_top: Mapping[str, Sequence[TopTokens]] = field(default_factory=dict)
    """The teacher's most probable tokens, by trajectory id, for each sequence; empty without ``teacher.top_k``."""
    translations: Mapping[str, Sequence[Translation]] = field(default_factory=dict)
    """Each sequence in the tokens of a teacher with another tokenizer, by trajectory id; empty for other teachers."""
    hints: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Token ids of the hint that only the teacher reads before each sequence, by trajectory id."""
    environments: Mapping[str, str] = field(default_factory=dict)
    """Environment label of each group, by group id."""

    @property
    def expert_ids(self) -> frozenset[str]:
        """Ids of the experts' trajectories."""
        return frozenset(trajectory.id for trajectory in self.experts)


def turn_states(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Number the states in which turns were taken: int64 [turns], by trajectory, then by time.

    Two turns of a group have the same state if the environment gave both the same state key. Without a key, the tokens
    and images of the observation before the turn identify the state. States of different groups are different.
    """
    numbers: dict[Hashable, int] = {}
    return torch.tensor(
        [
            numbers.setdefault((trajectory.group_id, state), len(numbers))
            for trajectory in trajectories
            for state in _states(trajectory)
        ],
        dtype=torch.int64,
    )


def _states(trajectory: Trajectory) -> Iterator[Hashable]:
    observations = dict(entry for sequence in trajectory.sequences for entry in _observations(sequence))
    for turn in trajectory.turns:
        yield observations[turn.index] if turn.state_key is None else turn.state_key


def _observations(sequence: TokenSequence) -> Iterator[tuple[int, Hashable]]:
    """Yield the index of each turn without a state key, with the observation since the previous turn."""
    if all(turn.state_key is not None for turn in sequence.turns):
        return
    ids, is_input, before = sequence.token_ids, np.isin(sequence.sources, (Source.PROMPT, Source.OBSERVATION)), 0
    for turn in sequence.turns:
        if turn.state_key is None:
            images = tuple(image.image.checksum for image in sequence.images if before <= image.start < turn.start)
            yield turn.index, (ids[before : turn.start][is_input[before : turn.start]].tobytes(), images)
        before = turn.end


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step's sampled tokens, sequence after sequence; observation tokens exist only inside `sequences`."""

    sequences: tuple[ScoredSequence, ...]
    """Sequences with sampled tokens of their own; the tokens that a fork shares with its parent count as the parent's.
    """
    starts: tuple[int, ...]
    """Index of each sequence's first token in the flat tensors, followed by the number of tokens."""
    sequence_trajectory: tuple[int, ...]
    behaviour_logp: torch.Tensor
    """log mu, from the engine: float32 [tokens]."""
    version: torch.Tensor
    """Weight version that sampled each token: int32 [tokens]."""
    owners: TokenOwners
    episodes: EpisodeBatch
    """Input of advantage estimators."""
    advantage: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Advantage of each token: float32 [tokens]; empty until it is estimated."""
    expert: torch.Tensor | None = None
    """Mask of tokens that an expert wrote, whose log mu is stored as 0: bool [tokens]; ``None`` without experts."""
    trajectories: Sequence[Trajectory] = ()
    parts: Sequence[list[int]] = ()
    """Indices of the sequences of each update."""
    step_version: int = 0
    """Weight version at the start of the step."""
    reference_logp: torch.Tensor | None = None
    """Log-probabilities of the reference policy: float32 [tokens], on the policy's device."""
    teacher: TeacherLogprobs | None = None
    """Log-probabilities of a teacher, on the policy's device."""
    extras: StepExtras = field(default_factory=StepExtras)
    temperature: float = 1.0
    """Sampling temperature of all tokens."""
    needs_forward: Sequence[bool] = ()
    """Mask of the sequences that need a forward pass of the policy."""
    sample_counts: torch.Tensor | None = None
    """Number of times that resampling drew each trajectory: int64 [trajectories], on the CPU; ``None`` means once."""
    seed: int = 0
    """Seed of the run's random choices in updates."""

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return self.starts[-1]

    @property
    def lengths(self) -> list[int]:
        """Number of sampled tokens of each sequence."""
        return [end - start for start, end in itertools.pairwise(self.starts)]

    def token_index(self, sequences: Sequence[int]) -> torch.Tensor:
        """Return the flat indices of the tokens of some sequences, in their order: int64 [tokens]."""
        return torch.cat([torch.arange(self.starts[i], self.starts[i + 1]) for i in sequences])

    def sampled_index(self, sequences: Sequence[int]) -> torch.Tensor:
        """Return the flat indices of the tokens of some sequences, without an expert's tokens: int64 [tokens]."""
        index = self.token_index(sequences)
        return index if self.expert is None else index[~self.expert[index]]

    def episodes_in(self, sequences: Sequence[int]) -> int:
        """Count the episodes of some sequences."""
        return len({self.sequence_trajectory[sequence] for sequence in sequences})

    def draw(self, update: int) -> int:
        """Derive the seed of random choices in an update of the step, counted from 0: in [0, 2^63)."""
        return random.Random(f"{self.seed} {self.step_version} {update}").getrandbits(63)


def step_batch(
    trajectories: Sequence[Trajectory],
    shaping: RewardShaping,
    *,
    experts: Set[str] = frozenset(),
    routes: bool = False,
) -> StepBatch:
    """Build the batch from the trajectories that `select` returned.

    Their sampled tokens are trained or, for ids in `experts`, their forced tokens. With `routes`,
    sequences keep the experts to which an engine routed their tokens.

    Raises:
        LedgerError: a sampled token does not belong to a turn.
        TrainingError: a sampled token has no valid log-probability.
    """
    rewards = shaping(trajectories)
    sequences: list[ScoredSequence] = []
    owner: list[int] = []
    columns: list[_Columns] = []
    for number, each in enumerate(trajectories):
        for scored, own in _trained_tokens(each, by_expert=each.id in experts, routes=routes):
            sequences.append(scored)
            owner.append(number)
            columns.append(own)
    logprobs, versions, turns = (torch.from_numpy(np.concatenate(column)) for column in zip(*columns, strict=True))
    first_turn = torch.cat([torch.zeros(1), torch.bincount(rewards.turn_episode, minlength=len(trajectories))]).cumsum(
        0
    )
    counts = torch.tensor([sequence.targets.numel() for sequence in sequences])
    trajectory = torch.tensor(owner)
    token_trajectory = trajectory.repeat_interleave(counts)
    episodes = episode_batch(trajectories, rewards, turns + first_turn.long()[token_trajectory])
    return StepBatch(
        sequences=tuple(sequences),
        starts=(0, *counts.cumsum(0).tolist()),
        sequence_trajectory=tuple(owner),
        behaviour_logp=logprobs,
        version=versions,
        owners=TokenOwners(
            sequence=torch.arange(len(sequences)).repeat_interleave(counts),
            trajectory=token_trajectory,
            group=episodes.group[token_trajectory],
        ),
        episodes=episodes,
        trajectories=tuple(trajectories),
        expert=torch.tensor([trajectories[e].id in experts for e in owner]).repeat_interleave(counts)
        if experts
        else None,
    )


def episode_batch(trajectories: Sequence[Trajectory], rewards: ShapedRewards, token_turn: torch.Tensor) -> EpisodeBatch:
    """Make the input of estimators; `token_turn` is the turn of each token that trains, counted over all episodes."""
    return EpisodeBatch(
        returns=rewards.returns,
        group=_group_numbers(trajectories),
        turn_reward=rewards.turn_reward,
        turn_episode=rewards.turn_episode,
        turn_state=turn_states(trajectories),
        token_turn=token_turn,
        components=_components(trajectories),
        role_kind=_role_kinds(trajectories),
        **_branches(trajectories),
    )


def _group_numbers(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    groups = {group: i for i, group in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
    return torch.tensor([groups[t.group_id] for t in trajectories])


def _role_kinds(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Number the roles and types of task of each environment: int64 [episodes]."""
    numbers: dict[Hashable, int] = {}
    kinds = [(t.environment, base_role(role_of(t)), t.task_type) for t in trajectories]
    return torch.tensor([numbers.setdefault(kind, len(numbers)) for kind in kinds])


def _branches(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Return the tree of each episode and the number of turns that it shares; empty without branches."""
    if all(trajectory.branches_from is None for trajectory in trajectories):
        return {}
    numbers: dict[str, int] = {}
    trunks = [
        trajectory.id if trajectory.branches_from is None else trajectory.branches_from.parent
        for trajectory in trajectories
    ]
    shared = [-1 if trajectory.branches_from is None else trajectory.branches_from.turn for trajectory in trajectories]
    return {
        "tree": torch.tensor([numbers.setdefault(trunk, len(numbers)) for trunk in trunks]),
        "branch_turn": torch.tensor(shared),
    }


def _components(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Collect reward components by name: float64 [episodes]; NaN where an episode lacks one."""
    names = dict.fromkeys(name for t in trajectories for name in t.reward_components)
    return {
        name: torch.tensor([t.reward_components.get(name, math.nan) for t in trajectories], dtype=torch.float64)
        for name in names
    }


_Columns = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.int64]]
"""Log-probability, version and turn (counted within the trajectory) of each token that trains."""


def _trained_tokens(
    trajectory: Trajectory, *, by_expert: bool, routes: bool
) -> Iterator[tuple[ScoredSequence, _Columns]]:
    order = {id(turn): k for k, turn in enumerate(trajectory.turns)}
    for sequence in trajectory.sequences:
        mask = trained_mask(sequence, by_expert=by_expert)
        if not mask.any():
            continue
        logprobs = (np.zeros(len(sequence), dtype=np.float32) if by_expert else sequence.logprobs)[mask]
        turn = np.full(len(sequence), -1, dtype=np.int64)
        for own in sequence.turns:
            turn[own.start : own.end] = order[id(own)]
        if (turn[mask] < 0).any():
            first = int(np.flatnonzero(mask & (turn < 0))[0])
            raise LedgerError(
                f"a sampled token of trajectory {trajectory.id} does not belong to a turn", got=f"token {first}"
            )
        if not (possible := np.isfinite(logprobs) & (logprobs <= 0)).all():
            raise TrainingError(
                f"a sampled token of trajectory {trajectory.id} has no valid log-probability",
                got=logprobs[~possible][0],
                expected="a finite number that is at most 0",
                hint="use an engine that returns log-probabilities",
            )
        scored = scored_sequence(sequence.token_ids, mask, sequence.images, sequence.routes.experts if routes else None)
        yield scored, (logprobs, sequence.versions[mask], turn[mask])


def trained_mask(sequence: TokenSequence, *, by_expert: bool) -> npt.NDArray[np.bool_]:
    """Mark a sequence's trained tokens, sampled or written by an expert: bool [T]; shared tokens are excluded."""
    if not by_expert:
        return sequence.loss_mask
    mask: npt.NDArray[np.bool_] = np.equal(sequence.sources, Source.FORCED)
    mask[: sequence.shared] = False
    return mask


def mini_batches(
    batch: StepBatch, count: int, generator: torch.Generator, *, whole_groups: bool = False
) -> list[list[int]]:
    """Split the sequences into `count` parts with nearly equal numbers of groups, in random order; return indices.

    Groups stay whole, so that a mean over a group's tokens is over the whole group. With fewer groups than parts, only
    trajectories stay whole, unless `whole_groups` is true. With fewer units than parts, fewer parts are returned.
    """
    group_of = batch.episodes.group.tolist()
    groups = [group_of[trajectory] for trajectory in batch.sequence_trajectory]
    units = groups if whole_groups or len(set(groups)) >= count else list(batch.sequence_trajectory)
    members: dict[int, list[int]] = {}
    for sequence, unit in enumerate(units):
        members.setdefault(unit, []).append(sequence)
    names = list(members)
    order = torch.randperm(len(names), generator=generator).tolist()
    parts = min(count, len(names))
    bounds = [len(names) * part // parts for part in range(parts + 1)]
    return [
        [sequence for i in order[low:high] for sequence in members[names[i]]]
        for low, high in itertools.pairwise(bounds)
    ]


def row_batches(batch: StepBatch, rows: int, generator: torch.Generator) -> list[list[int]]:
    """Split the sequences into parts of `rows`, in random order; the last one has the rest. Return indices."""
    order = torch.randperm(len(batch.sequences), generator=generator).tolist()
    return [sorted(order[first : first + rows]) for first in range(0, len(order), rows)]


class NothingToTrain(TrainingError):
    """A step that has no trajectory to train on."""


def select(trajectories: Sequence[Trajectory], *, compare_groups: bool) -> list[Trajectory]:
    """Select trajectories with a valid outcome and a reward; with `compare_groups`, only in groups of two or more.

    Raises:
        TrainingError: a reward is not finite, or is too large.
        NothingToTrain: no selected trajectory has a sampled token.
    """
    scored = [t for t in trajectories if t.is_trainable]
    for trajectory in scored:
        _check_rewards(trajectory)
    members = Counter(t.group_id for t in scored)
    lone = {group for group, count in members.items() if count < 2} if compare_groups else set()
    kept = [t for t in scored if t.group_id not in lone]
    if not any(t.sampled_tokens for t in kept):
        counts = skipped_metrics(trajectories, kept)
        raise NothingToTrain(
            "no trajectory of this step can be trained on",
            got=f"{len(trajectories)} trajectories: {counts['trajectories/infrastructure']:.0f} without a valid end, "
            f"{counts['trajectories/unscored']:.0f} without a reward, {counts['groups/skipped']:.0f} groups of one, "
            f"{len(kept)} without a sampled token ({_ends(kept)})",
            expected="sampled tokens in groups of two or more" if compare_groups else "sampled tokens and a reward",
            hint="if prompts leave no room for an answer, raise agent.max_tokens" if kept else None,
        )
    return kept


def skipped_metrics(trajectories: Sequence[Trajectory], selected: Sequence[Trajectory]) -> dict[str, float]:
    """Count what `select` skipped: groups of one, infrastructure failures, and trajectories without a reward.

    A missing outcome counts as a failure; a missing reward is not the same as a reward of 0.
    """
    ended = [t for t in trajectories if t.outcome is not None and t.outcome.is_trainable]
    scored = [t for t in ended if t.reward is not None]
    lone = {t.group_id for t in scored} - {t.group_id for t in selected}
    return {
        "groups/skipped": float(len(lone)),
        "trajectories/infrastructure": float(len(trajectories) - len(ended)),
        "trajectories/unscored": float(len(ended) - len(scored)),
    }


def _ends(trajectories: Sequence[Trajectory]) -> str:
    ends = Counter(str(trajectory.outcome) for trajectory in trajectories)
    return ", ".join(f"{count} {end}" for end, count in ends.most_common()) or "none"


def _check_rewards(trajectory: Trajectory) -> None:
    named = {"reward": trajectory.reward or 0.0}
    named.update({f"reward of turn {turn.index}": turn.reward for turn in trajectory.turns})
    for name, value in named.items():
        if bounded_reward(value) is None:
            problem = "is too large" if math.isfinite(value) else "is not finite"
            raise TrainingError(
                f"{name} of task {trajectory.task_id} {problem} "
                f"(environment {trajectory.environment}, trajectory {trajectory.id})",
                got=value,
                expected=A_REWARD,
                hint=f"see agentrl env check {shlex.quote(trajectory.environment)}",
            )
