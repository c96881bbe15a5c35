"""Options of estimators and losses: their keyword-only parameters, whose types and ranges are checked before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import Field

from agentrl.config.function_options import convert_options
from agentrl.errors import ConfigError

Discount: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Depth: TypeAlias = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """Range [1 - low, 1 + high] of ratios."""

    low: float
    high: float

    def clip(self, ratio: torch.Tensor) -> torch.Tensor:
        """Clamp ratios to the range."""
        return ratio.clamp(1.0 - self.low, 1.0 + self.high)

    def outside(self, ratio: torch.Tensor) -> torch.Tensor:
        """Return True where a ratio is outside the range."""
        return (ratio < 1.0 - self.low) | (ratio > 1.0 + self.high)


def clip_range(clip: float | None, clip_low: float | None, clip_high: float | None, *, default: ClipRange) -> ClipRange:
    """Make a clip range from one symmetric number or from two; a missing side has the default.

    Raises:
        ConfigError: symmetric and asymmetric numbers are combined, or a number is negative.
    """
    sides = {"clip_low": clip_low, "clip_high": clip_high}
    given = {name: value for name, value in sides.items() if value is not None}
    if clip is not None and given:
        raise ConfigError(
            "the loss has a symmetric and an asymmetric clip",
            got=f"clip={clip} and {', '.join(f'{name}={value}' for name, value in given.items())}",
            expected="either clip, or clip_low and clip_high",
        )
    if any(value is not None and value < 0 for value in (clip, clip_low, clip_high)):
        raise ConfigError("a clip is negative", got=min(v for v in (clip, clip_low, clip_high) if v is not None))
    return ClipRange(
        low=_first(clip, clip_low, default.low),
        high=_first(clip, clip_high, default.high),
    )


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def check_options(
    function: Callable[..., Any], options: Mapping[str, Any], *, name: str | None = None
) -> dict[str, Any]:
    """Check options of `function`, and convert them to the types of its keyword-only parameters.

    Errors call the function `name`, by default its own name.

    Raises:
        ConfigError: an option is unknown (the message suggests the nearest name), missing, of the wrong type, outside
            its range, or in conflict with another (symmetric and asymmetric clip).
    """
    called: str = getattr(function, "__name__", repr(function)) if name is None else name
    checked = convert_options(called, function, options)
    clip_range(*(checked.get(side) for side in ("clip", "clip_low", "clip_high")), default=ClipRange(low=0, high=0))
    bound = checked.get("dual_clip")
    if bound is not None and bound < 1:
        raise ConfigError(
            f"{called}: dual_clip must bound ratios above 1", got=bound, expected="at least 1, or null for no bound"
        )
    return checked
