"""An implicit process reward model: a language model whose log-ratio to its initial weights is the logit of success.

It learns from the outcomes of the step's episodes, and assigns a reward to each of their tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from agentrl.algorithms.off_policy_losses import ScoredAnswers, implicit_reward, prime_reward_model
from agentrl.algorithms.segments import exceeds
from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.config.trainer import ProcessRewardConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.models.lora import base_is_reference
from agentrl.registry import Kind, lookup
from agentrl.training.batch import StepBatch
from agentrl.training.compile import checkpoint_activations, compile_layers
from agentrl.training.forward.runner import ModelRunner, SumsByName
from agentrl.training.forward.sequences import ScoredSequence
from agentrl.training.optimizer import OptimizerSettings, PolicyOptimizer, Update
from agentrl.training.signals.base import SignalSetup, TokenSignal, check_vocabulary, update_metrics

START = "process_reward_start"
"""Name of the frozen initial model in a trainer's `signal_models`; not needed if only adapters train."""
TEMPERATURE = 1.0
"""Temperature of the log-probabilities, whatever the policy's sampling temperature."""


class ProcessRewardModel(TokenSignal):
    """Process rewards from the log-probabilities of a model in training and of its initial weights."""

    name = "process_reward"

    def __init__(
        self, model: ModelRunner, start: ModelRunner, config: ProcessRewardConfig, settings: OptimizerSettings
    ) -> None:
        self.model, self.config = model.model, config
        self._now, self._start = model, start
        self._metrics: dict[str, float] = {}
        self.optimizer = PolicyOptimizer(self.model, replace(settings, learning_rate=config.learning_rate))

    @classmethod
    def check(cls, algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool) -> None:
        """Check that there is a process reward model if, and only if, the advantage estimator reads process rewards."""
        reads = Input.PROCESS_REWARD in needed_inputs(lookup(Kind.ADVANTAGE, algorithm.advantage))
        if reads and config.process_reward is None:
            raise ConfigError(
                f"the advantage estimator {algorithm.advantage} needs {Input.PROCESS_REWARD}",
                got="no trainer.process_reward",
                expected="trainer.process_reward={}, or {path: MODEL, learning_rate: 1e-6}",
            )
        if config.process_reward is not None and not reads:
            raise ConfigError(
                f"trainer.process_reward is ignored: the estimator {algorithm.advantage} reads no process rewards",
                expected="algorithm.advantage=prime",
                hint="or remove trainer.process_reward",
            )

    @classmethod
    def build(cls, setup: SignalSetup) -> ProcessRewardModel | None:
        """Build the signal, if the config has one; missing models are replaced by copies of the policy."""
        config, policy = setup.config, setup.policy
        if config.process_reward is None:
            return None
        given = setup.models.get(cls.name)
        model = copy.deepcopy(policy.model) if given is None else given
        check_vocabulary(model, policy.model, what="the process reward")
        start = _start(policy, model, setup.models.get(START), config)
        compile_layers(model, config)
        return cls(policy.for_model(model, config), start, config.process_reward, setup.optimizer)

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add a reward for each token, and train on the outcomes, with one update for each of the policy's."""
        learning = _ProcessRewardStep(self, batch)
        if self.config.update == "before":
            learning.learn()
        rewards = learning.rewards()
        if self.config.update == "after":
            learning.learn()
        self._metrics = {**learning.metrics(), "process_reward/token_mean": float(rewards.mean())}
        return dataclasses.replace(batch, episodes=dataclasses.replace(batch.episodes, process_reward=rewards))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the updates, each measured before the update, and the mean reward."""
        return self._metrics

    def state(self) -> ProcessRewardModel:
        """Return the state with the weights, moments and number of updates."""
        return self

    def logp(self, sequences: Sequence[ScoredSequence]) -> torch.Tensor:
        """Compute log pi_rm of the target tokens, on all ranks: float64 [targets] on the CPU."""
        return _logp(self._now, sequences)

    def start_logp(self, sequences: Sequence[ScoredSequence]) -> torch.Tensor:
        """Compute log pi_ref of the target tokens, on all ranks: float64 [targets] on the CPU."""
        return _logp(self._start, sequences)

    def descend(self, sequences: Sequence[ScoredSequence], by_logp: torch.Tensor) -> Update:
        """Take an optimizer step on a loss, given its derivatives with respect to log pi_rm: [targets]."""
        with checkpoint_activations(self.model, enabled=self._now.passes.recompute):
            self._now.backward_logprobs(sequences, by_logp, temperature=TEMPERATURE)
        return self.optimizer.update()

    def named_state(self) -> dict[str, torch.Tensor]:
        """Return weights, moments and number of updates by name."""
        return self.optimizer.named_state()

    def allocate_state(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Allocate tensors for a saved state with these names.

        Raises:
            UsageError: `names` is empty.
        """
        if not names:
            raise UsageError(
                "the checkpoint does not contain a process reward model",
                got="trainer.process_reward",
                hint="set trainer.process_reward to the run's value",
            )
        return self.optimizer.allocate_state(names)

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of `allocate_state` after they have been filled."""
        self.optimizer.load_named_state(state)
        self.optimizer.restore_weights()


def _logp(model: ModelRunner, sequences: Sequence[ScoredSequence]) -> torch.Tensor:
    return model.logprobs(sequences, temperature=TEMPERATURE).logp.cpu().double()


def _start(
    policy: ModelRunner, model: PreTrainedModel, given: PreTrainedModel | None, config: TrainerConfig
) -> ModelRunner:
    if given is None and base_is_reference(model):
        return policy.for_model(model, config, base_only=True)
    start = copy.deepcopy(model).requires_grad_(False).eval() if given is None else given
    return policy.for_model(start, config)


UNDECIDED = math.log(2) - 1e-5
"""Loss above which an episode counts as misclassified: that of a logit of 0, less a margin for rounding."""


class _ProcessRewardStep:
    def __init__(self, model: ProcessRewardModel, batch: StepBatch) -> None:
        self._model, self._batch = model, batch
        above = model.config.success_above
        rewards = [above if t.reward is None else t.reward for t in batch.trajectories]
        self._success = exceeds(torch.tensor(rewards, dtype=torch.float64), above)
        self._start_logp = model.start_logp(batch.sequences)
        self._tally = SumsByName()
        self._updates: list[Update] = []

    def rewards(self) -> torch.Tensor:
        """Compute the reward beta log(pi_rm / pi_ref) of each token with the current weights: float64 [tokens]."""
        logp = self._model.logp(self._batch.sequences)
        return implicit_reward(logp, self._start_logp, beta=self._model.config.beta)

    def learn(self) -> None:
        """Make one update for each of the policy's."""
        for part in self._batch.parts:
            self._update(part)

    def _update(self, part: list[int]) -> None:
        """Make one update on the outcomes of the sequences `part`.

        The logit of an episode is a sum over all its sequences, which may be in different micro-batches. It is computed
        first; the loss's derivatives with respect to the tokens' log-probabilities are then backpropagated.
        """
        sequences, index = [self._batch.sequences[i] for i in part], self._batch.token_index(part)
        members, episode = torch.unique(self._batch.owners.trajectory[index], return_inverse=True)
        logp = self._model.logp(sequences).requires_grad_()
        answers = ScoredAnswers(
            rm_logp=logp, reference_logp=self._start_logp[index], episode=episode, success=self._success[members]
        )
        losses = prime_reward_model(answers, beta=self._model.config.beta)
        self._tally.add("process_reward/loss", losses)
        self._tally.add("process_reward/accuracy", losses < UNDECIDED)
        (by_logp,) = torch.autograd.grad(losses.mean(), logp)
        self._updates.append(self._model.descend(sequences, by_logp))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the updates, each measured before the update."""
        successes = float(self._success.double().mean())
        metrics = update_metrics("process_reward", self._updates)
        return {**self._tally.means(), "process_reward/successes": successes, **metrics}
