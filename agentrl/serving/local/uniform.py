"""Random numbers that depend on nothing but a seed and a counter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentrl.serving.request import SEED_BITS

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
