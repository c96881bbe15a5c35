"""Statistics over segments (groups of episodes, sequences or turns of tokens), and top-k selection with ties.

Results do not depend on the order of a segment's members, except for the last bits of sums.
"""

from __future__ import annotations

import torch

from agentrl.reward import MIN_DIFFERENCE, ROUNDING

STD_EPSILON = 1e-6
"""Term added to standard deviations before dividing by them."""

TIE = 4e-6
"""Difference of tied values, relative to the largest value: the rounding error of float32 log-probabilities."""


def segment_sum(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Sum the values of each segment: [count] from values [n] and segment int64 [n]."""
    return values.new_zeros(count).index_add(0, segment, values)


def segment_mean(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Compute the mean of the values of each segment: [count]; 0 for an empty segment."""
    return segment_sum(values, segment, count) / segment_sizes(segment, count).clamp(min=1)


def segment_std(values: torch.Tensor, segment: torch.Tensor, count: int, *, unbiased: bool = True) -> torch.Tensor:
    """Compute the standard deviation of each segment: [count]; 0 for a single member and for equal values.

    With ``unbiased``, the divisor is the number of members minus one.
    """
    difference = subtract_mean(values, segment, count)
    scale = _power_of_two(values.new_zeros(count).scatter_reduce(0, segment, difference.abs(), "amax"))
    squares = segment_sum((difference / scale[segment]).square(), segment, count)
    return scale * (squares / (segment_sizes(segment, count) - int(unbiased)).clamp(min=1)).sqrt()


def _power_of_two(largest: torch.Tensor) -> torch.Tensor:
    """Compute a power of two near each number, so that squares of quotients neither overflow nor underflow: [n].

    Division by a power of two is exact, so it does not change the result.
    """
    exponent = torch.frexp(largest).exponent
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent - 1), 1.0)


def subtract_mean(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Subtract the mean of their segment from values: [n]; exactly 0 where they differ by rounding only."""
    return deviation(values, segment_mean(values, segment, count)[segment], segment, count)


def deviation(values: torch.Tensor, baseline: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Subtract a baseline from values, both [n]; the result is exactly 0 where they differ by rounding only.

    The mean of equal numbers may differ from them: the mean of three times 0.7 is 0.7 - 1e-16. That difference would be
    a gradient, and an optimizer that normalizes gradients would take a full step. The bounds are those of
    `agentrl.reward.rewards_differ`.
    """
    largest = values.new_zeros(count).scatter_reduce(0, segment, values.abs(), "amax")
    difference = values - baseline
    return torch.where(difference.abs() <= MIN_DIFFERENCE + ROUNDING * largest[segment], 0.0, difference)


def exceeds(values: torch.Tensor, other: torch.Tensor | float) -> torch.Tensor:
    """Return True where rewards or returns are greater than others by more than rounding: bool.

    A return of 0 may be stored as 0.1 + 0.2 - 0.3 = 5.6e-17. The bounds are those of `agentrl.reward.rewards_differ`.
    """
    others = torch.as_tensor(other, dtype=values.dtype, device=values.device)
    return values - others > MIN_DIFFERENCE + ROUNDING * torch.maximum(values.abs(), others.abs())


def differs(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Return True for each segment whose members differ by more than rounding: bool [count]."""
    return segment_sum((subtract_mean(values, segment, count) != 0).long(), segment, count) > 0


def segment_sizes(segment: torch.Tensor, count: int) -> torch.Tensor:
    """Count the members of each segment: int64 [count]."""
    return torch.bincount(segment, minlength=count)


def whiten(values: torch.Tensor) -> torch.Tensor:
    """Transform values to mean 0 and (unbiased) standard deviation 1; a single value becomes 0."""
    if values.numel() < 2:
        return torch.zeros_like(values)
    return standardize(values, torch.zeros_like(values, dtype=torch.int64), 1)


def backward_sums(values: torch.Tensor, factors: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
    """Compute x_k = values_k + factors_k x_{k+1} within each segment, whose members are consecutive: all [n]."""
    sums, owners, scales = values.tolist(), segment.tolist(), factors.tolist()
    for k in range(len(sums) - 2, -1, -1):
        if owners[k] == owners[k + 1]:
            sums[k] += scales[k] * sums[k + 1]
    return values.new_tensor(sums)


def standardize(values: torch.Tensor, segment: torch.Tensor, count: int, *, unbiased: bool = True) -> torch.Tensor:
    """Subtract the mean of their segment from values, and divide by its standard deviation: [n].

    The result is 0 in a segment with a single member or with equal values.
    """
    std = segment_std(values, segment, count, unbiased=unbiased)
    return subtract_mean(values, segment, count) / (std[segment] + STD_EPSILON)


def top_shares(values: torch.Tensor, count: int) -> torch.Tensor:
    """Compute the share with which each value is among the `count` largest: [n], from 0 to 1.

    The share is 1 above the smallest of the `count` largest values, and 0 below it. Values that tie with the smallest
    share the remaining places evenly, so the shares add up to `count` and do not depend on the order of the values.
    """
    if not count:
        return torch.zeros_like(values)
    tie = TIE * values.abs().max()
    least = values.topk(count).values[-1]
    above, tied = values > least + tie, (values - least).abs() <= tie
    return torch.where(above, 1.0, torch.where(tied, (count - above.sum()) / tied.sum(), 0.0)).to(values.dtype)


def tied_blocks(ordered: torch.Tensor) -> torch.Tensor:
    """Number the blocks of tied neighbours in sorted values: int64 [n], from 0."""
    if not ordered.numel():
        return torch.zeros_like(ordered, dtype=torch.int64)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered.diff().abs() > TIE * ordered.abs().max()
    return starts.cumsum(0) - 1
