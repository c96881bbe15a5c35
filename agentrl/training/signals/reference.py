"""The reference: a frozen model that KL is measured from, which may become the current policy every so many steps."""

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
from agentrl.training.batch import StepBatch
from agentrl.training.forward.runner import ModelRunner
from agentrl.training.rewards import RewardShaping
from agentrl.training.signals.base import SignalSetup, TokenSignal


class ReferenceModel(TokenSignal):
    """Log-probabilities of a reference, for a loss with a KL to it, or as a part of the rewards.

    The model, when left out, is the policy without its adapters where these are all that is trained, and else a frozen
    copy of the policy as it is at the start. A reference that is refreshed is a part of the trainer's state, because no
    file of the run holds it otherwise.
    """

    name = "reference"

    def __init__(
        self, runner: ModelRunner, shaping: RewardShaping, policy: PreTrainedModel, *, refresh_every: int
    ) -> None:
        self.runner, self._shaping, self._policy, self._every = runner, shaping, policy, refresh_every
        self._metrics: dict[str, float] = {}

    @classmethod
    def check(cls, algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool) -> None:
        """Check that a reference that is to be refreshed is there, and can be."""
        every = _refresh_every(algorithm)
        if every and not reads_reference(algorithm):
            raise ConfigError(
                "algorithm.reference.refresh_every is ignored: nothing is compared with a reference",
                got=f"algorithm.loss {algorithm.loss}, no algorithm.kl_coef and no shaping kl",
                expected="algorithm.loss=sppo, or a KL to the reference",
            )
        if every and has_adapters:
            raise ConfigError(
                "the reference of adapters is the model without them, which stays as it is",
                got=f"model.lora with algorithm.reference.refresh_every {every}",
                expected="algorithm.reference.refresh_every=0, or no model.lora",
            )

    @classmethod
    def build(cls, setup: SignalSetup) -> ReferenceModel | None:
        """Make the signal, if anything compares with a reference."""
        algorithm, policy = setup.algorithm, setup.policy
        if not reads_reference(algorithm):
            return None
        cls.check(algorithm, setup.config, has_adapters=has_adapters(policy.model))
        runner = _runner(policy, setup.models.get(cls.name), setup.config)
        return cls(runner, setup.shaping, policy.model, refresh_every=_refresh_every(algorithm))

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add the reference's log-probabilities, and its part of the rewards."""
        if self._every:
            self._refresh(batch.step_version)
        logp = self.runner.logprobs(batch.sequences, temperature=batch.temperature, pad_id=batch.pad_id).logp
        episodes, kl = batch.episodes, self._shaping.kl
        if kl is not None:
            reference = logp.cpu()
            episodes = episodes.with_token_reward(kl.penalty(batch.behaviour_logp, reference))
            kl.adapt(float(kl.divergence(batch.behaviour_logp, reference).mean()), episodes.returns.numel())
        return dataclasses.replace(batch, episodes=episodes, reference_logp=logp)

    def _refresh(self, steps: int) -> None:
        """Copy the policy where a round begins, after so many steps of the policy."""
        if steps and steps % self._every == 0:
            with torch.no_grad():
                for own, new in zip(self.runner.model.parameters(), self._policy.parameters(), strict=True):
                    own.copy_(new)
        self._metrics = {"train/reference_round": float(steps // self._every + 1)}

    def metrics(self) -> dict[str, float]:
        """Give the round of a reference that is refreshed."""
        return self._metrics

    def state(self) -> ReferenceModel | None:
        """Give the weights of a reference that is refreshed."""
        return self if self._every else None

    def named_state(self) -> dict[str, torch.Tensor]:
        """The weights of the reference by name."""
        return {name: parameter.detach() for name, parameter in self.runner.model.named_parameters()}

    def room_for(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors into which a state of these names can be read."""
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
            for name, parameter in self.runner.model.named_parameters():
                parameter.copy_(state[name])

    def replay_routes(self, policy: ModelRunner) -> None:
        """Route as the engine did, and as the policy does already."""
        if self.runner.model is policy.model:
            self.runner.passes = policy.passes
        else:
            self.runner.replay_routes()


def reads_reference(algorithm: AlgorithmConfig) -> bool:
    """Return True if anything of an algorithm compares with a reference."""
    return algorithm.keeps_reference or Input.REFERENCE in needed_inputs(lookup(Kind.LOSS, algorithm.loss))


def _refresh_every(algorithm: AlgorithmConfig) -> int:
    return 0 if algorithm.reference is None else algorithm.reference.refresh_every


def _runner(policy: ModelRunner, reference: PreTrainedModel | None, config: TrainerConfig) -> ModelRunner:
    if reference is not None:
        return policy.for_model(reference, config, base_only=reference is policy.model)
    if base_is_reference(policy.model):
        return ModelRunner(policy.model, policy.passes, base_only=True)
    return ModelRunner(copy.deepcopy(policy.model).requires_grad_(False).eval(), policy.passes)
