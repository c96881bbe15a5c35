"""A critic: a value head on the hidden states of its own model or of the policy."""

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
from agentrl.training.compile import checkpoint_activations, compile_layers
from agentrl.training.forward.logprobs import ValueHead, head_for
from agentrl.training.forward.runner import ModelRunner, SumsByName
from agentrl.training.forward.sequences import ScoredSequence
from agentrl.training.optimizer import OptimizerSettings, PolicyOptimizer, Update
from agentrl.training.signals.base import SignalSetup, TokenSignal, check_vocabulary, update_metrics


class Critic(TokenSignal):
    """Critic that estimates the values of sampled tokens.

    The head is not sharded and has its own optimizer; so has the trunk, unless it is the policy.
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
            _freeze_output_head(trunk)
            self.trunk_optimizer = PolicyOptimizer(trunk, settings)

    @classmethod
    def check(cls, algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool) -> None:
        """Check that there is a critic if, and only if, the advantage estimator reads its values."""
        reads = Input.VALUES in needed_inputs(lookup(Kind.ADVANTAGE, algorithm.advantage))
        if reads and config.critic is None:
            raise ConfigError(
                f"the advantage estimator {algorithm.advantage} needs a critic",
                got="no trainer.critic",
                expected="trainer.critic={kind: own} or trainer.critic={kind: shared}",
                hint="grpo, rloo and reinforce++ do not need one",
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
        """Build the critic on its own model or on the policy, if the config has one."""
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
        """Add the critic's values for the advantage estimator."""
        values = self.values(batch.sequences).cpu().double()
        return dataclasses.replace(batch, episodes=dataclasses.replace(batch.episodes, values=values))

    def train(self, batch: StepBatch, estimate: Estimate, *, policy_learns: bool) -> CriticStep | None:
        """Return the updates of the critic on the value targets of a step.

        Raises:
            TrainingError: a user's estimator returned no value targets.
        """
        if batch.episodes.values is None:
            return None
        if estimate.value_target is None:
            raise TrainingError(
                "the advantage estimator returned no value targets for the critic",
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
        """Return the state with the weights, moments and numbers of updates."""
        return self

    def micro_batch_values(self, sequences: Sequence[ScoredSequence], *, trains_trunk: bool = True) -> torch.Tensor:
        """Compute V before each target token of a micro-batch, sequence after sequence: float32 [targets]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains_trunk):
            hidden, collected = self.runner.hidden_states(sequences)
        values: torch.Tensor = self.head(hidden)
        return collected(values)

    def values(self, sequences: Sequence[ScoredSequence]) -> torch.Tensor:
        """Compute the values of any number of sequences, without gradients, on all ranks: float32 [targets]."""
        return self.runner.forward(sequences, lambda part: self.micro_batch_values(part)[None], rows=1)[0]

    def named_state(self) -> dict[str, torch.Tensor]:
        """Return weights, moments and numbers of updates by name: ``head/…``, and ``trunk/…`` for its own model."""
        return {
            f"{part}/{name}": tensor
            for part, optimizer in self._optimizers().items()
            for name, tensor in optimizer.named_state().items()
        }

    def allocate_state(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Allocate tensors for a saved state with these names.

        Raises:
            UsageError: the names are those of another kind of critic.
        """
        optimizers = self._optimizers()
        found = {name.partition("/")[0] for name in names}
        if found != set(optimizers):
            raise UsageError(
                "the checkpoint is from another kind of critic",
                got=f"a state of {', '.join(sorted(found)) or 'none'}",
                expected=f"a state of {', '.join(optimizers)}",
                hint="set trainer.critic to the run's value",
            )
        return {
            f"{part}/{name}": tensor
            for part, optimizer in optimizers.items()
            for name, tensor in optimizer.allocate_state(_of_part(names, part)).items()
        }

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of `allocate_state` after they have been filled."""
        for part, optimizer in self._optimizers().items():
            optimizer.load_named_state({name: state[f"{part}/{name}"] for name in _of_part(state, part)})
            optimizer.restore_weights()

    def _optimizers(self) -> dict[str, PolicyOptimizer]:
        own = {} if self.trunk_optimizer is None else {"trunk": self.trunk_optimizer}
        return {"head": self.head_optimizer, **own}


def _of_part(names: Sequence[str] | Mapping[str, torch.Tensor], part: str) -> list[str]:
    return [name.removeprefix(f"{part}/") for name in names if name.startswith(f"{part}/")]


def _freeze_output_head(model: PreTrainedModel) -> None:
    """Freeze the output head for tokens, unless it is tied to the embedding: hidden states do not depend on it."""
    used = {id(parameter) for parameter in model.base_model.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTargets:
    """Value targets of a step's sampled tokens; float32 [tokens] each, on the critic's device."""

    old_values: torch.Tensor
    """Values V at the start of the step."""
    targets: torch.Tensor
    """Targets G; NaN at tokens on which the critic does not train."""
    clip: float | None

    def weights(self, index: torch.Tensor) -> torch.Tensor:
        """Weight the step's tokens for a mean over an update's tokens (`index`) that have a target: [tokens]."""
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
        """Compare the values at the start of the step with the targets.

        The explained variance is 1 - Var(G - V) / Var(G): 1 for a perfect critic, 0 for one that predicts only the
        mean. It is missing if all targets are equal.
        """
        known = self.targets.isfinite()
        targets, values = self.targets[known].double(), self.old_values[known].double()
        found = {"critic/value_mean": float(values.mean()), "critic/target_mean": float(targets.mean())}
        spread = float(targets.var(correction=0))
        if spread > 0:
            found["critic/explained_variance"] = 1 - float((targets - values).var(correction=0)) / spread
        return found


class CriticStep:
    """Updates of a critic on the value targets of one step; with a shared trunk, part of the policy's updates."""

    def __init__(self, critic: Critic, batch: StepBatch, targets: ValueTargets, *, policy_learns: bool) -> None:
        self.joins_policy = critic.trunk_optimizer is None and policy_learns
        self._critic, self._batch, self._targets = critic, batch, targets
        self._weights = torch.zeros_like(targets.targets)
        self._tally = SumsByName()
        self._updates: list[Update] = []

    @property
    def head(self) -> ValueHead:
        """Value head of the critic."""
        return self._critic.head

    def accumulate(self, part: list[int]) -> None:
        """Add the gradient of one update's value loss, over the sequences `part`.

        If the loss is part of the policy's, only prepare the weights for the policy's pass.
        """
        self._weights = self._targets.weights(self._batch.token_index(part))
        if self.joins_policy:
            return
        critic, sequences = self._critic, [self._batch.sequences[i] for i in part]
        recompute = critic.runner.passes.recompute and critic.trunk_optimizer is not None
        with checkpoint_activations(critic.trunk, enabled=recompute):
            result = critic.runner.forward_backward(
                sequences, self._own_loss, numbers=part, head_parameters=tuple(critic.head.parameters())
            )
        self._tally.merge(result.tally)

    def _own_loss(self, indices: list[int], tally: SumsByName) -> torch.Tensor:
        critic, sequences = self._critic, [self._batch.sequences[i] for i in indices]
        values = critic.micro_batch_values(sequences, trains_trunk=critic.trunk_optimizer is not None)
        where = self._batch.token_index(indices).to(values.device)
        return self._targets.loss(values, where, self._weights, tally)

    def joined_loss(self, values: torch.Tensor, where: torch.Tensor, tally: SumsByName) -> torch.Tensor:
        """Compute the critic's term of the policy's loss; see `SignalUpdates`."""
        return self._critic.config.coef * self._targets.loss(values, where, self._weights, tally)

    def update(self) -> None:
        """Apply the gradients of the last `accumulate`."""
        critic, ranks = self._critic, self._critic.runner.passes.ranks
        if ranks.is_distributed:
            for parameter in critic.head.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))
                distributed.all_reduce(parameter.grad)
                parameter.grad /= ranks.tensor_parallel  # tensor-parallel ranks have equal gradients
        updates = [critic.head_optimizer.update()]
        if critic.trunk_optimizer is not None:
            updates.append(critic.trunk_optimizer.update())
        self._updates += updates

    def leave_out(self) -> None:
        """Drop the gradients of the last `accumulate`."""
        self._critic.head.zero_grad(set_to_none=True)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step, by final name; all start with ``critic/``."""
        return {**self._targets.measurements(), **self._tally.means(), **update_metrics("critic", self._updates)}


def pretrain_steps(config: TrainerConfig) -> int:
    """Return the number of first steps in which only the critic trains."""
    return 0 if config.critic is None else config.critic.pretrain_steps


def joins_policy(config: TrainerConfig) -> bool:
    """Return True if the policy's loss includes the critic's."""
    return config.critic is not None and config.critic.kind == "shared"


def _value_estimators() -> list[str]:
    """List the shipped estimators that read a critic's values."""
    shipped = [name for name in names(Kind.ADVANTAGE) if ":" not in name]
    return [name for name in shipped if Input.VALUES in needed_inputs(lookup(Kind.ADVANTAGE, name))]
