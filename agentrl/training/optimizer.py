"""Optimizer of a model: gradient clipping, learning rate schedule, and skipped updates for non-finite gradients.

AdamW updates all parameters; alternatively, Muon updates the matrices of blocks and AdamW the rest. Gradient norms are
measured by group of parameters.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.config import TrainerConfig
from agentrl.config.schedule import interpolate
from agentrl.config.trainer import AdamConfig, SFTConfig
from agentrl.errors import TrainingError, UsageError
from agentrl.training.distributed.fsdp import is_sharded, mesh_of, sharded_like, total_norm, whole
from agentrl.training.distributed.muon import ShardedMuon

Schedule = TrainerConfig | SFTConfig | PreferencesConfig
"""Config section with ``learning_rate``, ``warmup_steps`` and ``schedule``."""
OTHER = "other"
MASTERS, UPDATES, STEP = "masters", "updates", "step"
"""Names in a saved state: float32 copies, number of updates, and torch's own count of updates of each parameter."""
LOSS = "the loss"
"""Name of the loss among the parameters that are not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Settings of `PolicyOptimizer`; `agentrl.config.config.TrainerConfig` documents each."""

    learning_rate: float
    total_updates: int
    warmup_updates: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: float = 0.1
    optimizer: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    """Weight decay of matrices; vectors (norms, biases) have none."""
    max_grad_norm: float = 1.0

    @classmethod
    def of(
        cls, trainer: TrainerConfig, schedule: Schedule, *, total_updates: int, min_lr_ratio: float = 0.1
    ) -> OptimizerSettings:
        """Take the learning rate from `schedule` and the other settings from `trainer`."""
        adam = trainer.adam or AdamConfig()
        return cls(
            learning_rate=schedule.learning_rate,
            total_updates=total_updates,
            warmup_updates=schedule.warmup_steps,
            schedule=schedule.schedule,
            min_lr_ratio=min_lr_ratio,
            optimizer=trainer.optimizer,
            betas=adam.betas,
            weight_decay=adam.weight_decay,
            max_grad_norm=trainer.max_grad_norm,
        )

    def learning_rate_at(self, update: int) -> float:
        """Compute the learning rate of optimizer step `update`, from 0: linear warm-up, then constant or cosine."""
        if update < self.warmup_updates:
            return self.learning_rate * (update + 1) / self.warmup_updates
        if self.schedule == "constant":
            return self.learning_rate
        span = max(self.total_updates - self.warmup_updates, 1)
        progress = min((update - self.warmup_updates) / span, 1.0)
        return self.learning_rate * interpolate("cosine", 1.0, self.min_lr_ratio, progress)


def _make_optimizers(
    model: nn.Module, masters: Mapping[str, torch.Tensor], settings: OptimizerSettings
) -> dict[str, torch.optim.Optimizer]:
    """Make the optimizers of `masters`, by name: Muon for the matrices in the model's blocks, AdamW for the rest."""
    taken = _block_matrices(model) if settings.optimizer == "muon" else frozenset[str]()
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if taken:
        optimizers["muon"] = _muon([master for name, master in masters.items() if name in taken], settings)
    if left := [master for name, master in masters.items() if name not in taken]:
        optimizers["adamw"] = torch.optim.AdamW(
            _groups(left, settings.weight_decay), lr=settings.learning_rate, betas=settings.betas, fused=True
        )
    return optimizers


def _muon(matrices: Sequence[torch.Tensor], settings: OptimizerSettings) -> torch.optim.Optimizer:
    learning_rate, weight_decay = settings.learning_rate, settings.weight_decay
    if is_sharded(matrices[0]):
        return ShardedMuon(matrices, lr=learning_rate, weight_decay=weight_decay)
    return torch.optim.Muon(matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")


def _block_matrices(model: nn.Module) -> frozenset[str]:
    names = frozenset(
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for name, p in module.named_parameters()
        if p.requires_grad and p.ndim == 2
    )
    if not names:
        raise TrainingError(
            "the model has no matrices for Muon", expected="blocks in a ModuleList", hint="set trainer.optimizer=adamw"
        )
    return names


def _groups(tensors: Sequence[torch.Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Group matrices and vectors; each device mesh has its own groups, as a fused update needs one mesh."""
    kinds: dict[tuple[bool, Any], list[torch.Tensor]] = {}
    for tensor in sorted(tensors, key=lambda tensor: tensor.ndim <= 1):
        kinds.setdefault((tensor.ndim > 1, mesh_of(tensor)), []).append(tensor)
    return [
        {"params": params, "weight_decay": weight_decay if is_matrix else 0.0}
        for (is_matrix, _), params in kinds.items()
    ]


def group_of(name: str) -> str:
    """Return the group of a parameter by its name.

    >>> group_of("model.layers.0.self_attn.q_proj.weight"), group_of("model.layers.0.self_attn.q_norm.weight")
    ('attention', 'norms')
    >>> group_of("model.layers.3.mlp.experts.2.up_proj.weight"), group_of("model.embed_tokens.weight")
    ('mlp', 'embeddings')
    """
    words = name.lower().split(".")
    module = words[-2] if len(words) > 1 else words[-1]
    if any(word.startswith("lora") for word in words):
        return "adapters"
    if "visual" in words or "vision_tower" in words:
        return "vision"
    if "norm" in module or module.startswith("ln_"):
        return "norms"
    if any("attn" in word or "attention" in word for word in words):
        return "attention"
    if any(word in ("mlp", "ffn", "feed_forward", "experts", "block_sparse_moe") for word in words):
        return "mlp"
    if any(word.startswith("embed_") or word in ("wte", "wpe", "embeddings") for word in words):
        return "embeddings"
    return "head" if module in ("lm_head", "embed_out", "score", "value_head") else OTHER


def group_norms(gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Compute the 2-norm of the gradients of each group of parameters; a collective, if parameters are sharded."""
    members: dict[str, list[torch.Tensor]] = {}
    for name, gradient in gradients.items():
        members.setdefault(group_of(name), []).append(gradient)
    return {group: total_norm(own) for group, own in members.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Result of one optimizer step."""

    grad_norm: float
    """Norm of all gradients before clipping."""
    learning_rate: float
    non_finite: tuple[str, ...]
    """Parameters with a NaN or infinite gradient, or all if only the norm is not finite; if any, the update was
    skipped.
    """
    group_norms: dict[str, float] = field(default_factory=dict)
    """Gradient norms before clipping, by group of parameters (see `group_of`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningProgress:
    """State of a training on fixed data (demonstrations or pairs) after an optimizer step."""

    update: int
    """Number of the optimizer step, from 1."""
    updates: int
    loss: float
    """Mean loss over the step's tokens or pairs, before the step."""
    grad_norm: float
    learning_rate: float
    seconds: float
    non_finite: tuple[str, ...] = ()
    """Parameters whose gradient was not finite; if any, the step changed nothing."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further numbers by the last part of their metric names: ``{"accuracy": 0.75, "margin": 1.2}``."""

    @classmethod
    def after(
        cls, update: Update, *, number: int, updates: int, loss: float, started: float, **extra: float
    ) -> LearningProgress:
        """Make the record of an optimizer step; `started` is the training's start by `time.perf_counter`."""
        return cls(
            update=number,
            updates=updates,
            loss=loss,
            grad_norm=update.grad_norm,
            learning_rate=update.learning_rate,
            seconds=time.perf_counter() - started,
            non_finite=update.non_finite,
            extra=extra,
        )


class PolicyOptimizer:
    """Optimizer that updates a model's trainable parameters in place; bfloat16 and float16 ones via a float32 copy.

    The gradients of these are added up in float32, too: a sum over micro-batches in bfloat16 would lose small ones.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.updates = 0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise TrainingError("the model has no parameter to train", expected="parameters that require a gradient")
        self._masters = {name: _master(p) for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter and not is_sharded(parameter) and hasattr(parameter, "grad_dtype"):
                parameter.grad_dtype = torch.float32  # torch before 2.10 adds up in the parameter's type
        self._optimizers = _make_optimizers(model, self._masters, settings)

    def set_adam(
        self,
        *,
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        """Change the settings of AdamW at a constant learning rate; all parameters get the same weight decay."""
        self.settings = replace(
            self.settings,
            learning_rate=learning_rate,
            betas=betas,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
        )
        for group in self._optimizers["adamw"].param_groups:
            group.update(betas=betas, eps=eps, weight_decay=weight_decay)

    def update(self) -> Update:
        """Take an optimizer step and clear the gradients; skip the step if a gradient is not finite."""
        return self._update(usable=True)

    def discard(self) -> Update:
        """Clear the gradients of a non-finite loss, and count a skipped update."""
        return self._update(usable=False)

    def measure(self, loss: float) -> Update:
        """Return what `update` (or `discard`, for a non-finite loss) would return, without changing anything."""
        return self._measure(usable=math.isfinite(loss))

    def _measure(self, *, usable: bool) -> Update:
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        norms = group_norms(gradients)
        norm = math.hypot(*norms.values())
        non_finite: tuple[str, ...] = () if usable else (LOSS,)
        if not math.isfinite(norm):
            broken = [name for name, grad in gradients.items() if not bool(whole(grad.isfinite().all()))]
            non_finite += tuple(broken or gradients)  # squares of finite gradients may overflow, too
        learning_rate = self.settings.learning_rate_at(self.updates)
        return Update(grad_norm=norm, learning_rate=learning_rate, non_finite=non_finite, group_norms=norms)

    def _update(self, *, usable: bool) -> Update:
        update = self._measure(usable=usable)
        self.updates += 1
        if not update.non_finite:
            scale = min(1.0, self.settings.max_grad_norm / (update.grad_norm + 1e-6))
            self._apply(update.learning_rate, scale=scale)
        for parameter in self._parameters.values():
            parameter.grad = None
        return update

    def _apply(self, learning_rate: float, *, scale: float) -> None:
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
            if master.grad is not None and scale < 1.0:
                master.grad.mul_(scale)
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])
                    self._masters[name].grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return moments by optimizer, the float32 copies, if any, and the number of updates."""
        copies = {name: m for name, m in self._masters.items() if m is not self._parameters[name]}
        moments = {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}
        return {**moments, MASTERS: copies, UPDATES: self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`; tensors are copied, and sharded like the model."""
        self._check_optimizers(name for name in state if name not in (MASTERS, UPDATES))
        for name, optimizer in self._optimizers.items():
            if any(is_sharded(master) for master in self._masters.values()):
                self._load_moments(optimizer, state[name]["state"])
            else:
                optimizer.load_state_dict(copy.deepcopy(state[name]))
        with torch.no_grad():
            for name, master in state[MASTERS].items():
                self._masters[name].copy_(sharded_like(master, self._masters[name]))
        self.updates = state[UPDATES]

    def _load_moments(self, optimizer: torch.optim.Optimizer, saved: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Shard moments that one process saved, numbered with its matrices first and then its vectors."""
        own = {id(master) for group in optimizer.param_groups for master in group["params"]}
        masters = [master for master in self._masters.values() if id(master) in own]
        for number, master in enumerate(sorted(masters, key=lambda master: master.ndim <= 1)):
            if number in saved:
                optimizer.state[master] = {
                    key: _sharded_moment(moment.clone(), master) for key, moment in saved[number].items()
                }

    def named_state(self) -> dict[str, torch.Tensor]:
        """Return the state as tensors by name, as several ranks write it: ``adamw/NAME/exp_avg``, ``masters/NAME``.

        Parameters of a bfloat16 model are float32, whether they are copies or shards.
        """
        names = {id(master): name for name, master in self._masters.items()}
        state = {
            f"{kind}/{names[id(master)]}/{key}": moment
            for kind, optimizer in self._optimizers.items()
            for master, moments in optimizer.state.items()
            for key, moment in moments.items()
        }
        masters = {f"{MASTERS}/{name}": master.detach() for name, master in self._masters.items()}
        return {**state, **masters, UPDATES: torch.tensor(self.updates)}

    def allocate_state(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Allocate tensors for a saved state with these names.

        Raises:
            UsageError: the names are those of another model or optimizer.
        """
        state: dict[str, torch.Tensor] = {}
        for name in names:
            kind, _, rest = name.partition("/")
            parameter, _, key = rest.rpartition("/") if kind in self._optimizers else (rest, "", "")
            like = self._masters.get(parameter)
            is_scalar = name == UPDATES or key == STEP
            if like is None and not is_scalar:
                raise UsageError("the checkpoint is from another model or optimizer", got=f"a state of {name}")
            state[name] = torch.tensor(0.0 if key else 0) if like is None or is_scalar else torch.zeros_like(like)
        if kinds := {name.partition("/")[0] for name in state} - {MASTERS, UPDATES}:
            self._check_optimizers(kinds)
        return state

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of `allocate_state` after they have been filled."""
        self.updates = int(state[UPDATES])
        for kind, optimizer in self._optimizers.items():
            for name, master in self._masters.items():
                prefix = f"{kind}/{name}/"
                found = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
                if found:
                    optimizer.state[master] = {key: moment.to(master.device) for key, moment in found.items()}
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state[f"{MASTERS}/{name}"])

    @torch.no_grad()
    def restore_weights(self) -> None:
        """Set the parameters to the values of their float32 copies, after a state with these was loaded."""
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def _check_optimizers(self, names: Iterable[str]) -> None:
        saved = sorted(names)
        if saved != sorted(self._optimizers):
            raise UsageError(
                "the checkpoint is from another optimizer",
                got=f"moments of {', '.join(saved)}",
                expected=f"moments of {', '.join(sorted(self._optimizers))}",
                hint="set trainer.optimizer to the run's value",
            )


def _sharded_moment(moment: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    return sharded_like(moment, master) if moment.shape == master.shape else moment


def _master(parameter: nn.Parameter) -> torch.Tensor:
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float().clone()
