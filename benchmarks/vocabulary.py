"""Peak memory of a training step with a doubled vocabulary: no [tokens, vocabulary] tensor may exist.

The model has a small width, so that its head is cheap, and enough tokens for several chunks of logits. The memory of
the embedding and the head (weights, their gradient, AdamW's two moments) always grows with the vocabulary and is
reported separately: `beside` is the rest, and `growth` is its growth.

    agentrl bench vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from support.models import tiny_model
from throughput.training_load import GROUP_SIZE, multi_turn

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.training.diagnostics.memory_trace import TensorMemory
from agentrl.training.trainer import Trainer


def _measure(vocabulary: int, width: int, groups: int, budget: int) -> dict[str, float]:
    model = tiny_model(vocab_size=vocabulary, hidden_size=width, max_context=4096, initializer_range=0.02)
    config = TrainerConfig(tokens_per_micro_batch=budget)
    with TensorMemory() as memory:
        for parameter in model.parameters():
            memory.count(parameter)
        trainer = Trainer(model, AlgorithmConfig(group_size=GROUP_SIZE), config, seed=0, max_tokens=10**6)
        trajectories = multi_turn(groups, vocabulary, 0)
        for _ in range(2):
            trainer.step(trajectories, temperature=1.0)
    embedding = 4 * model.get_input_embeddings().weight.numel()
    own = 4 * embedding  # weights, gradient, two moments
    return {
        "peak_megabytes": memory.peak / 2**20,
        "own_megabytes": own / 2**20,
        "beside_megabytes": (memory.peak - own) / 2**20,
        "largest_tensor": memory.largest,
        "targets": sum(trajectory.sampled_tokens for trajectory in trajectories),
    }


def run(
    *, vocabulary: int = 150_000, width: int = 32, groups: int = 1, budget: int = 4096, threads: int = 1
) -> dict[str, Any]:
    """Run steps with a vocabulary, and with one of twice the size; float32, tied embeddings, 2 layers.

    Args:
        vocabulary: Entries of the smaller vocabulary.
        width: Width of the model.
        groups: Groups of 8 episodes each.
        budget: Tokens of a micro-batch.
        threads: Threads of torch.
    """
    torch.set_num_threads(threads)
    once, twice = (_measure(size, width, groups, budget) for size in (vocabulary, 2 * vocabulary))
    return {
        "vocabulary": vocabulary,
        "once": once,
        "twice": twice,
        "growth": twice["beside_megabytes"] / once["beside_megabytes"] - 1,
    }
