"""The state of a policy's optimizer and a critic as one, so that a checkpoint holds both or neither."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from agentrl.errors import UsageError
from agentrl.training.critic.critic import Critic
from agentrl.training.optimizer import PolicyOptimizer
from agentrl.training.ranks.sharding import sharded_like

T = TypeVar("T")

CRITIC = "critic"
"""Names the critic's part of a state."""


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


class PolicyAndCritic:
    """Both states; the critic's holds its weights, too, because no model folder does.

    Args:
        policy: The policy's optimizer.
        critic: Beside it, if there is one.
    """

    def __init__(self, policy: PolicyOptimizer, critic: Critic | None) -> None:
        self._policy, self._critic = policy, critic

    def state_dict(self) -> dict[str, Any]:
        """As the policy's, and the critic's tensors by name."""
        own = {} if self._critic is None else {CRITIC: self._critic.named_state()}
        return {**self._policy.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the tensors are copied, and sharded as the models are.

        Raises:
            UsageError: the state is of another optimizer or critic, or one of them has a critic and the other has none.
        """
        saved: dict[str, torch.Tensor] = state.get(CRITIC, {})
        room = self._critic_room(list(saved))
        self._policy.load_state_dict({name: part for name, part in state.items() if name != CRITIC})
        with torch.no_grad():
            for name, tensor in room.items():
                tensor.copy_(sharded_like(saved[name], tensor))
        self._load_critic(room)

    def named_state(self) -> dict[str, torch.Tensor]:
        """All tensors by name; the critic's behind ``critic/``."""
        own = {} if self._critic is None else self._critic.named_state()
        return {**self._policy.named_state(), **{f"{CRITIC}/{name}": tensor for name, tensor in own.items()}}

    def room_for(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors into which a state of these names can be read.

        Raises:
            UsageError: as `load_state_dict`.
        """
        policy, critic = _divided(dict.fromkeys(names))
        room = self._critic_room(list(critic))
        return {**self._policy.room_for(policy), **{f"{CRITIC}/{name}": tensor for name, tensor in room.items()}}

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `room_for` made, filled."""
        policy, critic = _divided(state)
        self._policy.load_named_state(policy)
        self._load_critic(critic)

    def _critic_room(self, names: list[str]) -> dict[str, torch.Tensor]:
        if self._critic is not None:
            return self._critic.room_for(names)
        if names:
            raise UsageError(
                "the checkpoint holds a critic", got="no trainer.critic", hint="set trainer.critic as the run had it"
            )
        return {}

    def _load_critic(self, state: Mapping[str, torch.Tensor]) -> None:
        if self._critic is not None:
            self._critic.load_named_state(state)


def _divided(named: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """What is the policy's, and what the critic's, whose names then have no prefix."""
    prefix = f"{CRITIC}/"
    policy = {name: part for name, part in named.items() if not name.startswith(prefix)}
    return policy, {name.removeprefix(prefix): part for name, part in named.items() if name not in policy}
