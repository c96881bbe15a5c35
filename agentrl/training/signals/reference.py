"""The reference: a frozen model that KL is measured from, which may become the policy of now every so many steps."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.models.lora import base_is_reference, has_adapters
from agentrl.registry import Kind, lookup
from agentrl.training.batch import StepBatch, StepInput
from agentrl.training.forward.runner import ModelRunner
from agentrl.training.rewards import RewardShaping
from agentrl.training.signals.base import SignalSetup, TokenSignal


class ReferenceModel(TokenSignal):
    """Log-probabilities of a reference, for a loss with a KL to it, or as a part of the rewards.

    The model, when left out, is the policy without its adapters where these are all that is trained, and else a frozen
    copy of the policy as it is at the start.

    Args:
        runner: Of the model.
        shaping: May put the KL into the rewards.
        refresh: Renews the reference.
    """

    name = "reference"

    def __init__(self, runner: ModelRunner, shaping: RewardShaping, refresh: ReferenceRefresh | None) -> None:
        self.runner, self._shaping, self._refresh = runner, shaping, refresh
        self._metrics: dict[str, float] = {}

    @classmethod
    def check(cls, algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool) -> None:
        """Check that a reference that is to be renewed is there, and can be."""
        check_refresh(algorithm, has_adapters=has_adapters)

    @classmethod
    def build(cls, setup: SignalSetup) -> ReferenceModel | None:
        """Make the signal, if anything compares with a reference."""
        algorithm, policy = setup.algorithm, setup.policy
        if not reads_reference(algorithm):
            return None
        check_refresh(algorithm, has_adapters=has_adapters(policy.model))
        runner, every = _runner(policy, setup.models.get(cls.name), setup.config), _every(algorithm)
        refresh = ReferenceRefresh(policy.model, runner.model, every) if every else None
        return cls(runner, setup.shaping, refresh)

    def annotate(self, batch: StepBatch, step: StepInput) -> StepBatch:
        """Add the reference's log-probabilities, and its part of the rewards."""
        if self._refresh is not None:
            self._metrics = self._refresh.begin_step(batch.step_version)
        logp = self.runner.logprobs(batch.sequences, temperature=step.temperature, pad_id=step.pad_id).logp
        return dataclasses.replace(with_reward_kl(batch, self._shaping, logp), reference_logp=logp)

    def metrics(self) -> dict[str, float]:
        """Give the round of a reference that is renewed."""
        return self._metrics

    def state(self) -> ReferenceRefresh | None:
        """Give the weights of a reference that is renewed."""
        return self._refresh

    def replay_routes(self, policy: ModelRunner) -> None:
        """Route as the engine did, and as the policy does already."""
        if self.runner.model is policy.model:
            self.runner.passes = policy.passes
        else:
            self.runner.replay_routes()


def reads_reference(algorithm: AlgorithmConfig) -> bool:
    """Return True if anything of an algorithm compares with a reference."""
    return algorithm.keeps_reference or Input.REFERENCE in needed_inputs(lookup(Kind.LOSS, algorithm.loss))


def _runner(policy: ModelRunner, reference: PreTrainedModel | None, config: TrainerConfig) -> ModelRunner:
    if reference is not None:
        return policy.beside(reference, config, base_only=reference is policy.model)
    if base_is_reference(policy.model):
        return ModelRunner(policy.model, policy.passes, base_only=True)
    return ModelRunner(copy.deepcopy(policy.model).requires_grad_(False).eval(), policy.passes)


def with_reward_kl(batch: StepBatch, shaping: RewardShaping, reference_logp: torch.Tensor) -> StepBatch:
    """Add KL to a reference, float32 [tokens], to the rewards, if the algorithm wants that, and adapt its weight."""
    kl = shaping.kl
    if kl is None:
        return batch
    reference = reference_logp.cpu()
    episodes = batch.episodes.with_token_reward(kl.penalty(batch.behaviour_logp, reference))
    kl.adapt(float(kl.divergence(batch.behaviour_logp, reference).mean()), episodes.returns.numel())
    return dataclasses.replace(batch, episodes=episodes)


class ReferenceRefresh:
    """A reference that is renewed; a part of the trainer's state, because no file of the run holds it otherwise.

    Args:
        policy: What the reference becomes.
        reference: Another model of the same kind, in the same shards.
        every: Steps of a round.
    """

    def __init__(self, policy: PreTrainedModel, reference: PreTrainedModel, every: int) -> None:
        self._policy, self._reference, self._every = policy, reference, every

    def begin_step(self, steps: int) -> dict[str, float]:
        """Renew the reference where a round begins; gives the number of the round, from 1, under the metric's name.

        Args:
            steps: That the policy has taken so far.
        """
        if steps and steps % self._every == 0:
            with torch.no_grad():
                for own, new in zip(self._reference.parameters(), self._policy.parameters(), strict=True):
                    own.copy_(new)
        return {"train/reference_round": float(steps // self._every + 1)}

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


def check_refresh(algorithm: AlgorithmConfig, *, has_adapters: bool) -> None:
    """Check that a reference that is to be renewed is there, and can be.

    Raises:
        ConfigError: it is not.
    """
    if not _every(algorithm):
        return
    if not reads_reference(algorithm):
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
