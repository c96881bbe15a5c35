"""The trainer of a run, as every rank builds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from agentrl.config.schema import Config
from agentrl.image import ImageReader
from agentrl.training.model import load_model
from agentrl.training.model_weights import ModelWeights
from agentrl.training.objective import Objective
from agentrl.training.ranks import Ranks
from agentrl.training.ranks.loading import load_sharded
from agentrl.training.trainer import Trainer

BUILD = "build"
"""The first call of rank 0 to the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParts:
    """A rank's trainer, and what weight sync needs from it."""

    trainer: Trainer
    source: ModelWeights

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """What rank 0 asks of other ranks, by name."""
        return {**self.trainer.calls(), **self.source.calls()}


def build_trainer(
    config: Config, *, model_path: str, reference_path: str | None, reader: ImageReader | None, ranks: Ranks
) -> TrainerParts:
    """Load the policy, its reference and its teacher, whole or in shards; every rank does.

    Args:
        config: The run.
        model_path: Weights to start from.
        reference_path: The model that KL is measured from, when it is not the one to start from.
        reader: Prepares images.
        ranks: Train together.

    Raises:
        ConfigError: options of the algorithm that do not fit, or ranks that do not fit the machine.
        UsageError: a model that is not there.
    """
    section = config.model
    device = ranks.device(section.device) if ranks.are_many else None

    def load(path: str) -> PreTrainedModel:
        if device is None:
            return load_model(path, dtype=section.dtype, device=section.device)
        return load_sharded(path, dtype=section.dtype, device=device, ranks=ranks, options=config.trainer.fsdp)

    model = load(model_path)
    reference = None
    if Objective(config.algorithm).uses_reference and (reference_path is not None or ranks.are_many):
        reference = load(reference_path or model_path).requires_grad_(False)
    guide = config.algorithm.teacher
    teacher = None if guide is None or guide.servers else load(guide.path).requires_grad_(False)
    trainer = Trainer(
        model,
        config.algorithm,
        config.trainer,
        seed=config.run.seed,
        max_tokens=config.agent.max_tokens,
        reference=reference,
        teacher=teacher,
        reader=reader,
        ranks=ranks,
    )
    source = ModelWeights(model, ranks=ranks, dtype=section.dtype)
    return TrainerParts(trainer=trainer, source=source)
