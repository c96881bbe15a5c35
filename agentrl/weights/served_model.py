"""The model folder that launched servers serve: an untied copy of the policy, with its tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.errors import UsageError
from agentrl.weights.checkpoint_names import CheckpointNames
from agentrl.weights.safetensors_folder import SHARD_BYTES, write_tensors

HEAD = "lm_head.weight"


def write_served_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write config, tokenizer and weights into a folder; the number of bytes of the weights.

    The copy is never tied: a server may keep a packed copy of the output head that an update of the embedding does not
    reach, so the head is a tensor of its own in every update. There is no generation config: what a server samples with
    comes with each request. Experts are taken apart as in a checkpoint.

    Raises:
        UsageError: a model without an output head of its own.
    """
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if HEAD not in weights:
        raise UsageError("the model cannot be served", got=type(model).__name__, expected=f"a tensor {HEAD}")
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    config.get_text_config().tie_word_embeddings = False
    config.architectures = [type(model).__name__]
    config.dtype = next(iter(weights.values())).dtype
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return write_tensors(CheckpointNames(model).apply(weights), folder, shard_bytes=shard_bytes)
