"""Settings of warm starts and of the trainer's parts: optimizer, critic, process rewards, FSDP, MoE, alarms, LoRA."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from agentrl.config.section import Decay, LearningRate, Section, without_old_key


class AdamConfig(Section):
    """Decay rates of AdamW, and the weight decay of Muon."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the moments."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight decay, on matrices."""


class CriticConfig(Section):
    """Critic of PPO; other settings (optimizer, warm-up, schedule, epochs, mini-batches) are taken from ``trainer``."""

    kind: Literal["own", "shared"] = "own"
    """``own``: a separate model with a scalar output. ``shared``: such an output on the policy's hidden
    states, which takes next to no memory, and lets the value loss change the policy's weights, too."""
    path: str | None = None
    """The model that an ``own`` critic starts from, of the policy's vocabulary; the policy's weights when left out."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate; of the output only, where the rest is the policy's."""
    pretrain_steps: int = Field(0, ge=0)
    """Training steps, the first ones, in which only the critic learns; a ``shared`` one's output only."""
    clip: float | None = Field(0.5, gt=0)
    """How far a step moves a value before the value loss no longer rewards it; ``null`` bounds nothing."""
    coef: float = Field(0.5, gt=0, allow_inf_nan=False)
    """Weight of the value loss relative to the policy's loss; only ``shared``."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.kind == "shared" and self.path is not None:
            raise ValueError("trainer.critic.path is ignored with kind shared: remove it, or use kind own")
        if self.kind == "own" and self.coef != type(self).model_fields["coef"].default:
            raise ValueError("trainer.critic.coef is ignored with kind own: remove it, or use kind shared")
        return self


class ProcessRewardConfig(Section):
    """For ``algorithm.advantage: prime``. What is not here (optimizer, warm-up, schedule, epochs, mini-batches) is
    taken from ``trainer``.
    """

    path: str | None = None
    """The model that it starts from, and whose frozen copy it is compared with; of the policy's tokens. The policy's
    weights at the start of the run when left out."""
    learning_rate: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    beta: float = Field(0.05, gt=0)
    """A token's reward is beta log(pi_rm / pi_ref)."""
    success_above: float = 0.5
    """Episodes with a greater reward, before shaping, are those that succeeded."""
    update: Literal["before", "after"] = "before"
    """``before``: it learns from the episodes of a step, and then says what their tokens are worth. ``after``: the
    other way round."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FSDPOptions:
    """Memory against communication; only with several ranks."""

    replicas: Annotated[int, Field(ge=1)] = 1
    """Rows of ranks that hold the whole model each: with 2 machines of 8 GPUs, 2 keeps parameters within a machine."""
    reshard: bool = True
    """Give a layer's parameters up between forward and backward pass: less memory, one more gathering."""
    offload: bool = False
    """Keep shards, gradients and the optimizer's moments in the CPU's memory, and update there."""
    reduce: bool = False
    """Add gradients up over the ranks after every micro-batch, instead of once per update: this keeps no whole
    gradients, at the price of communication."""


class MoEConfig(Section):
    """Training of models with routed experts; see docs/experts.md."""

    aux_loss_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight in the loss of the balance among the experts; costs a further forward pass."""
    router_replay: bool = False
    """Send tokens to the experts to which the engine sent them, so that rounding does not set trainer and engine
    apart."""


class NumericsConfig(Section):
    """Limits of the alarms, and what happens to updates that are not finite."""

    mismatch: float = Field(0.01, gt=0)
    """Mean |pi_old - mu| above which trainer and engine are not the same model."""
    kl: float = Field(0.5, gt=0)
    """KL of the policy to pi_old, within a step, above which an alarm is raised."""
    kl_reference: float = Field(10.0, gt=0)
    """KL to the reference above which nothing is left of it."""
    entropy_share: float = Field(0.05, ge=0, lt=1)
    """Entropy below this share of that of the first steps has collapsed; 0 never."""
    grad_norm_ratio: float = Field(20.0, gt=1)
    """A gradient whose norm is so many times the median of the last steps is a spike."""
    max_skipped: int = Field(10, ge=1)
    """Updates left out in a row that end the run."""
    dumps: int = Field(2, ge=0)
    """Most files of a run that repeat an update that was left out; each holds the model's weights."""


class LoraConfig(Section):
    """Adapters (LoRA) on frozen base weights; needs the extra ``agentrl[lora]``."""

    rank: int = Field(16, ge=1)
    """Rank of the update of each matrix."""
    alpha: float | None = Field(None, gt=0)
    """The update is scaled by ``alpha / rank``; twice the rank when left out."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that a warm start (`agentrl sft`) drops; training by reward has none."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Ends of the names of matrices that get an adapter (``q_proj``); ``all-linear``: all but the output head."""
    modules_to_save: list[str] = Field(default_factory=list)
    """Ends of the names of modules that are trained themselves, such as ``embed_tokens``; a KL to the reference then
    needs a copy of the model."""
    quantize: Literal["nf4"] | None = None
    """Keep the frozen weights in 4 bits (QLoRA): needs a GPU and the package bitsandbytes."""

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank


class AdapterConfig(Section):
    """One of several adapters, which roles name; see docs/roles.md. What is left out is as in ``trainer``."""

    path: str | None = None
    """Where its weights come from: a run, a checkpoint or a folder in peft's format; new ones when left out."""
    source: str | None = None
    """Its name in the run at ``path``, where that has several; the same name when left out."""
    trained: bool = True
    """``false`` keeps it as it is at ``path``: an opponent that does not learn."""
    learning_rate: LearningRate | None = None
    """Peak learning rate."""
    warmup_steps: int | None = Field(None, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] | None = None
    """Learning rate after the warm-up."""
    min_lr_ratio: float | None = Field(None, ge=0, le=1)
    """Where cosine ends, as a share of the learning rate."""
    max_grad_norm: float | None = Field(None, gt=0)
    """The adapter's gradients are scaled down to this norm."""
    algorithm: dict[str, Any] = Field(default_factory=dict)
    """Keys of ``algorithm`` that are different for this adapter: ``{advantage: rloo, entropy_coef: 0.01}``. Not those
    that say how groups are played."""

    @property
    def trainer_changes(self) -> dict[str, Any]:
        """The keys of ``trainer`` that are different for this adapter."""
        names = ("learning_rate", "warmup_steps", "schedule", "min_lr_ratio", "max_grad_norm")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.source is not None and self.path is None:
            raise ValueError("source of an adapter is ignored without its path: remove it, or set path")
        if not self.trained and self.path is None:
            raise ValueError(
                "an adapter that is not trained and has no path is the base model: give it a path, or let the role "
                "name base (agent.roles.ROLE.adapter: base)"
            )
        if not self.trained and (self.trainer_changes or self.algorithm):
            ignored = [*self.trainer_changes, *(["algorithm"] if self.algorithm else [])]
            raise ValueError(f"{', '.join(ignored)} of an adapter is ignored with trained: false: remove it")
        return self


class SFTConfig(Section):
    """Warm start on demonstrations (`agentrl sft`); what is not here is taken from ``trainer``."""

    data: str | None = None
    """A file of conversations to learn instead: JSON lines, ``{"messages": […], "tools": […]}``."""
    episodes: int = Field(512, ge=1)
    """Demonstrations to record."""
    epochs: int = Field(1, ge=1)
    """Passes over them."""
    tokens_per_update: int = Field(16_384, ge=1)
    """Tokens, observations included, of an optimizer step."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Learning rate after the warm-up; cosine ends at a tenth of it."""
    mistakes: float = Field(0.0, ge=0, lt=1)
    """Share of the expert's actions before which it makes a mistake that changes nothing. Mistakes are not trained on;
    the recovery after one is, which demonstrations without mistakes never show."""
    observation_weight: float = Field(0.0, ge=0, le=1)
    """Weight in the loss of a token that the agent did not write, beside 1 for its answers; it falls linearly to 0
    over the warm start. So a model that starts from nothing learns the language first, and what to say last."""
    stop_at: float | None = Field(None, gt=0, lt=1)
    """Success on training tasks at which the warm start ends, before its demonstrations do. Equal losses can mean very
    different success, so this is how to start RL from a given level."""
    check_every: int = Field(50, ge=1)
    """Optimizer steps between two measurements for ``stop_at``; none while the learning rate warms up."""
    check_tasks: int = Field(128, ge=1)
    """Tasks of such a measurement."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_was_a_key(cls, data: Any) -> Any:
        """The config.yaml of an older run holds ``min_lr_ratio``, which no config ever set."""
        return without_old_key(data, "min_lr_ratio", 0.1)

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        for name in ("episodes", "mistakes"):
            if self.data is not None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"sft.{name} is ignored with sft.data: remove one of them")
        for name in ("check_every", "check_tasks"):
            if self.stop_at is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"sft.{name} is ignored without sft.stop_at: set that, or remove it")
        return self
