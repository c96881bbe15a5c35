"""A critic: a value head on hidden states, which are those of a model of its own or of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from agentrl.config.critic import CriticConfig
from agentrl.errors import UsageError
from agentrl.training.critic.value_head import head_for
from agentrl.training.micro_batch_gradients import cut
from agentrl.training.optimizer import PolicyOptimizer
from agentrl.training.optimizer_settings import OptimizerSettings
from agentrl.training.passes import Passes
from agentrl.training.ranks.sharding import reshard, within_forward
from agentrl.training.ranks.shares import share_of
from agentrl.training.scoring.sequences import ScoredSequence


class Critic:
    """Values of sampled tokens, and what trains them.

    The head is whole on every rank, and has an optimizer of its own. So has the trunk, where it is not the policy's.

    Args:
        trunk: Gives the hidden states.
        config: What kind of critic.
        settings: Of the policy's optimizer; the learning rate is the critic's.
        passes: How to compute.
    """

    def __init__(
        self, trunk: PreTrainedModel, config: CriticConfig, settings: OptimizerSettings, passes: Passes
    ) -> None:
        self.trunk, self.config, self.passes = trunk, config, passes
        self.head = head_for(trunk)
        settings = replace(settings, learning_rate=config.learning_rate)
        self.head_optimizer = PolicyOptimizer(self.head, replace(settings, optimizer="adamw"))
        self.trunk_optimizer: PolicyOptimizer | None = None
        if config.kind == "own":
            _freeze_what_gives_no_hidden_state(trunk)
            self.trunk_optimizer = PolicyOptimizer(trunk, settings)

    def read(self, sequences: Sequence[ScoredSequence], pad_id: int, *, trains_trunk: bool = True) -> torch.Tensor:
        """V before each wanted token of a micro-batch, sequence after sequence: float32 [targets].

        Args:
            sequences: One or more.
            pad_id: Any id of the vocabulary.
            trains_trunk: Let gradients flow into the trunk, if they flow at all.
        """
        layout, reader, trunk = self.passes.layout, self.passes.reader, self.trunk
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains_trunk):
            if layout.context is None:
                hidden = within_forward(trunk, layout.read, sequences, pad_id, reader)
            else:
                hidden, owner = within_forward(trunk, layout.read_shared, sequences, pad_id, layout.context)
        values: torch.Tensor = self.head(hidden)
        return values if layout.context is None else layout.context.collected(values[None], owner)[0]

    def values(self, sequences: Sequence[ScoredSequence], pad_id: int) -> torch.Tensor:
        """The values of any number of sequences, without gradients, on all ranks: float32 [targets]."""
        passes = self.passes
        workers = passes.lanes.count * passes.ranks.teams
        work = cut(range(len(sequences)), sequences, layout=passes.layout, workers=workers, learns=False)
        own = share_of(work, rank=passes.ranks.team, ranks=passes.ranks.teams)

        def compute(indices: list[int]) -> dict[int, torch.Tensor]:
            part = [sequences[i] for i in indices]
            with torch.no_grad():
                values = self.read(part, pad_id)
            return dict(zip(indices, torch.split(values, [s.targets.numel() for s in part]), strict=True))

        found: dict[int, torch.Tensor] = {}
        for values in passes.lanes.run(compute, [micro_batch.sequences for micro_batch in own]):
            found.update(values)
        reshard(self.trunk)
        unknown = [torch.full((s.targets.numel(),), torch.nan, device=self.trunk.device) for s in sequences]
        return passes.ranks.filled(torch.cat([found.get(i, unknown[i]) for i in range(len(sequences))]))

    def named_state(self) -> dict[str, torch.Tensor]:
        """Weights, moments and numbers of updates by name: ``head/…``, and ``trunk/…`` of a model of its own."""
        return {
            f"{part}/{name}": tensor
            for part, optimizer in self._optimizers().items()
            for name, tensor in optimizer.named_state().items()
        }

    def room_for(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors into which a state of these names can be read.

        Raises:
            UsageError: it is the state of another critic.
        """
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
