"""Replay of a skipped update: losses of micro-batches, the first module with non-finite values, gradient norms."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.algorithms.types import LossInput, TokenLoss
from agentrl.config.config import Config
from agentrl.config.load import config_from
from agentrl.errors import UsageError
from agentrl.message.image import ImageReader
from agentrl.models.load import make_model
from agentrl.models.lora import add_adapters
from agentrl.models.threads import ThreadWorkers
from agentrl.observe.trajectory_record import trajectory_from_record
from agentrl.training.batch import StepBatch, step_batch
from agentrl.training.compile import checkpoint_activations
from agentrl.training.diagnostics.watch import UpdateNumbers, prepare_repeatable, recorded_numbers, repeatable
from agentrl.training.forward.layout import Layout
from agentrl.training.forward.logprobs import TeacherLogprobs, TokenScores
from agentrl.training.forward.runner import ModelRunner, RunnerSettings, SumsByName
from agentrl.training.forward.tree_attention import ATTENTION
from agentrl.training.gradients import DUMPED_STEP, GradientPass, Objective
from agentrl.training.moe import moe_hooks
from agentrl.training.optimizer import OptimizerSettings, PolicyOptimizer
from agentrl.training.rewards import RewardShaping


class ModuleWatch:
    """First modules with values that are not finite, by their names in `named_modules`."""

    def __init__(self) -> None:
        self.forward: str | None = None
        """First module whose output is not finite, and if its input is finite."""
        self.backward: str | None = None
        """First module in the backward pass whose output has a gradient that is not finite."""


@contextmanager
def watched_modules(model: nn.Module) -> Iterator[ModuleWatch]:
    """Check every module's output and the output's gradient in this block."""
    watch = ModuleWatch()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(_forward(watch, name)).remove)
        yield watch


def _forward(watch: ModuleWatch, name: str) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if watch.forward is None and not _finite(output):
            given = "finite" if _finite(inputs) else "not finite"
            own = [key for key, parameter in module.named_parameters() if not _finite(parameter)]
            about = f", not finite in its parameters {', '.join(own)}" if own else ""
            watch.forward = f"{name or 'the model'} ({type(module).__name__}): input {given}{about}"
        if isinstance(output, torch.Tensor) and output.requires_grad:
            register: Any = output.register_hook
            register(_backward(watch, f"{name} ({type(module).__name__})"))

    return hook


def _backward(watch: ModuleWatch, name: str) -> Any:
    def hook(gradient: torch.Tensor) -> None:
        if watch.backward is None and not _finite(gradient):
            watch.backward = f"output of {name}"

    return hook


def _finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(value.detach().isfinite().all())
    if isinstance(value, dict):
        return all(_finite(each) for each in value.values())
    return all(_finite(each) for each in value) if isinstance(value, list | tuple) else True


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchFinding:
    """Results of one micro-batch of the update."""

    trajectories: tuple[str, ...]
    """Ids of the trajectories with sequences in the micro-batch."""
    tokens: int
    """Number of sampled tokens, which have a loss."""
    loss: float
    not_finite: tuple[str, ...]
    """Names of values that are not finite: log-probabilities, advantages, losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedUpdate:
    """Results of a repeated update."""

    micro_batches: tuple[MicroBatchFinding, ...]
    weights_not_finite: tuple[str, ...]
    """Parameters that were not finite before the update."""
    first_forward: str | None
    first_backward: str | None
    now: UpdateNumbers
    recorded: UpdateNumbers

    @property
    def repeats(self) -> bool:
        """True if every number equals the recorded one bit for bit; NaN equals NaN."""
        return _bits(self.now) == _bits(self.recorded)


def _bits(found: UpdateNumbers) -> str:
    norms = sorted(found.group_norms.items())
    # repr distinguishes all floats, and NaN is 'nan'
    return repr((found.loss, found.grad_norm, norms, sorted(found.non_finite)))


class _RecordingObjective(Objective):
    """Objective that records which values of a micro-batch are not finite."""

    not_finite: tuple[str, ...] = ()

    def loss(self, tokens: LossInput, entropy: torch.Tensor, tally: SumsByName) -> TokenLoss:
        found = super().loss(tokens, entropy, tally)
        numbers = {
            "log-probabilities": tokens.logp,
            "advantages": tokens.advantage,
            "log-probabilities of the engine": tokens.behaviour_logp,
            "losses of tokens": found.values,
        }
        self.not_finite = tuple(name for name, value in numbers.items() if not bool(value.detach().isfinite().all()))
        return found


class _RecordingPass(GradientPass):
    """A gradient pass that records its micro-batches."""

    def __init__(self, *arguments: Any, updates: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._updates = updates
        self.found: list[tuple[list[int], float, tuple[str, ...]]] = []

    def _loss(self, weights: torch.Tensor, indices: list[int], tally: SumsByName) -> torch.Tensor:
        value = super()._loss(weights, indices, tally)
        not_finite = self.objective.not_finite if isinstance(self.objective, _RecordingObjective) else ()
        self.found.append((indices, float(value.detach()), not_finite))
        return value


def repeat_update(
    state: Mapping[str, Any], *, device: str = "auto", image_processor: ImageReader | None = None
) -> RepeatedUpdate:
    """Run the update of a dump again, on the recorded type of device (``auto``) or on another device.

    Raises:
        UsageError: this machine cannot make the model, its weights were in 4 bits, or its update had another loss, too.
        UnknownNameError: a name in the config is not registered.
    """
    config = config_from(json.loads(state["config"]))
    if state.get("joins_critic"):
        raise UsageError(
            "this update cannot be repeated",
            got="trainer.critic.kind shared, whose loss is part of the update",
            expected="an update of only the policy",
            hint="the update's gradient norms by group are in the run's metrics.jsonl",
        )
    if config.algorithm.observation_coef:
        raise UsageError(
            "this update cannot be repeated",
            got=f"algorithm.observation_coef {config.algorithm.observation_coef}, whose loss is part of the update",
            expected="an update of only the policy loss",
            hint="the update's gradient norms by group are in the run's metrics.jsonl",
        )
    torch.set_num_threads(state["threads"])
    torch.set_rng_state(state["torch_generator"])
    prepare_repeatable(enabled=config.trainer.deterministic)
    model = _model(state, config, _device(device, state["device"]))
    weights = tuple(name for name, p in model.named_parameters() if not bool(p.detach().isfinite().all()))
    values = _read_values(state, model.device)
    batch = _batch(state, values, config)
    layout = Layout(**state["layout"])
    lanes = ThreadWorkers(state["lanes"])
    passes = RunnerSettings(layout=layout, lanes=lanes, image_processor=image_processor)
    policy = ModelRunner(model, passes, workers=state["lanes"] * state["ranks"])
    gradient = _RecordingPass(
        policy,
        _RecordingObjective(config.algorithm),
        batch,
        _scores_ahead(values),
        hooks=moe_hooks(policy, config.trainer)(),
        updates=state["updates"],
    )
    optimizer = PolicyOptimizer(model, OptimizerSettings(learning_rate=0.0, total_updates=1))
    with (
        repeatable(enabled=config.trainer.deterministic),
        checkpoint_activations(model, enabled=config.trainer.gradient_checkpointing),
        watched_modules(model) as modules,
    ):
        loss = gradient.accumulate(state["part"])
    lanes.close()
    return RepeatedUpdate(
        micro_batches=tuple(
            MicroBatchFinding(
                trajectories=tuple(dict.fromkeys(batch.trajectories[batch.sequence_trajectory[i]].id for i in indices)),
                tokens=sum(batch.lengths[i] for i in indices),
                loss=value,
                not_finite=not_finite,
            )
            for indices, value, not_finite in gradient.found
        ),
        weights_not_finite=weights,
        first_forward=modules.forward,
        first_backward=modules.backward,
        now=UpdateNumbers.of(loss, optimizer.measure(loss)),
        recorded=recorded_numbers(state),
    )


def _batch(state: Mapping[str, Any], values: Mapping[str, Any], config: Config) -> StepBatch:
    shaping = RewardShaping(config.algorithm.shaping, max_tokens=config.agent.max_tokens)
    batch = step_batch(
        [trajectory_from_record(record) for record in json.loads(state["trajectories"])],
        shaping,
        experts=frozenset(state.get("experts", ())),
        routes=config.trainer.router_replay,
    )
    teacher = None
    if values["teacher_logp"] is not None:
        top = {"top_ids": values["teacher_top_ids"], "top_logp": values["teacher_top_logp"]}
        teacher = TeacherLogprobs(logp=values["teacher_logp"], **top)
    returns = batch.episodes.returns.clone()  # shapings that read models have changed the recorded ones
    returns[batch.owners.trajectory] = values["episode_return"].to(returns)
    return replace(
        batch,
        episodes=replace(batch.episodes, returns=returns),
        **{name: values[name] for name in DUMPED_STEP},
        teacher=teacher,
        needs_forward=state["reads"],
        temperature=state["temperature"],
    )


def _scores_ahead(values: Mapping[str, Any]) -> TokenScores:
    logp, entropy = values["trainer_logp"], values["entropy"]
    return TokenScores(logp=logp, entropy=torch.full_like(logp, math.nan) if entropy is None else entropy)


def _read_values(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the values of the step's tokens on a device."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) and name != "sample_counts" else value
        for name, value in state["values"].items()
    }


def _device(asked: str, recorded: str) -> torch.device:
    if asked != "auto":
        return torch.device(asked)
    return torch.device(recorded if recorded != "cuda" or torch.cuda.is_available() else "cpu")


def _model(state: Mapping[str, Any], config: Config, device: torch.device) -> PreTrainedModel:
    """Rebuild the model from the dump's config and weights."""
    lora = config.model.lora
    if lora is not None and lora.quantize is not None:
        raise UsageError("an update of 4-bit weights cannot be repeated", got=f"model.lora.quantize {lora.quantize}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(state["model_config"], encoding="utf-8")
        model = make_model(Path(folder))
    for parameter in model.parameters():  # not buffers: rotary frequencies are float32 in every model
        parameter.data = parameter.data.to(getattr(torch, state["dtype"]))
    if lora is not None:
        add_adapters(model, lora, base=config.model.path, seed=config.run.seed)
    model.load_state_dict(state["weights"])
    if Layout(**state["layout"]).packed:
        model.config._attn_implementation = ATTENTION
    return model.to(device)
