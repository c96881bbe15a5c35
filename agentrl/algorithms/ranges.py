"""Ranges in which options must be; `agentrl.algorithms.options.check_options` refuses others."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

Discount: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Depth: TypeAlias = Annotated[int, Field(ge=0)]
