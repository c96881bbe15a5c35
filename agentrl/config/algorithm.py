"""Settings of the algorithm's parts: teacher, expert, reference policy, and learning from pairs of episodes."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentrl.config.engines import address
from agentrl.config.section import LearningRate, Section


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


class ReferenceConfig(Section):
    """Reference policy of ``algorithm.kl_coef``, the shaping ``kl``, and losses such as ``sppo``."""

    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3+"
    """Estimator of the KL of ``algorithm.kl_coef``. With a plus it has its own value and the gradient of k2, which is
    an unbiased estimate of the divergence's; the gradient of k3 (GRPO's paper, verl, TRL) is another divergence's."""
    refresh_every: int = Field(0, ge=0)
    """Steps of a round, after which the reference becomes the policy of then: self-play with ``loss: sppo``, or a KL
    that forgets. 0 keeps the policy of the start of the run."""


class PreferencesConfig(Section):
    """Pairs of stored episodes of one task (`agentrl dpo`); what is not here is taken from ``trainer``."""

    sources: list[str] = Field(default_factory=list)
    """Runs, their folders ``trajectories``, or files of those; ``--from`` on the command line."""
    loss: str = "dpo"
    """Registry name of a loss on pairs (``dpo``, ``spin``), or module:attr."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments: ``{beta: 0.1}``."""
    pairs: Literal["rewards", "demonstrations"] = "rewards"
    """Who is preferred to whom: the episode with the greater reward; or a demonstration to what the policy did, for
    ``spin``."""
    pairs_per_task: int = Field(1, ge=1)
    """Most pairs of a task: the best with the worst, the second best with the second worst, and so on."""
    epochs: int = Field(1, ge=1)
    """Passes over the pairs."""
    pairs_per_update: int = Field(16, ge=1)
    """Pairs of an optimizer step."""
    learning_rate: LearningRate = 1e-6
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Learning rate after the warm-up; cosine ends at a tenth of it."""

    @model_validator(mode="after")
    def _pairs_fit_the_loss(self) -> Self:
        if self.loss == "spin" and self.pairs != "demonstrations":
            raise ValueError(
                "preferences.loss spin prefers demonstrations to what the policy did: "
                "set preferences.pairs=demonstrations, or preferences.loss=dpo"
            )
        return self
