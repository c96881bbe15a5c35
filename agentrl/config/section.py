"""What all sections of a config have in common."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are checked on assignment, docstrings document fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_assignment=True)


Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
"""A number that is one."""

LearningRate: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""Of an average that moves: the share of it that each new value leaves."""
