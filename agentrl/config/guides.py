"""Settings of those who show a policy the way: a teacher's probabilities, and episodes of an expert."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from agentrl.config.engines import address
from agentrl.config.section import Section


class TeacherConfig(Section):
    """A frozen model that says how probable it finds the policy's own tokens, or what it would have said instead; for
    ``loss: distill`` or ``distill_top_k``, or ``shaping: {distill: {coef: …}}``.
    """

    path: str
    """A Hugging Face name or folder, or a run folder; its tokens must be the policy's. Loaded beside the trainer, and
    shared over its ranks, unless there are servers."""
    top_k: int | None = Field(None, ge=1)
    """How many of its most probable tokens it names at each position, for ``loss: distill_top_k``."""
    servers: list[str] = Field(default_factory=list)
    """Addresses of servers that serve this model: ``[http://HOST:PORT]``. They are asked for the log-probabilities of
    what was sampled, and nothing is loaded but the tokenizer."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """What the servers are."""
    api_key_variable: str | None = None
    """Environment variable that holds the key of servers that ask for one."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of one episode's log-probabilities, with new attempts."""
    max_concurrent: int = Field(32, ge=1)
    """Most requests at once."""

    @field_validator("engine", mode="before")
    @classmethod
    def _engine_scores_tokens(cls, engine: object) -> object:
        if engine == "openai":
            raise ValueError(
                "algorithm.teacher.engine openai: a text service does not tell the log-probabilities of given tokens: "
                "use vllm or sglang, or leave out algorithm.teacher.servers"
            )
        return engine

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.servers:
            for url in self.servers:
                address(url)
            return self
        for name in ("engine", "api_key_variable", "timeout_s", "max_concurrent"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"algorithm.teacher.{name} is ignored without algorithm.teacher.servers: remove it")
        return self


class ExpertConfig(Section):
    """Members of every group that the environment's expert plays, or has played; for ``loss: luffy``."""

    members: int = Field(1, ge=1)
    """How many of the ``algorithm.group_size``; the policy plays the others. One in eight is usual."""
    trajectories: str | None = None
    """Stored episodes to show instead: a run, its folder ``trajectories`` or a file of it. A task that is not among
    them has no expert."""
