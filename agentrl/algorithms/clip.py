"""The clip range around a ratio of 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """Ratios are kept in [1 - low, 1 + high]."""

    low: float
    high: float

    def clip(self, ratio: torch.Tensor) -> torch.Tensor:
        """The ratio, bounded on both sides."""
        return ratio.clamp(1.0 - self.low, 1.0 + self.high)

    def outside(self, ratio: torch.Tensor) -> torch.Tensor:
        """Bool: the ratio is not in the range."""
        return (ratio < 1.0 - self.low) | (ratio > 1.0 + self.high)


def clip_range(clip: float | None, clip_low: float | None, clip_high: float | None, *, default: ClipRange) -> ClipRange:
    """The range from one symmetric number or from two; a side that is not given takes the default.

    Raises:
        ConfigError: both a symmetric and an asymmetric number, or a negative one.
    """
    sides = {"clip_low": clip_low, "clip_high": clip_high}
    given = {name: value for name, value in sides.items() if value is not None}
    if clip is not None and given:
        raise ConfigError(
            "the loss has a symmetric and an asymmetric clip",
            got=f"clip={clip} and {', '.join(f'{name}={value}' for name, value in given.items())}",
            expected="clip alone, or clip_low and clip_high",
        )
    if any(value is not None and value < 0 for value in (clip, clip_low, clip_high)):
        raise ConfigError("a clip is negative", got=min(v for v in (clip, clip_low, clip_high) if v is not None))
    return ClipRange(
        low=_first(clip, clip_low, default.low),
        high=_first(clip, clip_high, default.high),
    )


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
