"""Updates of a model: gradients are clipped, the learning rate follows a schedule, and nothing is learnt from gradients
that are not finite.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from agentrl.errors import TrainingError, UsageError
from agentrl.training.numerics.groups import group_norms
from agentrl.training.optimizer_settings import OptimizerSettings
from agentrl.training.parameter_groups import make_optimizers
from agentrl.training.ranks.sharding import is_sharded, sharded_like, whole

MASTERS, UPDATES, STEP = "masters", "updates", "step"
"""Names in a saved state: float32 copies, number of updates, and, of each parameter, torch's own count of them."""
LOSS = "the loss"
"""Stands among parameters that are not finite for the loss itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer step did."""

    grad_norm: float
    """Norm of all gradients before clipping."""
    learning_rate: float
    non_finite: tuple[str, ...]
    """Parameters with a NaN or infinite gradient, or all when only the norm is; if any, nothing was changed."""
    group_norms: dict[str, float] = field(default_factory=dict)
    """Norms before clipping by kind of parameter: `agentrl.training.numerics.groups`."""


class PolicyOptimizer:
    """Updates a model in place. Parameters in a short format are updated through a float32 copy.

    Args:
        model: Its parameters that require a gradient are trained.
        settings: Numbers.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.updates = 0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise TrainingError("the model has no parameter to train", expected="parameters that require a gradient")
        self._masters = {name: _master(p) for name, p in self._parameters.items()}
        self._optimizers = make_optimizers(model, self._masters, settings)

    def update(self) -> Update:
        """Apply the accumulated gradients and clear them; non-finite ones change nothing and are named."""
        return self._update(usable=True)

    def discard(self) -> Update:
        """Clear the gradients of a loss that is not finite, and count an update that changed nothing."""
        return self._update(usable=False)

    def measure(self, loss: float) -> Update:
        """What `update`, or `discard` for a loss that is not finite, would say; everything stays as it is."""
        return self._measured(usable=math.isfinite(loss))

    def _measured(self, *, usable: bool) -> Update:
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        norms = group_norms(gradients)
        norm = math.hypot(*norms.values())
        non_finite: tuple[str, ...] = () if usable else (LOSS,)
        if not math.isfinite(norm):
            broken = [name for name, grad in gradients.items() if not bool(whole(grad.isfinite().all()))]
            non_finite += tuple(broken or gradients)  # finite gradients whose squares overflow are of no use either
        learning_rate = self.settings.learning_rate_at(self.updates)
        return Update(grad_norm=norm, learning_rate=learning_rate, non_finite=non_finite, group_norms=norms)

    def _update(self, *, usable: bool) -> Update:
        update = self._measured(usable=usable)
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
        """Moments by optimizer, the float32 copies where there are any, and the number of updates."""
        copies = {name: m for name, m in self._masters.items() if m is not self._parameters[name]}
        moments = {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}
        return {**moments, MASTERS: copies, UPDATES: self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the tensors are copied, and sharded as the model is.

        Raises:
            UsageError: the state is of another optimizer.
        """
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
        """Cut the moments that one process has numbered: its matrices first, then its vectors."""
        own = {id(master) for group in optimizer.param_groups for master in group["params"]}
        masters = [master for master in self._masters.values() if id(master) in own]
        for number, master in enumerate(sorted(masters, key=lambda master: master.ndim <= 1)):
            if number in saved:
                optimizer.state[master] = {
                    key: _beside(moment.clone(), master) for key, moment in saved[number].items()
                }

    def named_state(self) -> dict[str, torch.Tensor]:
        """The same as tensors by name, which is what ranks write: ``adamw/NAME/exp_avg``, ``masters/NAME``.

        A model in bfloat16 is written as its float32 copies, whether it computes from copies or from shards.
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

    def room_for(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors into which a state of these names can be read.

        Raises:
            UsageError: it is the state of another optimizer.
        """
        state: dict[str, torch.Tensor] = {}
        for name in names:
            kind, _, rest = name.partition("/")
            parameter, _, key = rest.rpartition("/") if kind in self._optimizers else (rest, "", "")
            like = self._masters.get(parameter)
            is_scalar = name == UPDATES or key == STEP
            if like is None and not is_scalar:
                raise UsageError("the checkpoint is of another model or optimizer", got=f"a state of {name}")
            state[name] = torch.tensor(0.0 if key else 0) if like is None or is_scalar else torch.zeros_like(like)
        if kinds := {name.partition("/")[0] for name in state} - {MASTERS, UPDATES}:
            self._check_optimizers(kinds)
        return state

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `room_for` made, filled."""
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
        """Give the parameters the values of their float32 copies, where a state that holds these was loaded."""
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def _check_optimizers(self, names: Iterable[str]) -> None:
        saved = sorted(names)
        if saved != sorted(self._optimizers):
            raise UsageError(
                "the checkpoint is of another optimizer",
                got=f"moments of {', '.join(saved)}",
                expected=f"of {', '.join(sorted(self._optimizers))}",
                hint="set trainer.optimizer as the run had it",
            )


def _beside(moment: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    return sharded_like(moment, master) if moment.shape == master.shape else moment


def _master(parameter: nn.Parameter) -> torch.Tensor:
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float().clone()
