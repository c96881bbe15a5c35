"""Rounds of training: the reference becomes the policy of now every so many steps, as self-play asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.training.models.lora import has_adapters
from agentrl.training.scoring.scorer import Scorer


class Rounds:
    """A reference that is renewed; a part of the trainer's state, because no file of the run holds it otherwise.

    Args:
        policy: What the reference becomes.
        reference: Another model of the same kind, in the same shards.
        every: Steps of a round.
    """

    def __init__(self, policy: PreTrainedModel, reference: PreTrainedModel, every: int) -> None:
        self._policy, self._reference, self._every = policy, reference, every

    def begin_step(self, steps: int) -> dict[str, float]:
        """Renew the reference where a round begins; says which round it is, from 1, under the metric's name.

        Args:
            steps: That the policy has taken so far.
        """
        if steps and steps % self._every == 0:
            with torch.no_grad():
                for own, new in zip(self._reference.parameters(), self._policy.parameters(), strict=True):
                    own.copy_(new)
        return {"train/round": float(steps // self._every + 1)}

    def named_state(self) -> dict[str, torch.Tensor]:
        """The weights of the reference by name."""
        return {name: parameter.detach() for name, parameter in self._reference.named_parameters()}

    def room_for(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors into which a state of these names can be read.

        Raises:
            UsageError: it is not that of this reference.
        """
        own = self.named_state()
        if set(names) != set(own):
            raise UsageError(
                "the checkpoint does not hold the reference of a run in rounds",
                got=f"{len(names)} tensors",
                expected=f"{len(own)}",
                hint="set algorithm.reference.refresh_every as the run had it",
            )
        return {name: torch.empty_like(own[name]) for name in names}

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `room_for` made, filled."""
        with torch.no_grad():
            for name, parameter in self._reference.named_parameters():
                parameter.copy_(state[name])


def make_rounds(algorithm: AlgorithmConfig, policy: PreTrainedModel, reference: Scorer | None) -> Rounds | None:
    """What renews a trainer's reference, where its config wants that.

    Raises:
        ConfigError: there is no reference, or it is the policy without its adapters.
    """
    if not _every(algorithm):
        return None
    check_rounds(algorithm, has_reference=reference is not None, has_adapters=has_adapters(policy))
    assert reference is not None
    return Rounds(policy, reference.model, _every(algorithm))


def check_rounds(algorithm: AlgorithmConfig, *, has_reference: bool, has_adapters: bool) -> None:
    """Check that a reference that is to be renewed is there, and can be.

    Raises:
        ConfigError: it is not.
    """
    if not _every(algorithm):
        return
    if not has_reference:
        raise ConfigError(
            "algorithm.reference.refresh_every is ignored: nothing is compared with a reference",
            got=f"algorithm.loss {algorithm.loss}, no algorithm.kl_coef and no shaping kl",
            expected="algorithm.loss=sppo, or a KL to the reference",
        )
    if has_adapters:
        raise ConfigError(
            "the reference of adapters is the model without them, which stays as it is",
            got=f"model.lora with algorithm.reference.refresh_every {_every(algorithm)}",
            expected="algorithm.reference.refresh_every=0, or no model.lora",
        )


def _every(algorithm: AlgorithmConfig) -> int:
    return 0 if algorithm.reference is None else algorithm.reference.refresh_every
