"""Settings of sampling, of playing episodes, of evaluations, and of what a run stores for observers."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from agentrl.config.engines import EngineConfig
from agentrl.config.section import Section


class FirstTokenConfig(Section):
    """Sampling of the first token of each answer, for more diverse episodes (FIRE)."""

    temperature: float = Field(gt=0, allow_inf_nan=False)
    """Divisor of the logits, such as ``30``."""
    top_k: int = Field(ge=1, le=20)
    """Number of most probable tokens to sample from, such as ``16``; vLLM reports at most 20."""


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0)
    """Divisor of the logits; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Total probability of the smallest set of most probable tokens to sample from."""
    top_k: int = Field(0, ge=0)
    """Number of most probable tokens to sample from; 0 for all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Minimum probability of a token, as a share of the most probable token's."""
    first_token: FirstTokenConfig | None = None
    """Sampling of the first token of each answer, such as ``{temperature: 30, top_k: 16}``; evaluations use it only if
    ``evaluation.sampling`` has it."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end an answer, such as the closing tag of an action; they stay in the answer."""


BatchOrder: TypeAlias = Literal["windowed", "greedy"]


class RolloutConfig(Section):
    max_staleness: int = Field(0, ge=0)
    """Maximum number of policy versions between sampling and training; 0: synchronous, 1: one step off-policy."""
    batch_order: BatchOrder = "windowed"
    """Groups of a batch if ``max_staleness`` is above 0: ``windowed`` waits for groups that would be too stale for a
    later batch, so that none is dropped; ``greedy`` takes the groups that end first, and drops slow ones."""
    max_concurrent: int = Field(128, ge=1)
    """Maximum number of concurrent episodes, including those that wait for a tool or an environment."""
    retries: int = Field(2, ge=0)
    """Maximum number of retries of an episode after infrastructure failures."""
    stall_report_s: float = Field(60.0, gt=0)
    """Seconds without progress after which the run prints what each part waits for."""

    @property
    def is_synchronous(self) -> bool:
        """True if no episode runs while the trainer trains, so that a local engine can share the trainer's weights."""
        return self.max_staleness == 0

    @model_validator(mode="after")
    def _batch_order_is_used(self) -> Self:
        if self.is_synchronous and self.batch_order == "greedy":
            raise ValueError(
                "rollout.batch_order greedy is ignored with rollout.max_staleness 0, where a batch waits for all its "
                "groups: remove it, or raise rollout.max_staleness"
            )
        return self


class EvaluationConfig(Section):
    every: int = Field(0, ge=0)
    """Training steps between evaluations; 0 for no evaluations."""
    split: str = "valid"
    """Split of the evaluation tasks, for ``agentrl eval`` too."""
    tasks: int = Field(64, ge=1)
    """Number of evaluation tasks, which ``run.seed`` selects; every evaluation of the run uses the same ones.
    ``agentrl eval`` plays as many, selected by its own seed."""
    samples: int = Field(1, ge=1)
    """Episodes per task."""
    sampling: SamplingConfig | None = None
    """Sampling parameters of evaluations; those of training if not set. Stop texts not set here are those of training
    as well."""
    engine: EngineConfig | None = None
    """Separate engine for evaluations, which then run during asynchronous training:
    ``{type: local}``, or attached servers, ``{type: vllm, servers: ["http://…"]}``. It keeps the weights of the
    evaluated step, while the run's engine gets new ones. See docs/asynchronous.md."""


class CheckpointConfig(Section):
    every: int = Field(10, ge=1)
    """Training steps between checkpoints; the last step is always saved."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    background: bool = False
    """True to copy the state at the end of the step, and write the copy during the next steps."""


class ObserveConfig(Section):
    """Data that a run stores and serves for monitoring."""

    tokens: Annotated[int, Field(ge=1)] | Literal["all", "none"] = 64
    """Episodes per training step whose sampled tokens are stored with the advantage, log-probabilities, ratio and
    entropy that the trainer computed for them, in ``tokens/``: a number, ``all``, or ``none`` for no tables. Whole
    groups are chosen: in turn, the group with the largest spread of rewards, the best one, and the worst one. See
    docs/status.md."""
    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """Port on the loopback address at which Prometheus can read the run (``/metrics``); no port by default. See
    docs/monitoring.md."""
