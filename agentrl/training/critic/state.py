"""The state of a policy's optimizer and of what is trained beside it as one: a checkpoint holds all or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from agentrl.errors import UsageError
from agentrl.training.optimizer import PolicyOptimizer
from agentrl.training.ranks.sharding import sharded_like

T = TypeVar("T")

CRITIC, PROCESS_REWARD, REFERENCE = "critic", "process_reward", "reference"
"""Name parts of a state."""
PARTS = {
    CRITIC: "trainer.critic",
    PROCESS_REWARD: "trainer.process_reward",
    REFERENCE: "algorithm.reference.refresh_every",
}
"""The settings that ask for them."""


class TrainedState(Protocol):
    """What a checkpoint of a trainer asks of what was trained; `PolicyOptimizer` says more on each."""

    def state_dict(self) -> dict[str, Any]:
        """Everything, as one process writes it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""

    def named_state(self) -> dict[str, torch.Tensor]:
        """Everything as tensors by name, as ranks write it."""

    def room_for(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors into which a state of these names can be read."""

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `room_for` made, filled."""


class Companion(Protocol):
    """What is trained beside a policy; its state holds its weights, too, because no model folder does."""

    def named_state(self) -> dict[str, torch.Tensor]:
        """Everything as tensors by name."""

    def room_for(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors into which a state of these names can be read."""

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `room_for` made, filled."""


class PolicyAndCompanions:
    """All states.

    Args:
        policy: The policy's optimizer.
        companions: Beside it, by the part's name; ``None`` where there is none.
    """

    def __init__(self, policy: PolicyOptimizer, companions: Mapping[str, Companion | None]) -> None:
        self._policy = policy
        self._companions = {name: part for name, part in companions.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """As the policy's, and the companions' tensors by name."""
        return {**self._policy.state_dict(), **{name: part.named_state() for name, part in self._companions.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the tensors are copied, and sharded as the models are.

        Raises:
            UsageError: the state is of another optimizer or companion, or there is one on one side only.
        """
        saved: dict[str, dict[str, torch.Tensor]] = {name: state.get(name, {}) for name in PARTS}
        rooms = {name: self._room(name, list(own)) for name, own in saved.items()}
        self._policy.load_state_dict({name: part for name, part in state.items() if name not in PARTS})
        with torch.no_grad():
            for name, room in rooms.items():
                for key, tensor in room.items():
                    tensor.copy_(sharded_like(saved[name][key], tensor))
        self._load(rooms)

    def named_state(self) -> dict[str, torch.Tensor]:
        """All tensors by name; a companion's behind its own, as in ``critic/``."""
        return {
            **self._policy.named_state(),
            **{
                f"{name}/{key}": tensor
                for name, part in self._companions.items()
                for key, tensor in part.named_state().items()
            },
        }

    def room_for(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors into which a state of these names can be read.

        Raises:
            UsageError: as `load_state_dict`.
        """
        policy, parts = _divided(dict.fromkeys(names))
        rooms = {name: self._room(name, list(own)) for name, own in parts.items()}
        return {
            **self._policy.room_for(policy),
            **{f"{name}/{key}": tensor for name, room in rooms.items() for key, tensor in room.items()},
        }

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `room_for` made, filled."""
        policy, parts = _divided(state)
        self._policy.load_named_state(policy)
        self._load(parts)

    def _room(self, name: str, keys: list[str]) -> dict[str, torch.Tensor]:
        if name in self._companions:
            return self._companions[name].room_for(keys)
        if keys:
            raise UsageError(
                f"the checkpoint holds a {name.replace('_', ' ')}",
                got=f"no {PARTS[name]}",
                hint=f"set {PARTS[name]} as the run had it",
            )
        return {}

    def _load(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, part in self._companions.items():
            part.load_named_state(states[name])


def _divided(named: Mapping[str, T]) -> tuple[dict[str, T], dict[str, dict[str, T]]]:
    """What is the policy's, and what each companion's, whose names then have no prefix."""
    parts: dict[str, dict[str, T]] = {name: {} for name in PARTS}
    policy: dict[str, T] = {}
    for name, value in named.items():
        part, _, rest = name.partition("/")
        if part in parts:
            parts[part][rest] = value
        else:
            policy[name] = value
    return policy, parts
