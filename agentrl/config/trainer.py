"""Settings of warm starts and of the trainer's parts: optimizer, critic, process rewards, FSDP, MoE, alarms, LoRA."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from agentrl.config.section import Decay, LearningRate, Section, user_path


class AdamConfig(Section):
    """Decay rates of AdamW, and the weight decay of Muon."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the moments."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight decay, on matrices."""


class CriticConfig(Section):
    """Critic of PPO; other settings (optimizer, warm-up, schedule, epochs, mini-batches) come from ``trainer``."""

    kind: Literal["own", "shared"] = "own"
    """``own``: a separate model with a scalar output. ``shared``: a scalar output on the policy's hidden states, which
    needs almost no memory; the value loss then changes the policy's weights, too."""
    path: str | None = None
    """Initial model of an ``own`` critic, with the policy's vocabulary; the policy's weights if not set."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate; with ``shared``, only of the scalar output."""
    pretrain_steps: int = Field(0, ge=0)
    """Number of first training steps in which only the critic is trained; with ``shared``, only its output."""
    clip: float | None = Field(0.5, gt=0)
    """Limit of a value's change in a step beyond which the value loss is clipped; ``null`` for no limit."""
    coef: float = Field(0.5, gt=0, allow_inf_nan=False)
    """Weight of the value loss relative to the policy loss; only for ``shared``."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.kind == "shared" and self.path is not None:
            raise ValueError("trainer.critic.path is ignored with kind shared: remove it, or use kind own")
        if self.kind == "own" and self.coef != type(self).model_fields["coef"].default:
            raise ValueError("trainer.critic.coef is ignored with kind own: remove it, or use kind shared")
        return self


class ProcessRewardConfig(Section):
    """Implicit process reward model of ``algorithm.advantage: prime``. Other settings (optimizer, warm-up, schedule,
    epochs, mini-batches) come from ``trainer``.
    """

    path: str | None = None
    """Initial model, with the policy's tokenizer; a frozen copy of it is the reward model's reference. If not set, the
    policy's weights at the start of the run."""
    learning_rate: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    beta: float = Field(0.05, gt=0)
    """Factor of a token's reward, beta log(pi_rm / pi_ref)."""
    success_above: float = 0.5
    """Reward, before shaping, above which an episode counts as solved."""
    update: Literal["before", "after"] = "before"
    """Order in a step: the reward model is updated ``before`` or ``after`` it rewards the tokens of the episodes."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FSDPOptions:
    """Options of FSDP, which trade memory for communication; only with several ranks."""

    replicas: Annotated[int, Field(ge=1)] = 1
    """Groups of ranks that each hold the whole model: with 2 machines of 8 GPUs, 2 shards parameters within a
    machine."""
    reshard: bool = True
    """True to release a layer's parameters between forward and backward pass: less memory, one more all-gather."""
    offload: bool = False
    """True to keep shards, gradients and the optimizer's moments in CPU memory, and compute updates there."""
    reduce: bool = False
    """True to reduce gradients over the ranks after every micro-batch instead of once per update: no full gradients in
    memory, but more communication."""


class MoEConfig(Section):
    """Training of models with routed experts; see docs/experts.md."""

    aux_loss_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the load-balancing loss of the experts; needs an additional forward pass."""
    router_replay: bool = False
    """True to route tokens in the trainer to the experts that the engine chose, so that rounding does not make their
    probabilities differ."""


class NumericsConfig(Section):
    """Limits of the alarms about training, and of updates with values that are not finite."""

    mismatch: float = Field(0.01, gt=0)
    """Mean |pi_old - mu| above which an alarm reports that trainer and engine do not compute the same model."""
    kl: float = Field(0.5, gt=0)
    """KL divergence of the policy from pi_old, within a step, above which an alarm is raised."""
    kl_reference: float = Field(10.0, gt=0)
    """KL divergence from the reference above which an alarm is raised: the policy then has little in common with it."""
    entropy_share: float = Field(0.05, ge=0, lt=1)
    """Share of the entropy of the first steps below which an alarm reports a collapse; 0 for no alarm."""
    grad_norm_ratio: float = Field(20.0, gt=1)
    """Ratio of a gradient norm to the median of the last steps above which an alarm reports a spike."""
    max_skipped: int = Field(10, ge=1)
    """Number of consecutive skipped updates that end the run."""
    dumps: int = Field(2, ge=0)
    """Maximum number of dump files per run; a dump reproduces a skipped update and holds the model's weights."""


class LoraConfig(Section):
    """Adapters (LoRA) on frozen base weights; needs the extra ``agentrl[lora]``."""

    rank: int = Field(16, ge=1)
    """Rank of the adapter matrices."""
    alpha: float | None = Field(None, gt=0)
    """Numerator of the scale ``alpha / rank`` of an adapter; twice the rank if not set."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of an adapter's inputs in a warm start (`agentrl sft`); RL uses none."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Name suffixes of the matrices that get an adapter (``q_proj``); ``all-linear``: all but the output head."""
    modules_to_save: list[str] = Field(default_factory=list)
    """Name suffixes of modules that are trained in full, such as ``embed_tokens``; the KL to the reference then needs a
    copy of the model."""
    quantize: Literal["nf4"] | None = None
    """``nf4`` to keep the frozen weights in 4 bits (QLoRA); needs a GPU and the package bitsandbytes."""

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank


class AdapterConfig(Section):
    """One of several adapters for roles; see docs/roles.md. Settings that are not set come from ``trainer``."""

    path: str | None = None
    """Source of the initial weights: a run, a checkpoint or a folder in PEFT's format; new weights if not set."""
    source: str | None = None
    """Name of the adapter in the run at ``path``, if that has several; the same name if not set."""
    trained: bool = True
    """``false`` to freeze the weights of ``path``, for an opponent that does not learn."""
    learning_rate: LearningRate | None = None
    """Peak learning rate."""
    warmup_steps: int | None = Field(None, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] | None = None
    """Schedule of the learning rate after the warm-up."""
    min_lr_ratio: float | None = Field(None, ge=0, le=1)
    """Final learning rate of the cosine schedule, as a share of the peak."""
    max_grad_norm: float | None = Field(None, gt=0)
    """Maximum norm of the adapter's gradients; larger gradients are scaled down to it."""
    algorithm: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``algorithm`` with other values for this adapter: ``{advantage: rloo, entropy_coef: 0.01}``. Keys that
    determine how groups are played, such as ``group_size``, cannot differ."""

    @property
    def trainer_changes(self) -> dict[str, Any]:
        """Keys of ``trainer`` with other values for this adapter."""
        names = ("learning_rate", "warmup_steps", "schedule", "min_lr_ratio", "max_grad_norm")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.source is not None and self.path is None:
            raise ValueError("source of an adapter is ignored without its path: remove it, or set path")
        if not self.trained and self.path is None:
            raise ValueError(
                "an adapter that is not trained and has no path is the base model: set its path, or use the base "
                "model for the role (agent.roles.ROLE.adapter: base)"
            )
        if not self.trained and (self.trainer_changes or self.algorithm):
            ignored = [*self.trainer_changes, *(["algorithm"] if self.algorithm else [])]
            raise ValueError(f"{', '.join(ignored)} of an adapter is ignored with trained: false: remove it")
        return self


class SFTConfig(Section):
    """Warm start on demonstrations (`agentrl sft`); all other settings come from ``trainer``."""

    data: Annotated[str, user_path("sft.data")] | None = None
    """File of conversations to train on instead: JSON Lines of ``{"messages": […], "tools": […]}``."""
    episodes: int = Field(512, ge=1)
    """Number of demonstrations to record."""
    epochs: int = Field(1, ge=1)
    """Passes over the demonstrations."""
    tokens_per_update: int = Field(16_384, ge=1)
    """Tokens per optimizer step, observations included."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Schedule of the learning rate after the warm-up; cosine ends at a tenth of the peak."""
    mistakes: float = Field(0.0, ge=0, lt=1)
    """Share of the expert's actions before which it makes a mistake that changes nothing. Mistakes are not trained on,
    but the recovery from them is, which a perfect expert never shows."""
    observation_weight: float = Field(0.0, ge=0, le=1)
    """Initial weight in the loss of tokens that the agent did not write (its answers have weight 1); it decreases
    linearly to 0 over the warm start. A model with random weights then learns the language before the actions."""
    stop_at: float | None = Field(None, gt=0, lt=1)
    """Success rate on training tasks at which the warm start ends early. Use it to start RL from a given level: equal
    losses can mean very different success rates."""
    check_every: int = Field(50, ge=1)
    """Optimizer steps between measurements for ``stop_at``; none during the warm-up of the learning rate."""
    check_tasks: int = Field(128, ge=1)
    """Tasks per measurement for ``stop_at``."""
    save_minutes: float = Field(10, gt=0)
    """Minutes between checkpoints. A stop (Ctrl-C) saves one, too; the last one, at the end, holds only the model."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        for name in ("episodes", "mistakes"):
            if self.data is not None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"sft.{name} is ignored with sft.data: remove one of them")
        for name in ("check_every", "check_tasks"):
            if self.stop_at is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"sft.{name} is ignored without sft.stop_at: set that, or remove it")
        return self
