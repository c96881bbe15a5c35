"""Dynamic sampling and selection: the groups worth training on, and the episodes of them that train.

Both use the rewards before ``algorithm.shaping``: a length penalty alone does not make a group worth training on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

import torch

from agentrl.algorithms.group_selection import compared_by, group_spreads, in_band, resample_on_correct, top_p_groups
from agentrl.algorithms.types import EpisodeBatch
from agentrl.config.algorithm import SelectionConfig
from agentrl.config.config import AlgorithmConfig, Config
from agentrl.config.derived import per_environment_configs
from agentrl.errors import ConfigError, did_you_mean
from agentrl.registry import Kind, lookup
from agentrl.training.batch import NothingToTrain, StepExtras, episode_batch, select, trained_mask
from agentrl.training.gradients import Objective
from agentrl.training.rewards import RewardShaping, success_of
from agentrl.training.roles import role_extras, role_members
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLearner:
    """Learner of a group: the policy, or one of several adapters."""

    algorithm: AlgorithmConfig
    roles: Set[str] | None = None
    """Roles whose tokens train it; ``None`` means all."""


class DynamicSampling:
    """Predicate of groups from which at least one learner can learn.

    Raises:
        ConfigError: an estimator does not take an option.
    """

    def __init__(self, learners: Iterable[GroupLearner]) -> None:
        self._objectives = [(Objective(learner.algorithm), learner.roles) for learner in learners]
        self._shaping = RewardShaping({}, max_tokens=1)

    def has_signal(self, trajectories: Sequence[Trajectory], extras: StepExtras | None = None) -> bool:
        """Return True if an estimator tells the episodes of a group apart; failed episodes are skipped.

        Raises:
            TrainingError: an estimator failed.
        """
        extras = role_extras(extras or StepExtras(), trajectories)
        return any(
            self._objective_has_signal(objective, roles, trajectories, extras) for objective, roles in self._objectives
        )

    def _objective_has_signal(
        self, objective: Objective, roles: Set[str] | None, trajectories: Sequence[Trajectory], extras: StepExtras
    ) -> bool:
        members = [*role_members(trajectories, roles), *extras.experts]
        try:
            kept = select(members, compare_groups=objective.compares_groups)
        except NothingToTrain:
            return False
        return bool(objective.differing_groups(unshaped_episodes(kept, extras, self._shaping)).any())


def unshaped_episodes(trajectories: Sequence[Trajectory], extras: StepExtras, unshaped: RewardShaping) -> EpisodeBatch:
    """Make the input of estimators from the rewards before shaping.

    Args:
        trajectories: Trajectories that `select` has kept.
        extras: Extra rollouts of their groups.
        unshaped: Shaping without steps.
    """
    token_turn, first = list[torch.Tensor](), 0
    for trajectory in trajectories:
        token_turn.append(first + _turn_of_tokens(trajectory, by_expert=trajectory.id in extras.expert_ids))
        first += len(trajectory.turns)
    batch = episode_batch(trajectories, unshaped(trajectories), torch.cat(token_turn))
    groups = dict.fromkeys(trajectory.group_id for trajectory in trajectories)
    greedy = [extras.greedy[group] for group in groups if group in extras.greedy]
    if len(greedy) < len(groups):
        return batch
    return replace(batch, greedy_return=unshaped(greedy).returns)


def accuracy(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the share of solved episodes; of rewards if success is not reported, ``None`` without scored episodes."""
    scored = [trajectory for trajectory in trajectories if trajectory.is_trainable]
    if not scored:
        return None
    return sum(success_of(trajectory) for trajectory in scored) / len(scored)


def is_in_band(config: SelectionConfig, trajectories: Sequence[Trajectory]) -> bool:
    """Return True if the accuracy of a group is within the limits of ``algorithm.selection``."""
    found = accuracy(trajectories)
    low = 0.0 if config.min_accuracy is None else config.min_accuracy
    high = 1.0 if config.max_accuracy is None else config.max_accuracy
    return found is not None and bool(in_band(torch.tensor(found, dtype=torch.float64), low, high))


class EpisodeSelection:
    """Selection of a step's groups and episodes by ``algorithm.selection``, in the trainer.

    Args:
        config: The section.
        algorithm: Algorithm, whose estimator determines how a group's episodes are compared.
    """

    def __init__(self, config: SelectionConfig, algorithm: AlgorithmConfig) -> None:
        self._config = config
        self._shaping = RewardShaping({}, max_tokens=1)
        self._weights = algorithm.advantage_options.get("weights")
        if config.top_p is not None:
            objective, estimator = Objective(algorithm), lookup(Kind.ADVANTAGE, algorithm.advantage)
            self._compared = compared_by(estimator, objective.estimate)

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> EpisodeSelection | None:
        """Make the selection of an algorithm; ``None`` if all episodes train."""
        return None if algorithm.selection is None else cls(algorithm.selection, algorithm)

    def __call__(
        self, trajectories: Sequence[Trajectory], extras: StepExtras
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """Return the episodes that train, and metrics of those that were left out, if any.

        Experts' episodes and those that cannot train are kept with their group.
        """
        kept, top_p = self._resample(trajectories, extras), self._config.top_p
        before = {trajectory.group_id for trajectory in trajectories}
        chosen = before if top_p is None else self._top_groups(kept, extras, top_p)
        trained = [trajectory for trajectory in kept if trajectory.group_id in chosen]
        counts = {
            "groups/left_out": len(before) - len(chosen),
            "trajectories/left_out": sum(one.group_id in chosen for one in trajectories) - len(trained),
        }
        return trained, {name: float(count) for name, count in counts.items() if count}

    def _resample(self, trajectories: Sequence[Trajectory], extras: StepExtras) -> Sequence[Trajectory]:
        settings = self._config.resample
        if settings is None:
            return trajectories
        left_out: set[str] = set()
        for own in _by_group(trajectories, extras).values():
            penalty = [sum(t.reward_components.get(name, 0.0) for name in settings.penalties) for t in own]
            places = resample_on_correct(
                [success_of(trajectory) > 0 for trajectory in own],
                penalty,
                keep=settings.keep,
                least_right=settings.least_right,
                least_wrong=settings.least_wrong,
            )
            left_out |= {one.id for one in own} - {own[place].id for place in places}
        return [trajectory for trajectory in trajectories if trajectory.id not in left_out]

    def _top_groups(self, trajectories: Sequence[Trajectory], extras: StepExtras, share: float) -> set[str]:
        """Return the ids of the groups with the largest spreads; all if none has any."""
        own = [one for group in _by_group(trajectories, extras).values() for one in group]
        groups = list(dict.fromkeys(trajectory.group_id for trajectory in own))
        if not own:
            return {trajectory.group_id for trajectory in trajectories}
        episodes = unshaped_episodes(own, extras, self._shaping)
        spread = group_spreads(self._compared, episodes, weights=self._weights)
        chosen = top_p_groups(spread, share, scale=self._config.top_p_scale).tolist()
        top = {group for group, is_chosen in zip(groups, chosen, strict=True) if is_chosen} or set(groups)
        return top | ({trajectory.group_id for trajectory in trajectories} - set(groups))


def _by_group(trajectories: Sequence[Trajectory], extras: StepExtras) -> dict[str, list[Trajectory]]:
    """Return the policy's episodes that can train, by group."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.is_trainable and trajectory.id not in extras.expert_ids:
            found.setdefault(trajectory.group_id, []).append(trajectory)
    return found


def _turn_of_tokens(trajectory: Trajectory, *, by_expert: bool) -> torch.Tensor:
    """Return the turn, counted within the episode, of each token that trains: int64 [tokens]."""
    order = {id(turn): number for number, turn in enumerate(trajectory.turns)}
    counts = torch.zeros(len(order), dtype=torch.int64)
    for sequence in trajectory.sequences:
        mask = trained_mask(sequence, by_expert=by_expert)
        for turn in sequence.turns:
            counts[order[id(turn)]] = int(mask[turn.start : turn.end].sum())
    return torch.arange(len(order)).repeat_interleave(counts)


def check_selection(config: Config) -> None:
    """Check that ``algorithm.selection`` names rewards of the run.

    Raises:
        ConfigError: a penalty is not among the rewards in ``agent.reward``.
    """
    selection = config.algorithm.selection
    if selection is None or selection.resample is None or not config.has_environment:
        return
    for part in per_environment_configs(config):
        known = [entry if isinstance(entry, str) else str(entry["name"]) for entry in part.config.agent.reward]
        for name in selection.resample.penalties:
            if name not in known:
                raise ConfigError(
                    f"algorithm.selection.resample.penalties names {name}, which is not a reward of the run",
                    expected=", ".join(known),
                    hint=did_you_mean(name, known) or f"add it to agent.reward: {{name: {name}, weight: 0}}",
                )
