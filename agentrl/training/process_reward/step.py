"""One training step of an implicit process reward model: it learns from the outcomes, and scores the tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from agentrl.algorithms.prime import ScoredAnswers, implicit_reward, prime_reward_model
from agentrl.training.optimizer import Update
from agentrl.training.process_reward.model import ProcessRewardModel
from agentrl.training.step.batch import StepBatch
from agentrl.training.step.tally import Tally
from agentrl.trajectory import Trajectory

UNDECIDED = math.log(2) - 1e-5
"""Loss of an episode above which the model has not told it right; a logit of 0, but for rounding, tells nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A batch, and what was measured on the way."""

    batch: StepBatch
    metrics: dict[str, float] = field(default_factory=dict)
    """Under their final names, all ``process_reward/``."""


def with_process_reward(
    batch: StepBatch,
    model: ProcessRewardModel | None,
    trajectories: Sequence[Trajectory],
    parts: Sequence[list[int]],
    pad_id: int,
) -> Judged:
    """The batch with a reward for each token, from a model that learns from the batch, if there is one.

    Args:
        batch: Of a step.
        model: Trained in place.
        trajectories: Which the batch was made of.
        parts: The sequences of every update.
        pad_id: Any id of the vocabulary.
    """
    if model is None:
        return Judged(batch=batch)
    step = _ProcessRewardStep(model, batch, trajectories, pad_id)
    if model.config.update == "before":
        step.learn(parts)
    rewards = step.rewards()
    if model.config.update == "after":
        step.learn(parts)
    judged = dataclasses.replace(batch, episodes=dataclasses.replace(batch.episodes, process_reward=rewards))
    return Judged(batch=judged, metrics={**step.metrics(), "process_reward/token_mean": float(rewards.mean())})


class _ProcessRewardStep:
    def __init__(
        self, model: ProcessRewardModel, batch: StepBatch, trajectories: Sequence[Trajectory], pad_id: int
    ) -> None:
        self._model, self._batch, self._pad_id = model, batch, pad_id
        above = model.config.success_above
        self._success = torch.tensor([t.reward is not None and t.reward > above for t in trajectories])
        self._start_logp = model.start_logp(batch.sequences, pad_id)
        self._tally = Tally()
        self._updates: list[Update] = []

    def rewards(self) -> torch.Tensor:
        """The reward beta log(pi_rm / pi_ref) of each token under the weights of now: float64 [tokens]."""
        logp = self._model.logp(self._batch.sequences, self._pad_id)
        return implicit_reward(logp, self._start_logp, beta=self._model.config.beta)

    def learn(self, parts: Sequence[list[int]]) -> None:
        """One update for each of some parts."""
        for part in parts:
            self._update(part)

    def _update(self, part: list[int]) -> None:
        """The logit of an episode is a sum over all of its sequences, wherever these are read: so it is computed first,
        and what the loss changes with each token is the weight of that token's log-probability then.
        """
        sequences, index = [self._batch.sequences[i] for i in part], self._batch.token_index(part)
        members, episode = torch.unique(self._batch.owners.trajectory[index], return_inverse=True)
        logp = self._model.logp(sequences, self._pad_id).requires_grad_()
        answers = ScoredAnswers(
            rm_logp=logp, reference_logp=self._start_logp[index], episode=episode, success=self._success[members]
        )
        losses = prime_reward_model(answers, beta=self._model.config.beta)
        self._tally.add("process_reward/loss", losses)
        self._tally.add("process_reward/accuracy", losses < UNDECIDED)
        (by_logp,) = torch.autograd.grad(losses.mean(), logp)
        self._updates.append(self._model.descend(sequences, by_logp, self._pad_id))

    def metrics(self) -> dict[str, float]:
        """Of the updates, before each."""
        applied = [update for update in self._updates if not update.non_finite]
        found = {
            **self._tally.means(),
            "process_reward/successes": float(self._success.double().mean()),
            "process_reward/updates_skipped": float(len(self._updates) - len(applied)),
        }
        if applied:
            found["process_reward/learning_rate"] = applied[-1].learning_rate
            found["process_reward/grad_norm"] = max(update.grad_norm for update in applied)
        return found
