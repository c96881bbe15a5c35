"""The reference: a frozen model for KL terms, which may be refreshed from the policy at regular intervals."""

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
    """Log-probabilities of a reference model, for KL terms in the loss or in the rewards.

    Without a given model, the reference is the policy without its adapters, if only these train, and otherwise a frozen
    copy of the initial policy. A refreshed reference is part of the trainer's state, because no other file of the run
    holds it.
    """

    name = "reference"

    def __init__(
        self, runner: ModelRunner, shaping: RewardShaping, policy: PreTrainedModel, *, refresh_every: int
    ) -> None:
        self.runner, self._shaping, self._policy, self._every = runner, shaping, policy, refresh_every
        self._metrics: dict[str, float] = {}

    @classmethod
    def check(cls, algorithm: AlgorithmConfig, config: TrainerConfig, *, has_adapters: bool) -> None:
        """Check that a reference with ``refresh_every`` is used, and can be refreshed."""
        every = _refresh_every(algorithm)
        if every and not reads_reference(algorithm):
            raise ConfigError(
                "algorithm.reference.refresh_every is ignored: the algorithm does not use a reference",
                got=f"algorithm.loss {algorithm.loss}, no algorithm.kl_coef and no shaping kl",
                expected="algorithm.loss=sppo, or a KL to the reference",
            )
        if every and has_adapters:
            raise ConfigError(
                "the reference of adapters is the model without them, which never changes",
                got=f"model.lora with algorithm.reference.refresh_every {every}",
                expected="algorithm.reference.refresh_every=0, or no model.lora",
            )

    @classmethod
    def build(cls, setup: SignalSetup) -> ReferenceModel | None:
        """Build the signal, if the algorithm uses a reference."""
        algorithm, policy = setup.algorithm, setup.policy
        if not reads_reference(algorithm):
            return None
        cls.check(algorithm, setup.config, has_adapters=has_adapters(policy.model))
        runner = _runner(policy, setup.models.get(cls.name), setup.config)
        return cls(runner, setup.shaping, policy.model, refresh_every=_refresh_every(algorithm))

    def annotate(self, batch: StepBatch) -> StepBatch:
        """Add the reference's log-probabilities, and the KL to it in the rewards, if configured."""
        if self._every:
            self._refresh(batch.step_version)
        logp = self.runner.logprobs(batch.sequences, temperature=batch.temperature).logp
        episodes, kl = batch.episodes, self._shaping.kl
        if kl is not None:
            reference = logp.cpu()
            episodes = episodes.with_token_reward(kl.penalty(batch.behaviour_logp, reference))
            kl.adapt(float(kl.divergence(batch.behaviour_logp, reference).mean()), episodes.returns.numel())
        return dataclasses.replace(batch, episodes=episodes, reference_logp=logp)

    def _refresh(self, steps: int) -> None:
        """Copy the policy to the reference if a round begins after `steps` steps."""
        if steps and steps % self._every == 0:
            with torch.no_grad():
                for own, new in zip(self.runner.model.parameters(), self._policy.parameters(), strict=True):
                    own.copy_(new)
        self._metrics = {"train/reference_round": float(steps // self._every + 1)}

    def metrics(self) -> dict[str, float]:
        """Return the round of a refreshed reference."""
        return self._metrics

    def state(self) -> ReferenceModel | None:
        """Return the state with the weights of a refreshed reference; ``None`` for a fixed one."""
        return self if self._every else None

    def named_state(self) -> dict[str, torch.Tensor]:
        """Return the weights of the reference by name."""
        return {name: parameter.detach() for name, parameter in self.runner.model.named_parameters()}

    def allocate_state(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Allocate tensors for a saved state with these names.

        Raises:
            UsageError: the names are not those of the reference's weights.
        """
        own = self.named_state()
        if set(names) != set(own):
            raise UsageError(
                "the checkpoint does not contain a refreshed reference",
                got=f"{len(names)} tensors",
                expected=f"{len(own)} tensors",
                hint="set algorithm.reference.refresh_every to the run's value",
            )
        return {name: torch.empty_like(own[name]) for name in names}

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of `allocate_state` after they have been filled."""
        with torch.no_grad():
            for name, parameter in self.runner.model.named_parameters():
                parameter.copy_(state[name])

    def replay_routes(self, policy: ModelRunner) -> None:
        """Replay the engine's routed experts, as the policy does."""
        if self.runner.model is policy.model:
            self.runner.passes = policy.passes
        else:
            self.runner.replay_routes()


def reads_reference(algorithm: AlgorithmConfig) -> bool:
    """Return True if an algorithm uses a reference."""
    return algorithm.keeps_reference or Input.REFERENCE in needed_inputs(lookup(Kind.LOSS, algorithm.loss))


def _refresh_every(algorithm: AlgorithmConfig) -> int:
    return 0 if algorithm.reference is None else algorithm.reference.refresh_every


def _runner(policy: ModelRunner, reference: PreTrainedModel | None, config: TrainerConfig) -> ModelRunner:
    if reference is not None:
        return policy.for_model(reference, config, base_only=reference is policy.model)
    if base_is_reference(policy.model):
        return ModelRunner(policy.model, policy.passes, base_only=True)
    return ModelRunner(copy.deepcopy(policy.model).requires_grad_(False).eval(), policy.passes)
