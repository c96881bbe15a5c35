"""Sums and means over segments: groups of episodes, sequences or turns of tokens."""

from __future__ import annotations

import torch

STD_EPSILON = 1e-6
"""Added to every standard deviation that divides."""


def segment_sum(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Sum of the values of each segment: values [n], segment int64 [n], result [count]."""
    return values.new_zeros(count).index_add(0, segment, values)


def segment_mean(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Mean of the values of each segment: [count]; 0 for an empty one."""
    return segment_sum(values, segment, count) / segment_sizes(segment, count).clamp(min=1)


def segment_std(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Unbiased standard deviation of each segment: [count]; 0 for a segment of one."""
    deviations = values - segment_mean(values, segment, count)[segment]
    squares = segment_sum(deviations.square(), segment, count)
    return (squares / (segment_sizes(segment, count) - 1).clamp(min=1)).sqrt()


def segment_sizes(segment: torch.Tensor, count: int) -> torch.Tensor:
    """Number of members of each segment: int64 [count]."""
    return torch.bincount(segment, minlength=count)


def whiten(values: torch.Tensor) -> torch.Tensor:
    """Values with mean 0 and (unbiased) standard deviation 1; a single value becomes 0."""
    if values.numel() < 2:
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + STD_EPSILON)


def backward_sums(values: torch.Tensor, factors: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
    """x_k = values_k + factors_k x_{k+1} within each segment: all [n], the members of a segment neighbours."""
    sums, owners, scales = values.tolist(), segment.tolist(), factors.tolist()
    for k in range(len(sums) - 2, -1, -1):
        if owners[k] == owners[k + 1]:
            sums[k] += scales[k] * sums[k + 1]
    return values.new_tensor(sums)


def standardize(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Values minus the mean of their segment, over its unbiased standard deviation: [n]; 0 in a segment of one."""
    sizes = segment_sizes(segment, count)
    deviation = values - (segment_sum(values, segment, count) / sizes.clamp(min=1))[segment]
    variance = segment_sum(deviation.square(), segment, count) / (sizes - 1).clamp(min=1)
    return deviation / (variance.sqrt()[segment] + STD_EPSILON)
