"""Whole training steps: tokens per second, model-FLOP utilization, and peak memory compared with `agentrl plan`.

agentrl bench steps --folder benchmarks/gpu size=8B checkpointing=true
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from _gpu_setup import PEAK_FLOPS, choose_size, conditions, episodes, model_config, random_model, seconds_of

from agentrl.config import Config, load_config
from agentrl.training.diagnostics.memory_plan import plan
from agentrl.training.diagnostics.memory_trace import TensorMemory
from agentrl.training.trainer import Trainer


def _config(folder: str, dtype: str, tokens: int, budget: int, checkpointing: bool, count: int) -> Config:
    return load_config(
        None,
        [
            *("environment=none", "engine=scripted", "algorithm={group_size: 4, correction: {mode: 'off'}}"),
            f"model={{path: {folder}, dtype: {dtype}}}",
            f"agent={{max_tokens: {tokens}, max_answer_tokens: {tokens}}}",
            f"trainer={{tasks_per_step: {max(1, count // 4)}, tokens_per_micro_batch: {budget}}}",
            f"trainer.gradient_checkpointing={str(checkpointing).lower()}",
        ],
    )


def _flops(parameters: int, embeddings: int, width: int, layers: int, lengths: list[int]) -> float:
    """Return the FLOPs of a forward and a backward pass: 6 per product weight and token, 6 per token pair and width."""
    pairs = sum(length * length for length in lengths) / 2
    return 6 * (parameters - embeddings) * sum(lengths) + 12 * layers * width * pairs


def run(
    *,
    size: str | None = None,
    dtype: str = "bfloat16",
    sequences: int = 8,
    prompt: int = 512,
    answer: int = 1536,
    budget: int = 8192,
    checkpointing: bool = False,
    rounds: int = 3,
) -> dict[str, Any]:
    """Take GRPO steps on random trajectories.

    Args:
        size: Size of the model.
        dtype: bfloat16 or float32.
        sequences: Sequences per step, in groups of 4 with a common prompt.
        prompt: Tokens of each prompt.
        answer: Maximum number of tokens of an answer; the minimum is half of it.
        budget: Tokens of a micro-batch.
        checkpointing: True to recompute activations in the backward pass; utilization does not count recomputation.
        rounds: Timed steps, after one warm-up step.
    """
    size = choose_size(size)
    with tempfile.TemporaryDirectory() as folder:
        model_config(size).save_pretrained(folder)
        config = _config(folder, dtype, prompt + answer, budget, checkpointing, sequences)
        planned = plan(config)
    model = random_model(size, dtype=getattr(torch, dtype))
    played = episodes(sequences, prompt=prompt, answer=answer, vocabulary=model.config.vocab_size)
    on_gpu = torch.cuda.is_available()
    memory = TensorMemory()
    with nullcontext() if on_gpu else memory:
        for parameter in model.parameters():
            memory.count(parameter)
        trainer = Trainer(model, config.algorithm, config.trainer, seed=0, max_tokens=config.agent.max_tokens)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):  # the second step has the optimizer's moments from its start
            trainer.step(played, temperature=1.0)
        peak = torch.cuda.max_memory_allocated() if on_gpu else memory.peak
    taken = [seconds_of(lambda: trainer.step(played, temperature=1.0)) for _ in range(rounds)]
    lengths = [len(t.sequences[0]) for t in played]
    sizes = model.config
    embeddings = 0 if sizes.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    attention = sizes.num_attention_heads * sizes.head_dim
    useful = _flops(planned.footprint.parameters, embeddings, attention, sizes.num_hidden_layers, lengths)
    found = conditions()
    fastest = next((flops for name, flops in PEAK_FLOPS.items() if name in found["device"]), None)
    return {
        **found,
        "size": size,
        "parameters": planned.footprint.parameters,
        "dtype": dtype,
        "checkpointing": checkpointing,
        "tokens": sum(lengths),
        "seconds": median(taken),
        "tokens_per_s": sum(lengths) / median(taken),
        "utilization": None if fastest is None else useful / median(taken) / fastest,
        "peak_bytes": peak,
        "planned_bytes": planned.total,
        "planned_over_measured": planned.total / peak,
    }
