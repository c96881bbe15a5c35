"""One training step of a critic: the same epochs and mini-batches as the policy's."""

from __future__ import annotations

import torch
from torch import distributed

from agentrl.training.critic.critic import Critic
from agentrl.training.critic.targets import ValueTargets
from agentrl.training.critic.value_head import ValueHead
from agentrl.training.micro_batch_gradients import add_gradients, cut
from agentrl.training.models.gradient_mode import gradients_recomputed
from agentrl.training.optimizer import Update
from agentrl.training.ranks.sharding import reshard
from agentrl.training.ranks.shares import share_of
from agentrl.training.step.batch import StepBatch
from agentrl.training.step.tally import Tally


class CriticStep:
    """Trains a critic on the returns of one step.

    Args:
        critic: Trained in place.
        batch: The step.
        targets: Of its tokens.
        pad_id: Any id of the vocabulary.
        policy_learns: The policy trains in this step, so that a critic on its hidden states may do so with it.
    """

    def __init__(
        self, critic: Critic, batch: StepBatch, targets: ValueTargets, pad_id: int, *, policy_learns: bool
    ) -> None:
        self.joins_policy = critic.trunk_optimizer is None and policy_learns
        """The loss is a part of the policy's, so that one forward and backward pass serves both."""
        self._critic, self._batch, self._targets, self._pad_id = critic, batch, targets, pad_id
        self._weights = torch.zeros_like(targets.targets)
        self._tally = Tally()
        self._updates: list[Update] = []

    @property
    def head(self) -> ValueHead:
        """The critic's output."""
        return self._critic.head

    def accumulate(self, part: list[int]) -> None:
        """Add the gradient of the value loss of some sequences, which are one update; with `joins_policy`, make ready
        for the policy's pass, which adds it.
        """
        self._weights = self._targets.weights(self._batch.token_index(part))
        if self.joins_policy:
            return
        critic, passes = self._critic, self._critic.passes
        sequences = [self._batch.sequences[i] for i in part]
        workers = passes.lanes.count * passes.ranks.teams
        work = cut(part, sequences, layout=passes.layout, workers=workers, learns=True)
        own = share_of(work, rank=passes.ranks.team, ranks=passes.ranks.teams)
        beside = tuple(critic.head.parameters())
        with gradients_recomputed(critic.trunk, enabled=passes.recompute and critic.trunk_optimizer is not None):
            found = add_gradients(
                critic.trunk, passes.lanes, own, self._own_loss, every_time=passes.every_time, beside=beside
            )
        reshard(critic.trunk)
        for _, tally in passes.ranks.collect(found if passes.ranks.speaks else []):
            self._tally.merge(tally)

    def _own_loss(self, indices: list[int]) -> tuple[torch.Tensor, Tally]:
        critic, tally = self._critic, Tally()
        sequences = [self._batch.sequences[i] for i in indices]
        values = critic.read(sequences, self._pad_id, trains_trunk=critic.trunk_optimizer is not None)
        where = self._batch.token_index(indices).to(values.device)
        return self._targets.loss(values, where, self._weights, tally), tally

    def joined_loss(self, values: torch.Tensor, where: torch.Tensor, tally: Tally) -> torch.Tensor:
        """What the policy's loss of some tokens gets on top.

        Args:
            values: v of the tokens: [selected]; carries the gradient.
            where: Which tokens they are: int64 [selected].
            tally: Takes in what is measured.
        """
        return self._critic.config.coef * self._targets.loss(values, where, self._weights, tally)

    def update(self) -> None:
        """Apply the gradients of the last `accumulate`."""
        critic = self._critic
        if critic.passes.ranks.are_many:
            for parameter in critic.head.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                distributed.all_reduce(parameter.grad)
                parameter.grad /= critic.passes.ranks.tensor_parallel  # neighbours have found the same
        updates = [critic.head_optimizer.update()]
        if critic.trunk_optimizer is not None:
            updates.append(critic.trunk_optimizer.update())
        self._updates += updates

    def leave_out(self) -> None:
        """Forget the gradients of the last `accumulate`."""
        self._critic.head.zero_grad(set_to_none=True)

    def metrics(self) -> dict[str, float]:
        """Under their final names, all ``critic/``."""
        applied = [update for update in self._updates if not update.non_finite]
        found = {
            **self._targets.measurements(),
            **self._tally.means(),
            "critic/updates_skipped": float(len(self._updates) - len(applied)),
        }
        if applied:
            found["critic/learning_rate"] = applied[-1].learning_rate
            found["critic/grad_norm"] = max(update.grad_norm for update in applied)
        return found
