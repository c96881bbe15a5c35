"""Sums and means over segments (groups of episodes, sequences or turns of tokens), and the largest of many values.

Nothing here depends on the order of the members of a segment, but for the last bits of sums.
"""

from __future__ import annotations

import torch

from agentrl.reward import LEAST_DIFFERENCE, ROUNDING

STD_EPSILON = 1e-6
"""Added to every standard deviation that divides."""

TIE = 4e-6
"""Values that differ by less than this share of the largest of all tie: the rounding of float32 log-probabilities."""


def segment_sum(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Sum of the values of each segment: values [n], segment int64 [n], result [count]."""
    return values.new_zeros(count).index_add(0, segment, values)


def segment_mean(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Mean of the values of each segment: [count]; 0 for an empty one."""
    return segment_sum(values, segment, count) / segment_sizes(segment, count).clamp(min=1)


def segment_std(values: torch.Tensor, segment: torch.Tensor, count: int, *, unbiased: bool = True) -> torch.Tensor:
    """Standard deviation of each segment: [count]; 0 for a segment of one, and for equal values.

    ``unbiased`` divides by one less than the number of members.
    """
    difference = centred(values, segment, count)
    scale = _power_of_two(values.new_zeros(count).scatter_reduce(0, segment, difference.abs(), "amax"))
    squares = segment_sum((difference / scale[segment]).square(), segment, count)
    return scale * (squares / (segment_sizes(segment, count) - int(unbiased)).clamp(min=1)).sqrt()


def _power_of_two(largest: torch.Tensor) -> torch.Tensor:
    """Return a power of two near each number, so that squares of quotients neither overflow nor vanish: [n].

    Dividing by a power of two is exact: the result has the bits that it would have without.
    """
    exponent = torch.frexp(largest).exponent
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent - 1), 1.0)


def centred(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Values minus the mean of their segment: [n]; exactly 0 where they differ by rounding only."""
    return deviation(values, segment_mean(values, segment, count)[segment], segment, count)


def deviation(values: torch.Tensor, baseline: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Values minus a baseline, both [n]: [n]; exactly 0 where they differ by rounding only.

    The mean of equal numbers need not be that number: three times 0.7 has a mean of 0.7 - 1e-16. What is left would be
    a gradient, and an optimizer that divides by the gradient's size would move the weights by a whole step. The bounds
    are those of `agentrl.reward.rewards_differ`.
    """
    largest = values.new_zeros(count).scatter_reduce(0, segment, values.abs(), "amax")
    difference = values - baseline
    return torch.where(difference.abs() <= LEAST_DIFFERENCE + ROUNDING * largest[segment], 0.0, difference)


def differs(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Bool [count]: the members of a segment differ by more than rounding."""
    return segment_sum((centred(values, segment, count) != 0).long(), segment, count) > 0


def segment_sizes(segment: torch.Tensor, count: int) -> torch.Tensor:
    """Number of members of each segment: int64 [count]."""
    return torch.bincount(segment, minlength=count)


def whiten(values: torch.Tensor) -> torch.Tensor:
    """Values with mean 0 and (unbiased) standard deviation 1; a single value becomes 0."""
    if values.numel() < 2:
        return torch.zeros_like(values)
    return standardize(values, torch.zeros_like(values, dtype=torch.int64), 1)


def backward_sums(values: torch.Tensor, factors: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
    """x_k = values_k + factors_k x_{k+1} within each segment: all [n], the members of a segment neighbours."""
    sums, owners, scales = values.tolist(), segment.tolist(), factors.tolist()
    for k in range(len(sums) - 2, -1, -1):
        if owners[k] == owners[k + 1]:
            sums[k] += scales[k] * sums[k + 1]
    return values.new_tensor(sums)


def standardize(values: torch.Tensor, segment: torch.Tensor, count: int, *, unbiased: bool = True) -> torch.Tensor:
    """Values minus the mean of their segment, over its standard deviation: [n]; 0 in a segment of one, or of equals."""
    std = segment_std(values, segment, count, unbiased=unbiased)
    return centred(values, segment, count) / (std[segment] + STD_EPSILON)


def top_shares(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the share with which each value is among the `count` largest: [n], from 0 to 1.

    It is 1 above the smallest of them and 0 below it. Values that tie with the smallest share the remaining places
    evenly, so that the shares add up to `count` and do not depend on the order of the values.
    """
    if not count:
        return torch.zeros_like(values)
    tie = TIE * values.abs().max()
    least = values.topk(count).values[-1]
    above, tied = values > least + tie, (values - least).abs() <= tie
    return torch.where(above, 1.0, torch.where(tied, (count - above.sum()) / tied.sum(), 0.0)).to(values.dtype)


def tied_blocks(ordered: torch.Tensor) -> torch.Tensor:
    """Number the blocks of values that tie with their neighbour: int64 [n], from 0; `ordered` is sorted."""
    if not ordered.numel():
        return torch.zeros_like(ordered, dtype=torch.int64)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered.diff().abs() > TIE * ordered.abs().max()
    return starts.cumsum(0) - 1
