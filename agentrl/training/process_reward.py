"""An implicit process reward model: a language model whose log-ratio to its start is the logit of success.

- A trainer's implicit process reward model.
- One training step of an implicit process reward model: it learns from the outcomes, and scores the tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from agentrl.algorithms.off_policy_losses import ScoredAnswers, implicit_reward, prime_reward_model
from agentrl.config.config import TrainerConfig
from agentrl.config.trainer import ProcessRewardConfig
from agentrl.errors import UsageError
from agentrl.models.lora import base_is_reference
from agentrl.training.batch import StepBatch
from agentrl.training.checks import check_vocabulary
from agentrl.training.compile import compile_layers, gradients_recomputed
from agentrl.training.forward.micro_batches import SumsByName
from agentrl.training.forward.runner import ModelRunner
from agentrl.training.forward.sequences import ScoredSequence
from agentrl.training.optimizer import OptimizerSettings, PolicyOptimizer, Update
from agentrl.trajectory import Trajectory

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
        model: ModelRunner,
        start: ModelRunner,
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
        with gradients_recomputed(self.model, enabled=self._now.passes.recompute):
            self._now.backward_logprobs(sequences, by_logp, temperature=TEMPERATURE, pad_id=pad_id)
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


def _logp(model: ModelRunner, sequences: Sequence[ScoredSequence], pad_id: int) -> torch.Tensor:
    return model.logprobs(sequences, temperature=TEMPERATURE, pad_id=pad_id).logp.cpu().double()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessModels:
    """The models of an implicit process reward."""

    trained: PreTrainedModel
    start: PreTrainedModel | None = None
    """The same, frozen; not needed where `trained` without its adapters is that."""


def make_process_reward(
    policy: ModelRunner, models: ProcessModels | None, config: TrainerConfig, settings: OptimizerSettings
) -> ProcessRewardModel | None:
    """Make the implicit process reward model that a config asks for, if it does.

    Args:
        policy: Its tokens are read.
        models: Copies of the policy when left out.
        config: Numbers.
        settings: Of an optimizer.

    Raises:
        UsageError: the model has another vocabulary, or cannot share prefixes.
    """
    if config.process_reward is None:
        return None
    model = copy.deepcopy(policy.model) if models is None else models.trained
    check_vocabulary(model, policy.model, what="the process reward")
    start = _start(policy, model, None if models is None else models.start, config)
    compile_layers(model, config)
    return ProcessRewardModel(policy.beside(model, config), start, config.process_reward, settings)


def _start(
    policy: ModelRunner, model: PreTrainedModel, given: PreTrainedModel | None, config: TrainerConfig
) -> ModelRunner:
    if given is None and base_is_reference(model):
        return policy.beside(model, config, base_only=True)
    start = copy.deepcopy(model).requires_grad_(False).eval() if given is None else given
    return policy.beside(start, config)


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
        self._tally = SumsByName()
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
