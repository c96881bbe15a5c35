"""Sampling of one token per row, for rows with settings of their own.

- Random numbers that depend on nothing but a seed and a counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.engine import SamplingParams
from agentrl.serving.request import SEED_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What was sampled, one entry per row."""

    token_ids: list[int]
    logprobs: list[float]
    """Before any cut, at the row's temperature (at temperature 0, of temperature 1)."""


def sample(logits: Tensor, params: Sequence[SamplingParams], uniforms: npt.NDArray[np.float64]) -> SampledTokens:
    """Sample by the inverse of the cumulative distribution, in the vocabulary's order.

    Args:
        logits: float[n, vocabulary].
        params: Settings of each row.
        uniforms: float64[n] in [0, 1), one random number per row.

    Raises:
        FloatingPointError: a row's logits are not finite.
    """
    temperatures = [p.temperature or 1.0 for p in params]
    logits = logits.float()
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = _draw(_kept(logprobs, params), torch.from_numpy(uniforms).to(logits.device))
    if any(p.temperature == 0 for p in params):
        greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    if not bool(torch.isfinite(chosen).all()):
        raise FloatingPointError("the model's logits are not finite")
    return SampledTokens(token_ids=tokens.tolist(), logprobs=chosen.tolist())


def _draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    targets = torch.minimum(uniforms[:, None] * total, below_total)
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=probabilities.shape[1] - 1)


def _kept(logprobs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities with zeros where a row's top-k, top-p or min-p cuts."""
    probabilities = logprobs.exp()
    cut = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1 or p.min_p]
    if cut:
        rows = torch.tensor(cut, device=logprobs.device)
        probabilities[rows] = _cut(probabilities[rows], [params[i] for i in cut])
    return probabilities


def _cut(probabilities: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply top-k, then top-p to what top-k left, then min-p; the likeliest token always stays."""
    size = probabilities.shape[1]
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=probabilities.device, dtype=torch.float64)[:, None]

    ranks = torch.arange(size, device=probabilities.device)
    keep = ranks < column([p.top_k or size for p in params])
    left = torch.where(keep, ordered, 0.0).to(torch.float64)
    before = left.cumsum(dim=-1) - left
    keep &= before < column([p.top_p for p in params]) * left.sum(dim=-1, keepdim=True)
    keep &= ordered >= column([p.min_p for p in params]) * ordered[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(probabilities).scatter_(1, order, torch.where(keep, ordered, 0.0))


_STEP = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: list[int], counters: list[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per pair of seed and counter, the same wherever and with whatever else it is drawn.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), applied to the seed and then
    to the counter.

    Returns:
        float64[n] with 53 random bits each.
    """
    keys = np.array([seed % (1 << SEED_BITS) for seed in seeds], dtype=np.uint64)
    bits = _mix(_mix(keys) + np.array(counters, dtype=np.uint64) * _STEP)
    numbers: npt.NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + _STEP
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
