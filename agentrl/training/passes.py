"""How the forward and backward passes of one model are computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from agentrl.config.schema import Checkpointing, TrainerConfig
from agentrl.image import ImageReader
from agentrl.lanes import Lanes
from agentrl.training.ranks import Ranks
from agentrl.training.scoring.layout import Layout, choose_layout
from agentrl.training.scoring.replaying import replaying


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What all passes of a model have in common."""

    layout: Layout
    lanes: Lanes
    ranks: Ranks
    reader: ImageReader | None = None
    """Prepares images; needed where sequences hold any."""
    every_time: bool = False
    """See `agentrl.training.micro_batch_gradients.add_gradients`."""
    recompute: bool | Checkpointing = False
    """Activations, in the backward pass; see `agentrl.training.models.gradient_mode`."""

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
