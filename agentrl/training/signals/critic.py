"""A critic: a value head on hidden states, which are those of a model of its own or of the policy."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import distributed
from transformers import PreTrainedModel

from agentrl.algorithms.critic_advantages import ValueInput, value
from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.algorithms.types import Estimate
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.config.trainer import CriticConfig
from agentrl.errors import ConfigError, TrainingError, UsageError
from agentrl.registry import Kind, lookup, names
from agentrl.training.batch import StepBatch
from agentrl.training.compile import compile_layers, gradients_recomputed
from agentrl.training.forward.logprobs import ValueHead, head_for
from agentrl.training.forward.micro_batches import SumsByName
from agentrl.training.forward.runner import ModelRunner
from agentrl.training.forward.sequences import ScoredSequence
from agentrl.training.optimizer import OptimizerSettings, PolicyOptimizer, Update
from agentrl.training.signals.base import SignalSetup, TokenSignal, check_vocabulary, update_metrics


class Critic(TokenSignal):
    """Values of sampled tokens, and what trains them.

    The head is whole on every rank, and has an optimizer of its own. So has the trunk, where it is not the policy's.
    """

    name = "critic"

    def __init__(self, runner: ModelRunner, config: CriticConfig, settings: OptimizerSettings) -> None:
        self.runner, self.trunk, self.config = runner, runner.model, config
        trunk = self.trunk
        self.head = head_for(trunk)
        settings = replace(settings, learning_rate=config.learning_rate)
        self.head_optimizer = PolicyOptimizer(self.head, replace(settings, optimizer="adamw"))
        self.trunk_optimizer: PolicyOptimizer | None = None
        if config.kind == "own":
            _freeze_what_gives_no_hidden_state(trunk)
            self.trunk_optimizer = PolicyOptimizer(trunk, settings)

    @classmethod
    def check(cls, algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool) -> None:
        """Check that an estimator that reads a critic's values has a critic, and that a critic is read."""
        reads = Input.VALUES in needed_inputs(lookup(Kind.ADVANTAGE, algorithm.advantage))
        if reads and config.critic is None:
            raise ConfigError(
                f"the advantage estimator {algorithm.advantage} needs a critic",
                got="no trainer.critic",
                expected="trainer.critic={kind: own} or trainer.critic={kind: shared}",
                hint="grpo, rloo and reinforce++ need none",
            )
        if config.critic is not None and not reads:
            raise ConfigError(
                f"trainer.critic is ignored: the advantage estimator {algorithm.advantage} reads no values",
                got=f"trainer.critic of kind {config.critic.kind}",
                expected=f"algorithm.advantage={' or '.join(_value_estimators())}",
                hint="or remove trainer.critic",
            )

    @classmethod
    def build(cls, setup: SignalSetup) -> Critic | None:
        """Make the critic, if the config has one: on a model of its own, or on the policy."""
        config, policy = setup.config, setup.policy
        if config.critic is None:
            return None
        runner = ModelRunner(policy.model, policy.passes)
        if config.critic.kind == "own":
            own = setup.models.get(cls.name)
            trunk = copy.deepcopy(policy.model) if own is None else own
            check_vocabulary(trunk, policy.model, what="the critic")
            compile_layers(trunk, config)
            runner = policy.for_model(trunk, config)
        return cls(runner, config.critic, setup.optimizer)

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add the critic's values, which estimators read."""
        values = self.values(batch.sequences, batch.pad_id).cpu().double()
        return dataclasses.replace(batch, episodes=dataclasses.replace(batch.episodes, values=values))

    def train(self, batch: StepBatch, estimate: Estimate, *, policy_learns: bool) -> CriticStep | None:
        """Make what trains the critic on the returns of a step.

        Raises:
            TrainingError: the estimator, a user's own, says nothing that a critic could learn.
        """
        if batch.episodes.values is None:
            return None
        if estimate.value_target is None:
            raise TrainingError(
                "the advantage estimator gives the critic nothing to learn",
                got="advantages only",
                expected="an agentrl.algorithms.types.Estimate with a value_target",
            )
        targets = ValueTargets(
            old_values=batch.episodes.values.float().to(self.trunk.device),
            targets=estimate.value_target.to(self.trunk.device),
            clip=self.config.clip,
        )
        return CriticStep(self, batch, targets, policy_learns=policy_learns)

    def state(self) -> Critic:
        """Give the weights, moments and numbers of updates."""
        return self

    def read(self, sequences: Sequence[ScoredSequence], pad_id: int, *, trains_trunk: bool = True) -> torch.Tensor:
        """V before each wanted token of a micro-batch, sequence after sequence: float32 [targets]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains_trunk):
            hidden, collected = self.runner.hidden_states(sequences, pad_id)
        values: torch.Tensor = self.head(hidden)
        return collected(values)

    def values(self, sequences: Sequence[ScoredSequence], pad_id: int) -> torch.Tensor:
        """The values of any number of sequences, without gradients, on all ranks: float32 [targets]."""
        return self.runner.forward(sequences, lambda part: self.read(part, pad_id)[None], rows=1)[0]

    def named_state(self) -> dict[str, torch.Tensor]:
        """Weights, moments and numbers of updates by name: ``head/…``, and ``trunk/…`` of a model of its own."""
        return {
            f"{part}/{name}": tensor
            for part, optimizer in self._optimizers().items()
            for name, tensor in optimizer.named_state().items()
        }

    def room_for(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors into which a state of these names can be read."""
        optimizers = self._optimizers()
        found = {name.partition("/")[0] for name in names}
        if found != set(optimizers):
            raise UsageError(
                "the checkpoint is of another critic",
                got=f"a state of {', '.join(sorted(found)) or 'none'}",
                expected=f"of {', '.join(optimizers)}",
                hint="set trainer.critic as the run had it",
            )
        return {
            f"{part}/{name}": tensor
            for part, optimizer in optimizers.items()
            for name, tensor in optimizer.room_for(_of_part(names, part)).items()
        }

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `room_for` made, filled."""
        for part, optimizer in self._optimizers().items():
            optimizer.load_named_state({name: state[f"{part}/{name}"] for name in _of_part(state, part)})
            optimizer.restore_weights()

    def _optimizers(self) -> dict[str, PolicyOptimizer]:
        own = {} if self.trunk_optimizer is None else {"trunk": self.trunk_optimizer}
        return {"head": self.head_optimizer, **own}


def _of_part(names: Sequence[str] | Mapping[str, torch.Tensor], part: str) -> list[str]:
    return [name.removeprefix(f"{part}/") for name in names if name.startswith(f"{part}/")]


def _freeze_what_gives_no_hidden_state(model: PreTrainedModel) -> None:
    """An output head for tokens that is no embedding has nothing to learn here."""
    used = {id(parameter) for parameter in model.base_model.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTargets:
    """Targets of a step's sampled tokens; float32 [tokens] each, on the device where the critic computes."""

    old_values: torch.Tensor
    """V at the start of the step."""
    targets: torch.Tensor
    """G; NaN at tokens that the critic learns nothing from."""
    clip: float | None

    def weights(self, index: torch.Tensor) -> torch.Tensor:
        """The mean over an update's tokens (`index`) with a target, as a weight of each of the step's: [tokens]."""
        known = index.to(self.targets.device)
        known = known[self.targets[known].isfinite()]
        return torch.zeros_like(self.targets).index_fill(0, known, 1 / max(known.numel(), 1))

    def loss(self, values: torch.Tensor, where: torch.Tensor, weights: torch.Tensor, tally: SumsByName) -> torch.Tensor:
        """Sum up the weighted loss of the current critic's `values` at the tokens `where`: both [selected]."""
        learned = weights[where] > 0
        where, values = where[learned], values[learned]
        tokens = ValueInput(values=values, old_values=self.old_values[where], targets=self.targets[where])
        loss = value(tokens, clip=self.clip)
        tally.add("critic/loss", loss.values)
        tally.add("critic/clip_share", loss.clipped)
        return (weights[where] * loss.values).sum()

    def measurements(self) -> dict[str, float]:
        """Measure how good the values of the start of the step were.

        The explained variance is 1 - Var(G - V) / Var(G): 1 for a perfect critic, 0 for one that knows the mean only;
        left out where all returns are equal.
        """
        known = self.targets.isfinite()
        targets, values = self.targets[known].double(), self.old_values[known].double()
        found = {"critic/value_mean": float(values.mean()), "critic/target_mean": float(targets.mean())}
        spread = float(targets.var(correction=0))
        if spread > 0:
            found["critic/explained_variance"] = 1 - float((targets - values).var(correction=0)) / spread
        return found


class CriticStep:
    """Trains a critic on the returns of one step, together with the policy where it shares its hidden states."""

    def __init__(self, critic: Critic, batch: StepBatch, targets: ValueTargets, *, policy_learns: bool) -> None:
        self.joins_policy = critic.trunk_optimizer is None and policy_learns
        self._critic, self._batch, self._targets = critic, batch, targets
        self._weights = torch.zeros_like(targets.targets)
        self._tally = SumsByName()
        self._updates: list[Update] = []

    @property
    def head(self) -> ValueHead:
        """The critic's output."""
        return self._critic.head

    def accumulate(self, part: list[int]) -> None:
        """Add the gradient of the value loss of some sequences, which are one update; where the loss is a
        part of the policy's, prepare the policy's pass, which adds it.
        """
        self._weights = self._targets.weights(self._batch.token_index(part))
        if self.joins_policy:
            return
        critic, sequences = self._critic, [self._batch.sequences[i] for i in part]
        recompute = critic.runner.passes.recompute and critic.trunk_optimizer is not None
        with gradients_recomputed(critic.trunk, enabled=recompute):
            result = critic.runner.forward_backward(
                sequences, self._own_loss, numbers=part, head_parameters=tuple(critic.head.parameters())
            )
        self._tally.merge(result.tally)

    def _own_loss(self, indices: list[int], tally: SumsByName) -> torch.Tensor:
        critic, sequences = self._critic, [self._batch.sequences[i] for i in indices]
        values = critic.read(sequences, self._batch.pad_id, trains_trunk=critic.trunk_optimizer is not None)
        where = self._batch.token_index(indices).to(values.device)
        return self._targets.loss(values, where, self._weights, tally)

    def joined_loss(self, values: torch.Tensor, where: torch.Tensor, tally: SumsByName) -> torch.Tensor:
        """Compute what is added to the policy's loss of some tokens; see `SignalUpdates`."""
        return self._critic.config.coef * self._targets.loss(values, where, self._weights, tally)

    def update(self) -> None:
        """Apply the gradients of the last `accumulate`."""
        critic, ranks = self._critic, self._critic.runner.passes.ranks
        if ranks.are_many:
            for parameter in critic.head.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                distributed.all_reduce(parameter.grad)
                parameter.grad /= ranks.tensor_parallel  # neighbours have found the same
        updates = [critic.head_optimizer.update()]
        if critic.trunk_optimizer is not None:
            updates.append(critic.trunk_optimizer.update())
        self._updates += updates

    def leave_out(self) -> None:
        """Forget the gradients of the last `accumulate`."""
        self._critic.head.zero_grad(set_to_none=True)

    def metrics(self) -> dict[str, float]:
        """Under their final names, all ``critic/``."""
        return {**self._targets.measurements(), **self._tally.means(), **update_metrics("critic", self._updates)}


def _value_estimators() -> list[str]:
    """The shipped estimators that read a critic's values."""
    shipped = [name for name in names(Kind.ADVANTAGE) if ":" not in name]
    return [name for name in shipped if Input.VALUES in needed_inputs(lookup(Kind.ADVANTAGE, name))]
