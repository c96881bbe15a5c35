"""Comparison of Liger's kernels in the layers of a model (extra `gpu`) with transformers': values, gradients, speed.

agentrl bench liger --folder benchmarks/gpu size=0.6B
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch
from _gpu_setup import choose_size, conditions, episodes, random_model, seconds_of

from agentrl.training.compile import use_liger
from agentrl.training.forward.logprobs import score
from agentrl.training.forward.sequences import ScoredSequence, scored_sequence


def _gradients(model: Any, sequences: list[ScoredSequence]) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    logp = score(model, sequences, temperature=1.0).logp
    torch.autograd.backward(logp.sum() / logp.numel())
    return logp.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def run(
    *, size: str | None = None, sequences: int = 8, prompt: int = 512, answer: int = 256, rounds: int = 3
) -> dict[str, Any]:
    """Score the same sequences with and without Liger, in bfloat16.

    Args:
        size: Size of the model.
        sequences: Number of sequences, in groups of 4 with a common prompt.
        prompt: Tokens of each prompt.
        answer: Maximum number of tokens of an answer.
        rounds: Timed passes of each; the fastest counts.
    """
    size = choose_size(size)
    model = random_model(size)
    played = episodes(sequences, prompt=prompt, answer=answer, vocabulary=model.config.vocab_size)
    scored = [scored_sequence(t.sequences[0].token_ids, t.sequences[0].loss_mask) for t in played]
    tokens = sum(map(len, scored))
    expected_logp, expected = _gradients(model, scored)
    plain = min(seconds_of(lambda: _gradients(model, scored)) for _ in range(rounds))
    found: dict[str, Any] = {**conditions(), "size": size, "plain": {"tokens_per_s": tokens / plain}}
    if not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None:
        return {**found, "liger": "needs a GPU and the extra agentrl[gpu]"}
    other = copy.deepcopy(model)
    use_liger(other)
    logp, gradient = _gradients(other, scored)
    fast = min(seconds_of(lambda: _gradients(other, scored)) for _ in range(rounds))
    return {
        **found,
        "liger": {
            "logp_abs_mean": float((logp - expected_logp).abs().mean()),
            "gradient_difference": float((gradient - expected).norm() / expected.norm()),
            "tokens_per_s": tokens / fast,
        },
    }
