"""Comparison of attention back ends: padded SDPA, packed rows, shared prefixes; values, gradients and speed.

agentrl bench attention --folder benchmarks/gpu size=0.6B
"""

from __future__ import annotations

from typing import Any

import torch
from _gpu_setup import choose_size, conditions, episodes, random_model, seconds_of

from agentrl.config.config import TrainerConfig
from agentrl.training.forward.layout import MIN_SHARED_TOKENS, Layout, choose_layout
from agentrl.training.forward.logprobs import score
from agentrl.training.forward.sequences import ScoredSequence, scored_sequence


def _gradients(model: Any, sequences: list[ScoredSequence], layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    logp = score(model, sequences, temperature=1.0, layout=layout).logp
    torch.autograd.backward(logp.sum() / logp.numel())
    return logp.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def run(
    *, size: str | None = None, sequences: int = 8, prompt: int = 512, answer: int = 256, rounds: int = 3
) -> dict[str, Any]:
    """Score the same sequences in each way; differences are relative to padded SDPA.

    Args:
        size: Size of the model.
        sequences: Number of sequences, in groups of 4 with a common prompt.
        prompt: Tokens of each prompt.
        answer: Maximum number of tokens of an answer.
        rounds: Timed passes of each; the fastest counts.
    """
    size = choose_size(size)
    found: dict[str, Any] = {**conditions(), "size": size}
    for dtype in (torch.float32, torch.bfloat16):
        model = random_model(size, dtype=dtype)
        played = episodes(sequences, prompt=prompt, answer=answer, vocabulary=model.config.vocab_size)
        scored = [scored_sequence(t.sequences[0].token_ids, t.sequences[0].loss_mask) for t in played]
        tokens = sum(map(len, scored))
        expected_logp, expected = _gradients(model, scored, Layout())
        figures: dict[str, Any] = {"padded": {"tokens_per_s": tokens / min(_times(model, scored, Layout(), rounds))}}
        choose_layout(model, TrainerConfig(share_prefixes=True))  # prepare the model's attention for packed rows
        for name, share in (("packed", 0), ("shared", MIN_SHARED_TOKENS)):
            layout = Layout(packed=True, share=share)
            logp, gradient = _gradients(model, scored, layout)
            figures[name] = {
                "logp_abs_mean": float((logp - expected_logp).abs().mean()),
                "gradient_difference": _apart(gradient, expected),
                "tokens_per_s": tokens / min(_times(model, scored, layout, rounds)),
            }
        found[str(dtype).removeprefix("torch.")] = figures
    return found


def _times(model: Any, scored: list[ScoredSequence], layout: Layout, rounds: int) -> list[float]:
    return [seconds_of(lambda: _gradients(model, scored, layout)) for _ in range(rounds)]
