"""A model that says how probable it finds tokens: the policy before its updates, a reference, a teacher.

- How the forward and backward passes of one model are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from agentrl.config.config import Checkpointing, TrainerConfig
from agentrl.image import ImageReader
from agentrl.models.lora import adapters_off
from agentrl.models.threads import Lanes
from agentrl.training.distributed import Ranks
from agentrl.training.forward.layout import Layout, choose_layout
from agentrl.training.forward.logprobs import TokenOpinions, TokenScores, opinions_of_all, score_all
from agentrl.training.forward.sequences import ScoredSequence
from agentrl.training.moe import replaying


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What all passes of a model have in common."""

    layout: Layout
    lanes: Lanes
    ranks: Ranks
    reader: ImageReader | None = None
    """Prepares images; needed where sequences hold any."""
    every_time: bool = False
    """See `agentrl.training.forward.micro_batches.add_gradients`."""
    recompute: bool | Checkpointing = False
    """Activations, in the backward pass; see `agentrl.training.compile`."""

    def of(self, model: PreTrainedModel, config: TrainerConfig) -> Passes:
        """Those of another model, whose layout is its own.

        Raises:
            UsageError: prefixes are to be shared, and the model cannot do it.
        """
        return replace(self, layout=choose_layout(model, config, self.ranks))

    def replaying(self, model: PreTrainedModel) -> Passes:
        """The same, with a model whose routers do as the engine's did.

        Raises:
            ConfigError: it is no mixture, or one whose routers cannot be told.
        """
        return replace(self, layout=replaying(model, self.layout))


def choose_passes(model: PreTrainedModel, config: TrainerConfig, *, ranks: Ranks, reader: ImageReader | None) -> Passes:
    """The passes that a config asks for.

    Args:
        model: Whose attention is made ready for them.
        config: Sizes, lanes, what is recomputed.
        ranks: Share the passes out.
        reader: Prepares images.

    Raises:
        UsageError: prefixes are to be shared, and the model cannot do it.
    """
    return Passes(
        layout=choose_layout(model, config, ranks),
        lanes=Lanes(config.lanes),
        ranks=ranks,
        reader=reader,
        every_time=config.fsdp.reduce,
        recompute=config.gradient_checkpointing,
    )


class LogprobRunner:
    """Scores any number of sequences under one model, without gradients.

    Args:
        model: As it is at the time of each call.
        passes: How to compute.
        base_only: Leave the model's adapters out.
    """

    def __init__(self, model: PreTrainedModel, passes: Passes, *, base_only: bool = False) -> None:
        self.model, self.passes, self._base_only = model, passes, base_only

    def scores(self, sequences: Sequence[ScoredSequence], *, temperature: float, pad_id: int) -> TokenScores:
        """The wanted tokens of all sequences, in their order, on every rank: see `score_all`."""
        with self._without_adapters():
            return score_all(self.model, sequences, temperature=temperature, pad_id=pad_id, **self._computing())

    def opinions(
        self, sequences: Sequence[ScoredSequence], *, top_k: int | None, temperature: float, pad_id: int
    ) -> TokenOpinions:
        """The same, with the model's own `top_k` tokens in each place: see `opinions_of_all`."""
        if top_k is None:
            return TokenOpinions(logp=self.scores(sequences, temperature=temperature, pad_id=pad_id).logp)
        with self._without_adapters():
            return opinions_of_all(
                self.model, sequences, top_k=top_k, temperature=temperature, pad_id=pad_id, **self._computing()
            )

    def _without_adapters(self) -> AbstractContextManager[None]:
        return adapters_off(self.model) if self._base_only else nullcontext()

    def _computing(self) -> dict[str, Any]:
        passes = self.passes
        return {"layout": passes.layout, "lanes": passes.lanes, "ranks": passes.ranks, "reader": passes.reader}
