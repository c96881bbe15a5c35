"""Settings of those who show a policy the way: a teacher's probabilities, and episodes of an expert."""

from __future__ import annotations

from pydantic import Field

from agentrl.config.section import Section


class TeacherConfig(Section):
    """A frozen model that says how probable it finds the policy's own tokens; for ``loss: distill`` or ``shaping:
    {distill: {coef: …}}``.
    """

    path: str
    """A Hugging Face name or folder, or a run folder; its tokens must be the policy's. Loaded beside the trainer, and
    shared over its ranks."""


class ExpertConfig(Section):
    """Members of every group that the environment's expert plays; for ``loss: luffy``."""

    members: int = Field(1, ge=1)
    """How many of the ``algorithm.group_size``; the policy plays the others. One in eight is usual."""
