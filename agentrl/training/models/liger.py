"""Liger's kernels (https://arxiv.org/abs/2410.10989) in place of a model's norms, rotary positions and feed-forward.

Each fuses what transformers computes in several steps: less memory traffic, and fewer activations. The output head
stays agentrl's own, which never makes a tensor of [tokens, vocabulary]. Liger replaces rotary positions for all models
of the same type in this process, and norms and feed-forward parts of those that are made later, too.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.extra import Extra

LIGER = Extra(name="gpu", module="liger_kernel")
LEFT_OUT = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Liger's own losses, which would take the place of the head."""


def use_liger(model: PreTrainedModel) -> None:
    """Put Liger's kernels into a model; weights and their names stay.

    Args:
        model: Changed in place, in shards or not.

    Raises:
        ConfigError: the model is not on a GPU, or Liger has no kernels for its type.
        UsageError: the extra is not installed.
    """
    if model.device.type != "cuda":
        raise ConfigError(
            "trainer.kernels liger needs a GPU",
            got=f"a model on {model.device}",
            expected="a model on CUDA or ROCm",
            hint="set trainer.kernels=torch",
        )
    known = LIGER.load("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    if model.config.model_type not in known:
        raise ConfigError(
            "Liger has no kernels for this model",
            got=f"model type {model.config.model_type} with trainer.kernels liger",
            expected=f"one of {', '.join(sorted(known))}",
            hint="set trainer.kernels=torch",
        )
    LIGER.load("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model, **LEFT_OUT)
