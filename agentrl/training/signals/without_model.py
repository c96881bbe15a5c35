"""Signals without a model of their own.

`GreedyBaseline` and `ExpertSignal` are for rollouts that are not the policy's samples: greedy rollouts, and the
episodes of ``algorithm.expert``. These come with the step (`agentrl.training.batch.StepExtras`); `step_batch` lays out
the forced tokens of an expert's episodes. `RunningBaseline` keeps numbers of roles, task types or tasks over steps.

`ScoreNorm`, `WindowEntropy` and `ObservationLoss` need a further pass of the policy over the step's sequences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from agentrl.algorithms.options import check_options
from agentrl.algorithms.running_baselines import BaselineTracker
from agentrl.algorithms.traits import Input, needed_inputs, tracker_of
from agentrl.algorithms.types import Estimate
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.config.step_settings import STAGE_MARK
from agentrl.errors import ConfigError, TrainingError
from agentrl.observe.trajectory_record import environment_label
from agentrl.registry import Kind, lookup
from agentrl.training.batch import StepBatch, trained_mask
from agentrl.training.forward.runner import ModelRunner, SumsByName
from agentrl.training.forward.sequences import ScoredSequence, scored_sequence
from agentrl.training.rewards import RewardShaping, success_of
from agentrl.training.signals.base import SignalSetup, SignalUpdates, TokenSignal
from agentrl.trajectory import Source, TokenSequence, Trajectory, base_role, role_of

PROBABLE_TOKENS = 64
"""Number of most probable tokens whose squared probabilities are summed; the others add at most 1/64 of their mass."""


class GreedyBaseline(TokenSignal):
    """Returns of greedy rollouts, shaped like other returns but without KL in the reward."""

    name = "greedy_baseline"

    def __init__(self, shaping: RewardShaping) -> None:
        self._shaping = shaping

    @classmethod
    def build(cls, setup: SignalSetup) -> GreedyBaseline:
        """Build the signal; it does not change steps without greedy rollouts."""
        return cls(setup.shaping)

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add the return of each group's greedy rollout, if the step has any.

        Raises:
            TrainingError: only some groups have a greedy rollout with a reward.
        """
        greedy = batch.extras.greedy
        if not greedy:
            return batch
        groups = dict.fromkeys(trajectory.group_id for trajectory in batch.trajectories)
        if missing := [group for group in groups if group not in greedy or greedy[group].reward is None]:
            raise TrainingError(
                f"group {missing[0]} has no greedy rollout with a reward",
                got=f"{len(missing)} of {len(groups)} groups without one",
                expected="a greedy rollout with a reward for every group",
            )
        returns = self._shaping([greedy[group] for group in groups]).returns
        return dataclasses.replace(batch, episodes=dataclasses.replace(batch.episodes, greedy_return=returns))


class RunningBaseline(TokenSignal):
    """Baselines of the step's episodes; each episode's return then changes the baseline of its role or task.

    The baselines are part of the trainer's state.
    """

    name = "running_baseline"

    def __init__(self, tracker: BaselineTracker) -> None:
        self._tracker = tracker
        self._numbers: dict[str, Sequence[float]] = {}

    @classmethod
    def build(cls, setup: SignalSetup) -> RunningBaseline | None:
        """Build the signal, if the estimator keeps baselines."""
        estimator = lookup(Kind.ADVANTAGE, setup.algorithm.advantage)
        tracker = tracker_of(estimator)
        return None if tracker is None else cls(tracker(**check_options(estimator, setup.algorithm.advantage_options)))

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add the baseline of each episode, in the order of the batch."""
        found = []
        for trajectory, reward in zip(batch.trajectories, batch.episodes.returns.tolist(), strict=True):
            key = self._key(trajectory)
            numbers = self._numbers.get(key, self._tracker.start)
            found.append(self._tracker.baseline(numbers))
            self._numbers[key] = self._tracker.update(numbers, reward)
        baseline = torch.tensor(found, dtype=torch.float64)
        return dataclasses.replace(batch, episodes=dataclasses.replace(batch.episodes, baseline=baseline))

    def _key(self, trajectory: Trajectory) -> str:
        settings = environment_label(trajectory.group_id, trajectory.task_id)
        label = settings.partition(STAGE_MARK)[0]
        parts = [trajectory.environment, base_role(role_of(trajectory))]
        of_unit = {
            "role": [label],
            "kind": [trajectory.task_type or "", label],
            "task": [trajectory.task_id, settings],  # rows of different files may have the same ids
        }
        return " ".join([*parts, *of_unit[self._tracker.unit]]).rstrip()

    def metrics(self) -> dict[str, float]:
        """Return the number of baselines."""
        return {"train/running_baselines": float(len(self._numbers))}

    def state(self) -> RunningBaseline:
        """Return all baselines."""
        return self

    def named_state(self) -> dict[str, torch.Tensor]:
        """Return the baseline of each role or task by name."""
        return {key: torch.tensor(numbers, dtype=torch.float64) for key, numbers in self._numbers.items()}

    def allocate_state(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Allocate tensors for a saved state with these names."""
        return {name: torch.zeros(len(self._tracker.start), dtype=torch.float64) for name in names}

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of `allocate_state` after they have been filled."""
        self._numbers = {name: tuple(numbers.tolist()) for name, numbers in state.items()}


class ExpertSignal(TokenSignal):
    """Mask of the tokens that an expert wrote, for a loss that treats them differently."""

    name = "expert"

    @classmethod
    def check(cls, algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool) -> None:
        """Check that there is an expert if, and only if, the loss can train on its tokens."""
        expert = algorithm.expert
        if expert is None:
            if reads_expert(algorithm):
                raise ConfigError(
                    f"the loss {algorithm.loss} needs {Input.EXPERT}",
                    got="no algorithm.expert",
                    expected="algorithm.expert={members: 1}",
                )
            return
        if not reads_expert(algorithm):
            raise ConfigError(
                f"the loss {algorithm.loss} cannot train on the tokens of algorithm.expert, which the policy did not "
                "sample",
                expected="algorithm.loss=luffy, or no algorithm.expert",
            )
        if expert.members >= algorithm.group_size:
            raise ConfigError(
                "algorithm.expert plays all episodes of a group",
                got=f"algorithm.expert.members {expert.members} of algorithm.group_size {algorithm.group_size}",
                expected=f"at most {algorithm.group_size - 1}",
            )
        if algorithm.correction.proximal != "trainer":
            raise ConfigError(
                "an expert's tokens have no sampling probability mu",
                got=f"algorithm.correction.proximal {algorithm.correction.proximal}",
                expected="algorithm.correction.proximal=trainer",
            )
        if "kl" in algorithm.shaping:
            raise ConfigError(
                "the shaping kl needs sampled tokens, and an expert's tokens were not sampled",
                got="algorithm.expert and the shaping kl",
                expected="algorithm.kl_coef, which adds the KL to the loss",
            )

    @classmethod
    def build(cls, setup: SignalSetup) -> ExpertSignal | None:
        """Build the signal, if the loss reads it."""
        return cls() if reads_expert(setup.algorithm) else None

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Fill `batch.expert` with False if the step has no expert's episode."""
        if batch.expert is not None:
            return batch
        return dataclasses.replace(batch, expert=torch.zeros(batch.tokens, dtype=torch.bool))


def needs_greedy_rollouts(algorithm: AlgorithmConfig) -> bool:
    """Return True if the advantage estimator compares episodes with a greedy rollout of their task."""
    return Input.GREEDY_RETURN in needed_inputs(lookup(Kind.ADVANTAGE, algorithm.advantage))


def reads_expert(algorithm: AlgorithmConfig) -> bool:
    """Return True if the loss treats an expert's tokens differently from the policy's."""
    return Input.EXPERT in needed_inputs(lookup(Kind.LOSS, algorithm.loss))


class ScoreNorm(TokenSignal):
    """Squared norm of the gradient of log pi by the logits at each token, in one forward pass of the policy.

    It measures the variance of a token's gradient, for an estimator with optimal baselines.
    """

    name = "score_norm"

    def __init__(self, policy: ModelRunner) -> None:
        self._policy = policy

    @classmethod
    def build(cls, setup: SignalSetup) -> ScoreNorm | None:
        """Build the signal, if the estimator reads it."""
        estimator = lookup(Kind.ADVANTAGE, setup.algorithm.advantage)
        return cls(setup.policy) if Input.SCORE_NORM in needed_inputs(estimator) else None

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add 1 - 2 pi + sum pi^2 of each token, where the sum is over the most probable tokens.

        Raises:
            UsageError: ranks share rows.
        """
        vocabulary = self._policy.model.get_output_embeddings().weight.shape[0]
        found = self._policy.top_logprobs(
            batch.sequences,
            top_k=min(PROBABLE_TOKENS, vocabulary),
            temperature=batch.temperature,
        )
        assert found.top_logp is not None
        norm = 1 - 2 * found.logp.exp() + (2 * found.top_logp).exp().sum(-1)
        return dataclasses.replace(batch, episodes=dataclasses.replace(batch.episodes, score_norm=norm.double().cpu()))


class WindowEntropy(TokenSignal):
    """Rewards for uncertain passages of answers, in one forward pass of the policy, for the shaping ``ares``."""

    name = "window_entropy"

    def __init__(self, policy: ModelRunner, shaping: RewardShaping) -> None:
        self._policy, self._shaping = policy, shaping
        self._metrics: dict[str, float] = {}

    @classmethod
    def build(cls, setup: SignalSetup) -> WindowEntropy | None:
        """Build the signal, if the shaping is configured."""
        return None if setup.shaping.entropy is None else cls(setup.policy, setup.shaping)

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add the shaping's rewards to the last token of each episode."""
        shaping, episodes = self._shaping.entropy, batch.episodes
        assert shaping is not None
        entropy = self._policy.logprobs(batch.sequences, temperature=batch.temperature).entropy
        owner, count = episodes.token_episode, episodes.returns.numel()
        found = shaping.count(entropy.cpu(), episodes.token_turn, owner, count)
        right = torch.tensor([success_of(trajectory) > 0.5 for trajectory in batch.trajectories])
        rewards = shaping.rewards(found.counts, right, episodes.group)
        order = episodes.time_order
        places = torch.arange(order.numel())
        last = order[places.new_zeros(count).scatter_reduce(0, owner[order], places, "amax")]
        has_tokens = episodes.episode_tokens > 0
        added = torch.zeros(order.numel(), dtype=torch.float64).index_add(0, last[has_tokens], rewards[has_tokens])
        self._metrics = {"ares/uncertain_tokens": float(found.counts.mean()), "ares/reward": float(rewards.mean())}
        if math.isfinite(found.threshold):
            self._metrics["ares/threshold"] = found.threshold
        return dataclasses.replace(batch, episodes=episodes.with_token_reward(added))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last step."""
        return self._metrics


class ObservationLoss(TokenSignal):
    """Loss of ``algorithm.observation_coef``, in a pass of its own (Echo of prime-rl).

    It teaches the policy to predict the answers of its environment. It covers the tokens of observations after the
    policy's first turn, except for images and tokens of the template, in sequences that train.
    """

    name = "observations"

    def __init__(self, policy: ModelRunner, coef: float) -> None:
        self._policy, self._coef = policy, coef

    @classmethod
    def build(cls, setup: SignalSetup) -> ObservationLoss | None:
        """Build the signal, if observations have a weight."""
        coef = setup.algorithm.observation_coef
        return cls(setup.policy, coef) if coef else None

    def train(self, batch: StepBatch, estimate: Estimate, *, policy_learns: bool) -> SignalUpdates | None:
        """Return the step's additions to the policy's gradients."""
        return _ObservationStep(self._policy, self._coef, batch) if policy_learns else None


class _ObservationStep:
    joins_policy = False

    def __init__(self, policy: ModelRunner, coef: float, batch: StepBatch) -> None:
        self._policy, self._coef, self._batch = policy, coef, batch
        self._sequences = _observed_sequences(batch)
        self._tally = SumsByName()

    def accumulate(self, part: list[int]) -> None:
        """Add the gradient of `coef` times the mean over the update's observation tokens to the policy's."""
        members = [i for i in part if self._sequences[i] is not None]
        sequences = [sequence for i in members if (sequence := self._sequences[i]) is not None]
        if not sequences:
            return
        share = self._coef / sum(sequence.targets.numel() for sequence in sequences)

        def loss(indices: list[int], tally: SumsByName) -> torch.Tensor:
            own = [sequences[i] for i in indices]
            scores = self._policy.score(own, temperature=1.0)
            tally.add("train/observation_loss", -scores.logp)
            return -share * scores.logp.sum()

        self._tally.merge(self._policy.forward_backward(sequences, loss).tally)

    def update(self) -> None:
        """Clear gradients that the policy did not apply, for example after `trainer.max_kl`."""
        self._policy.model.zero_grad(set_to_none=True)

    def leave_out(self) -> None:
        """Drop the gradients of the last `accumulate`."""
        self._policy.model.zero_grad(set_to_none=True)

    def metrics(self) -> dict[str, float]:
        """Return the mean cross-entropy of the observation tokens, before each update."""
        return self._tally.means()


def _observed_sequences(batch: StepBatch) -> Sequence[ScoredSequence | None]:
    """Make the sequences of a batch with observation tokens as targets; ``None`` for those without."""
    found: list[ScoredSequence | None] = []
    for trajectory in batch.trajectories:
        for sequence in trajectory.sequences:
            if trained_mask(sequence, by_expert=trajectory.id in batch.extras.expert_ids).any():
                mask = _observation_mask(sequence)
                scored = scored_sequence(sequence.token_ids, mask, sequence.images) if mask.any() else None
                found.append(scored)
    return found


def _observation_mask(sequence: TokenSequence) -> npt.NDArray[np.bool_]:
    """Mark the observation tokens after the first turn: bool [T]; shared tokens and images are excluded."""
    mask: npt.NDArray[np.bool_] = np.equal(sequence.sources, Source.OBSERVATION)
    mask[: max(sequence.shared, sequence.turns[0].end if sequence.turns else 0)] = False
    for image in sequence.images:
        mask[image.start : image.end] = False
    return mask
