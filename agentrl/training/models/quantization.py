"""Frozen weights in 4 bits, for adapters (QLoRA, https://arxiv.org/abs/2305.14314)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import BitsAndBytesConfig

from agentrl.errors import ConfigError
from agentrl.extra import Extra

BITSANDBYTES = Extra(name="qlora", module="bitsandbytes")


def quantized_loading(quantize: Literal["nf4"], *, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that load a model in 4 bits.

    Args:
        quantize: The format.
        dtype: In which layers compute.
        device: Of the model.

    Raises:
        ConfigError: the device is no GPU.
        UsageError: bitsandbytes is not installed.
    """
    if device.type != "cuda":
        raise ConfigError(
            "model.lora.quantize needs a GPU",
            got=f"model.device {device.type}",
            expected="cuda",
            hint="leave model.lora.quantize out: adapters train on the CPU without it",
        )
    BITSANDBYTES.load()
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantize,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": settings, "device_map": {"": device}}
