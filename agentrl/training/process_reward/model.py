"""An implicit process reward model: a language model whose log-ratio to its start is the logit of success."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from agentrl.config.process_reward import ProcessRewardConfig
from agentrl.errors import UsageError
from agentrl.training.micro_batch_gradients import add_gradients, cut
from agentrl.training.models.gradient_mode import gradients_recomputed
from agentrl.training.optimizer import PolicyOptimizer, Update
from agentrl.training.optimizer_settings import OptimizerSettings
from agentrl.training.ranks.sharding import reshard
from agentrl.training.ranks.shares import share_of
from agentrl.training.scoring.logprobs import score
from agentrl.training.scoring.scorer import Scorer
from agentrl.training.scoring.sequences import ScoredSequence

TEMPERATURE = 1.0
"""The outcome is learnt from log-probabilities as they are, however the policy was sampled."""


class ProcessRewardModel:
    """Log-probabilities of a model in training and of its start, and what trains it.

    Args:
        model: Trained in place.
        start: What it was before it learnt anything.
        config: Numbers.
        settings: Of the policy's optimizer; the learning rate is the model's own.
    """

    def __init__(
        self,
        model: Scorer,
        start: Scorer,
        config: ProcessRewardConfig,
        settings: OptimizerSettings,
    ) -> None:
        self.model, self.config = model.model, config
        self._now, self._start = model, start
        self.optimizer = PolicyOptimizer(self.model, replace(settings, learning_rate=config.learning_rate))

    def logp(self, sequences: Sequence[ScoredSequence], pad_id: int) -> torch.Tensor:
        """The log pi_rm of the wanted tokens, on all ranks: float64 [targets] on the CPU.

        Args:
            sequences: One or more.
            pad_id: Any id of the vocabulary.
        """
        return _logp(self._now, sequences, pad_id)

    def start_logp(self, sequences: Sequence[ScoredSequence], pad_id: int) -> torch.Tensor:
        """The log pi_ref of the wanted tokens: as `logp`."""
        return _logp(self._start, sequences, pad_id)

    def descend(self, sequences: Sequence[ScoredSequence], by_logp: torch.Tensor, pad_id: int) -> Update:
        """Take an optimizer step down a loss.

        Args:
            sequences: All that the loss depends on.
            by_logp: Derivative of the loss by log pi_rm of each wanted token: [targets].
            pad_id: Any id of the vocabulary.
        """
        passes, model = self._now.passes, self.model
        slopes = torch.split(by_logp.float().to(model.device), [s.targets.numel() for s in sequences])
        work = cut(
            range(len(sequences)),
            sequences,
            layout=passes.layout,
            workers=passes.lanes.count * passes.ranks.teams,
            learns=True,
        )
        own = share_of(work, rank=passes.ranks.team, ranks=passes.ranks.teams)

        def loss(indices: list[int]) -> tuple[torch.Tensor, None]:
            scores = score(
                model,
                [sequences[i] for i in indices],
                temperature=TEMPERATURE,
                pad_id=pad_id,
                layout=passes.layout,
                reader=passes.reader,
            )
            return (torch.cat([slopes[i] for i in indices]) * scores.logp).sum(), None

        with gradients_recomputed(model, enabled=passes.recompute):
            add_gradients(model, passes.lanes, own, loss, every_time=passes.every_time)
        reshard(model)
        return self.optimizer.update()

    def named_state(self) -> dict[str, torch.Tensor]:
        """Weights, moments and number of updates by name."""
        return self.optimizer.named_state()

    def room_for(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors into which a state of these names can be read.

        Raises:
            UsageError: there is no such state, or it is of another optimizer.
        """
        if not names:
            raise UsageError(
                "the checkpoint holds no implicit process reward model",
                got="trainer.process_reward",
                hint="set trainer.process_reward as the run had it",
            )
        return self.optimizer.room_for(names)

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `room_for` made, filled."""
        self.optimizer.load_named_state(state)
        self.optimizer.restore_weights()


def _logp(model: Scorer, sequences: Sequence[ScoredSequence], pad_id: int) -> torch.Tensor:
    return model.scores(sequences, temperature=TEMPERATURE, pad_id=pad_id).logp.cpu().double()
