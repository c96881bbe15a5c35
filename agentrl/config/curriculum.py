"""Settings of what is played when: horizons that grow, and tasks in pools by how often they are solved."""

from __future__ import annotations

import enum
import itertools
from typing import Self

from pydantic import Field, model_validator

from agentrl.config.section import Section


class HorizonConfig(Section):
    """Episodes of few turns first, and of more later: at given steps, or when enough of them succeed."""

    turns: list[int] = Field(min_length=2)
    """Turns of an episode, stage by stage: ``[10, 20, 30]``. Never more than ``agent.max_turns``."""
    at_steps: list[int] | None = None
    """Training steps after which each stage begins, one for each: ``[0, 100, 200]``."""
    success_above: float | None = Field(None, gt=0, lt=1)
    """Or else: the success of training episodes above which the next stage begins; each environment has its own."""
    over_steps: int = Field(5, ge=1)
    """Training steps whose mean success is compared with ``success_above``; all of them at the same horizon."""

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        if self.turns[0] < 1 or not _grows(self.turns):
            raise ValueError(f"curriculum.horizon.turns is {self.turns}: give numbers that grow, from at least 1")
        if (self.at_steps is None) == (self.success_above is None):
            raise ValueError(
                "curriculum.horizon grows by curriculum.horizon.at_steps or by curriculum.horizon.success_above: "
                "set one of them"
            )
        if self.success_above is None and self.over_steps != type(self).model_fields["over_steps"].default:
            raise ValueError("curriculum.horizon.over_steps is ignored without success_above: remove it")
        return self

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        steps = self.at_steps
        if steps is None:
            return self
        if len(steps) != len(self.turns):
            raise ValueError(
                f"curriculum.horizon.at_steps has {len(steps)} steps for {len(self.turns)} stages: give one for each"
            )
        if steps[0] != 0 or not _grows(steps):
            raise ValueError(f"curriculum.horizon.at_steps is {steps}: give 0 first, and then numbers that grow")
        return self


class PooledBy(enum.StrEnum):
    """Whose success is counted together."""

    TASK = "task"
    """Each task has a rate of its own; for a set of tasks that the run walks more than once."""
    TYPE = "type"
    """All tasks of one type together; for environments whose tasks say their type."""
    ENVIRONMENT = "environment"
    """All tasks of an environment together; for several environments, such as sizes of one puzzle."""


class PoolsConfig(Section):
    """Tasks that are nearly always, or hardly ever, solved are played less often: their groups seldom differ."""

    by: PooledBy = PooledBy.TASK
    """What is judged: ``task``, ``type`` of task, or ``environment``."""
    easy_above: float = Field(0.9, gt=0, le=1)
    """Success rate above which something is easy."""
    hard_below: float = Field(0.1, ge=0, lt=1)
    """Success rate below which something is hard."""
    revisit: float = Field(0.1, gt=0, lt=1)
    """Share of their turns at which the easy and the hard are played all the same, so that nothing is lost."""
    half_life: float = Field(100.0, gt=0)
    """Training steps after which an episode counts half in the rate: the policy that played it is no more."""

    @model_validator(mode="after")
    def _thresholds_fit(self) -> Self:
        if self.hard_below >= self.easy_above:
            raise ValueError(
                f"curriculum.pools.hard_below ({self.hard_below:g}) must be below curriculum.pools.easy_above "
                f"({self.easy_above:g}): what lies between them is played always"
            )
        return self


class CurriculumConfig(Section):
    """What is played when."""

    horizon: HorizonConfig | None = None
    """Growing turn limits; the agent's own from the start when left out."""
    pools: PoolsConfig | None = None
    """Pools by success; every task equally often when left out."""


def _grows(numbers: list[int]) -> bool:
    return all(low < high for low, high in itertools.pairwise(numbers))
