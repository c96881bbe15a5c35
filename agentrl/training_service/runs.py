"""The training runs of the service: each has its own adapters or weights, accumulated gradients, and an optimizer.

Runs with adapters share the tensors of the base model; each run has its own modules, which hold its adapters.

The losses are those of the client's API, as its documentation defines them: sums over tokens, never means. p is the
trained policy, q the sampling policy, r = p / q the ratio of a token, and A its advantage.
https://tinker-docs.thinkingmachines.ai/losses
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.config.config import Config
from agentrl.config.trainer import LoraConfig
from agentrl.errors import TrainingError, UsageError, did_you_mean
from agentrl.models.load import load_model
from agentrl.models.lora import add_adapters, load_adapter, trained_names
from agentrl.observe.model_folder import MODEL
from agentrl.training.checkpoint import STATE_FILE, load_state, save_adapter_folder, save_model_folder, save_state
from agentrl.training.compile import checkpoint_activations
from agentrl.training.forward.runner import SumsByName, make_runner
from agentrl.training.forward.sequences import PAD_ID, ScoredSequence
from agentrl.training.optimizer import OptimizerSettings, PolicyOptimizer, group_of
from agentrl.training_service.wire import Array, Datum, PassRequest

Inputs: TypeAlias = Mapping[str, Tensor]
Options: TypeAlias = Mapping[str, float]
TARGETS = "target_tokens"
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
_RL = ("logprobs", "advantages")
ALPHA = 32.0
"""Default alpha of adapters: a layer's update is scaled by alpha / rank (https://thinkingmachines.ai/blog/lora)."""


def cross_entropy(logp: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Compute -sum(weights * log p)."""
    return -(logp * inputs["weights"]).sum()


def importance_sampling(logp: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Compute -sum(r * A)."""
    return -(_ratio(logp, inputs) * inputs["advantages"]).sum()


def ppo(logp: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Compute -sum(min(r * A, clip(r, low, high) * A))."""
    return _clipped_loss(_ratio(logp, inputs), inputs["advantages"], options)


def cispo(logp: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Compute -sum(stop_gradient(clip(r, low, high)) * log p * A); https://arxiv.org/abs/2506.13585."""
    weight = _ratio(logp, inputs).clamp(options[LOW], options[HIGH]).detach()
    return -(weight * logp * inputs["advantages"]).sum()


def dro(logp: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Compute -sum(log p * A - beta / 2 * (log r)^2); https://arxiv.org/abs/2405.19107."""
    penalty = (logp - inputs["logprobs"]).square()
    return -(logp * inputs["advantages"] - 0.5 * options["beta"] * penalty).sum()


def gspo(logp: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Compute `ppo` with each token's ratio replaced by the geometric mean of r over the marked tokens.

    The ratio's value is the sequence's; its gradient is that of the token's log p: https://arxiv.org/abs/2507.18071.
    """
    marked = inputs["sequence_ratio_mask"] != 0
    mean = (logp.detach() - inputs["logprobs"])[marked].mean() if bool(marked.any()) else logp.new_zeros(())
    return _clipped_loss((mean + logp - logp.detach()).exp(), inputs["advantages"], options)


def _ratio(logp: Tensor, inputs: Inputs) -> Tensor:
    return (logp - inputs["logprobs"]).exp()


def _clipped_loss(ratio: Tensor, advantages: Tensor, options: Options) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(options[LOW], options[HIGH]) * advantages).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """A loss with its inputs and options."""

    compute: Callable[[Tensor, Inputs, Options], Tensor]
    """Function that computes the loss of one datum from log p of its targets, [N] or [N, K]."""
    inputs: tuple[str, ...]
    """Names of the inputs other than `TARGETS`; each has the targets' shape."""
    options: Mapping[str, float | None]
    """Options with their defaults; ``None`` marks a required option."""
    several_targets: bool = False
    """True if a position may have K targets."""


LOSSES: Mapping[str, LossKind] = {
    "cross_entropy": LossKind(compute=cross_entropy, inputs=("weights",), options={}, several_targets=True),
    "importance_sampling": LossKind(compute=importance_sampling, inputs=_RL, options={}),
    "ppo": LossKind(compute=ppo, inputs=_RL, options={LOW: 0.8, HIGH: 1.2}),
    "cispo": LossKind(compute=cispo, inputs=_RL, options={LOW: 0.0, HIGH: 4.0}),
    "dro": LossKind(compute=dro, inputs=_RL, options={"beta": None}),
    "gspo": LossKind(compute=gspo, inputs=(*_RL, "sequence_ratio_mask"), options={LOW: None, HIGH: None}),
}


def check_pass(request: PassRequest, *, vocab_size: int, max_context: int) -> tuple[LossKind, Options]:
    """Validate a request before the pass; return its loss and its options including defaults.

    Raises:
        UsageError: the loss, an option or an input is invalid; the message names it.
    """
    if request.loss not in LOSSES:
        raise UsageError(
            f"loss_fn {request.loss!r} is not supported",
            expected=", ".join(LOSSES),
            hint=did_you_mean(request.loss, LOSSES) or "use forward_backward_custom for other losses",
        )
    kind = LOSSES[request.loss]
    options = _options(request, kind)
    for number, datum in enumerate(request.data):
        _check_datum(datum, f"data[{number}]", request.loss, kind, vocab_size=vocab_size, max_context=max_context)
    return kind, options


def _options(request: PassRequest, kind: LossKind) -> Options:
    if unknown := sorted(set(request.options) - set(kind.options)):
        raise UsageError(
            f"loss_fn_config.{unknown[0]} is not an option of {request.loss}",
            expected=", ".join(kind.options) or "no loss_fn_config",
        )
    merged = {**kind.options, **request.options}
    options = {name: value for name, value in merged.items() if value is not None}
    if missing := sorted(set(merged) - set(options)):
        raise UsageError(f"{request.loss} requires loss_fn_config.{missing[0]}", expected=f"{missing[0]}: a number")
    for name, value in options.items():
        if not np.isfinite(value) or value < 0:
            raise UsageError(f"loss_fn_config.{name} is out of range", got=value, expected="a number of 0 or more")
    if LOW in options and options[LOW] > options[HIGH]:
        raise UsageError(f"loss_fn_config.{LOW} is above {HIGH}", got=f"{options[LOW]} > {options[HIGH]}")
    return options


def _check_datum(datum: Datum, where: str, loss: str, kind: LossKind, *, vocab_size: int, max_context: int) -> None:
    wanted = {TARGETS, *kind.inputs}
    if missing := sorted(wanted - set(datum.inputs)):
        raise UsageError(f"{where} lacks loss_fn_inputs.{missing[0]}", expected=f"{', '.join(sorted(wanted))} ({loss})")
    if unknown := sorted(set(datum.inputs) - wanted):
        raise UsageError(
            f"{where} has loss_fn_inputs.{unknown[0]}, which is not an input of {loss}",
            expected=", ".join(sorted(wanted)),
            hint=f"leave {unknown[0]} out",
        )
    length, targets = len(datum.tokens), datum.inputs[TARGETS]
    if not 0 < length <= max_context:
        raise UsageError(
            f"{where}.model_input has an invalid length", got=length, expected=f"1 to {max_context} tokens"
        )
    if targets.dtype != np.int64 or targets.ndim not in (1, 2) or len(targets) != length or targets.size == 0:
        raise UsageError(
            f"{where}.{TARGETS} does not fit model_input",
            got=f"{targets.dtype} of shape {targets.shape}",
            expected=f"int64 of shape ({length},) or ({length}, K)",
        )
    if targets.ndim == 2 and not kind.several_targets:
        raise UsageError(f"{loss} takes one target per token", got=f"{where}.{TARGETS} of shape {targets.shape}")
    for name in kind.inputs:
        if datum.inputs[name].shape != targets.shape:
            raise UsageError(
                f"{where}.{name} does not fit {TARGETS}", got=datum.inputs[name].shape, expected=targets.shape
            )
    for name, ids in (("model_input", datum.tokens), (TARGETS, targets)):
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = ids[(ids < 0) | (ids >= vocab_size)].flat[0]
            raise UsageError(
                f"{where}.{name} has a token out of the vocabulary", got=wrong, expected=f"0 to {vocab_size - 1}"
            )


def loss_inputs(datum: Datum, kind: LossKind, device: torch.device) -> Inputs:
    """Return a datum's loss inputs as float32 tensors, without the targets."""
    return {name: torch.from_numpy(datum.inputs[name]).float().to(device) for name in kind.inputs}


def max_targets(data: Sequence[Datum]) -> int:
    """Return the maximum number of targets per position."""
    return max(1 if datum.inputs[TARGETS].ndim == 1 else datum.inputs[TARGETS].shape[1] for datum in data)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Trained parameters of a run; constant during the run and stored in its checkpoints."""

    rank: int | None
    """Rank of the adapters; ``None`` trains all weights."""
    seed: int = 0
    """Seed of the adapters' initial values."""
    alpha: float = ALPHA
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @property
    def compatibility_key(self) -> tuple[int | None, float, bool, bool, bool]:
        """Key of weight compatibility: runs with equal keys can load each other's weights."""
        return self.rank, self.alpha, self.train_attn, self.train_mlp, self.train_unembed


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """Hyperparameters of one AdamW update as in `torch.optim.AdamW`; weight decay applies to all trained parameters."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    """Maximum global gradient norm; 0 disables clipping."""


class BaseWeights:
    """Base model from which runs and samplers start."""

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
        self.path, self.tokenizer, self.config = path, tokenizer, config
        section = config.model
        self.model = load_model(path, dtype=section.dtype, device=section.device).requires_grad_(False)
        text = self.model.config.get_text_config()
        self.vocab_size = int(text.vocab_size)
        longest = int(text.max_position_embeddings)
        self.max_context = min(longest, getattr(config.engine, "max_context", None) or longest)

    def copy(self, settings: RunSettings | None) -> PreTrainedModel:
        """Create a model with its own weights or adapters; with ``None``, one that only shares the base's tensors.

        Raises:
            UsageError: the model has no layers for the adapters.
        """
        if settings is not None and settings.rank is None:
            return copy.deepcopy(self.model).requires_grad_(True)
        shared = {id(tensor): tensor for tensor in [*self.model.parameters(), *self.model.buffers()]}
        model: PreTrainedModel = copy.deepcopy(self.model, memo=shared)
        if settings is not None and settings.rank is not None:
            lora = LoraConfig(rank=settings.rank, alpha=settings.alpha, target_modules=_targets(model, settings))
            add_adapters(model, lora, base=self.path, seed=settings.seed, head=settings.train_unembed)
        return model


def _targets(model: PreTrainedModel, settings: RunSettings) -> list[str]:
    """Return the name suffixes of the layers that get adapters."""
    head = model.get_output_embeddings()
    found: dict[str, bool] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if module is head:
                wanted = settings.train_unembed
            else:
                in_attention = group_of(f"{name}.weight") == "attention"
                wanted = settings.train_attn if in_attention else settings.train_mlp
            found[name] = wanted
    ends = {name.rpartition(".")[2] for name, wanted in found.items() if wanted}
    others = {name.rpartition(".")[2] for name, wanted in found.items() if not wanted}
    targets = sorted(ends - others) + sorted(
        n for n, wanted in found.items() if wanted and n.rpartition(".")[2] in others
    )
    if not targets:
        raise UsageError("the model has no layers that train_attn, train_mlp and train_unembed select for adapters")
    return targets


class TrainingRun:
    """One model in training; it belongs to one thread."""

    def __init__(self, base: BaseWeights, settings: RunSettings) -> None:
        self.base, self.settings = base, settings
        self.model = base.copy(settings)
        self._runner = make_runner(self.model, base.config.trainer)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = self._make_optimizer()
        self._incomplete: str | None = None

    @property
    def updates(self) -> int:
        """Number of updates of the current optimizer, including those of a loaded state."""
        return self._optimizer.updates

    def _make_optimizer(self) -> PolicyOptimizer:
        return PolicyOptimizer(self.model, OptimizerSettings(learning_rate=0.0, total_updates=1))

    def forward_backward(self, request: PassRequest) -> tuple[list[Array], float]:
        """Compute the loss of the data and accumulate its gradient; an error leaves accumulated gradients unchanged.

        Returns:
            Log p of each datum's targets, [N] or [N, K], and the loss.

        Raises:
            UsageError: the data is invalid, or its loss is not finite.
        """
        kind, options = check_pass(request, vocab_size=self.base.vocab_size, max_context=self.base.max_context)
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            with checkpoint_activations(self.model, enabled=self.base.config.trainer.gradient_checkpointing):
                logprobs, loss = self._pass(request, kind, options)
            if not math.isfinite(loss):
                raise UsageError(
                    f"the loss {request.loss} is not finite", got=loss, hint="check logprobs: r = p / q may overflow"
                )
        except BaseException:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
            raise
        for parameter, gradient in zip(self._parameters, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return logprobs, loss

    def _pass(self, request: PassRequest, kind: LossKind, options: Options) -> tuple[list[Array], float]:
        data, device = request.data, self.model.device
        width = max_targets(data)
        sequences = [_sequence(datum) for datum in data]
        found: dict[int, Array] = {}

        def loss(indices: list[int], _: SumsByName) -> torch.Tensor:
            others = None if width == 1 else torch.cat([_others(data[i], width) for i in indices]).to(device)
            scores = self._runner.score([sequences[i] for i in indices], temperature=1.0, others=others)
            logp = scores.logp[:, None]
            if scores.top_logp is not None:
                logp = torch.cat([logp, scores.top_logp], dim=1)
            total = logp.new_zeros(())
            for i, own in zip(indices, torch.split(logp, [len(sequences[i]) for i in indices]), strict=True):
                shape = data[i].inputs[TARGETS].shape
                own = own[:, 0] if len(shape) == 1 else own[:, : shape[1]]
                found[i] = own.detach().float().cpu().numpy()
                total = total + kind.compute(own, loss_inputs(data[i], kind, device), options)
            return total

        needs_grad = [not request.forward_only] * len(data)
        result = self._runner.forward_backward(sequences, loss, needs_grad=needs_grad)
        return [found[i] for i in range(len(data))], result.loss

    def mark_incomplete(self, why: str) -> None:
        """Record that a pass since the last update failed, so that the next update is rejected."""
        self._incomplete = self._incomplete or why

    def optim_step(self, step: AdamStep) -> Mapping[str, float]:
        """Update the parameters with the accumulated gradients, and clear the gradients.

        Returns:
            Gradient norm and learning rate.

        Raises:
            UsageError: no gradients are accumulated, or an earlier `forward_backward` failed.
            TrainingError: the gradients are not finite; the parameters are unchanged.
        """
        why, self._incomplete = self._incomplete, None
        if why is not None:
            for parameter in self._parameters:
                parameter.grad = None
            raise UsageError(
                "no update: a forward_backward since the last update failed, so gradients are missing", got=why
            )
        if all(parameter.grad is None for parameter in self._parameters):
            raise UsageError("no update: no gradients are accumulated", hint="call forward_backward first")
        self._optimizer.set_adam(
            learning_rate=step.learning_rate,
            betas=(step.beta1, step.beta2),
            eps=step.eps,
            weight_decay=step.weight_decay,
            max_grad_norm=step.grad_clip_norm or math.inf,
        )
        update = self._optimizer.update()
        if update.non_finite:
            raise TrainingError(
                "no update: gradients are not finite", got=f"gradients of {', '.join(update.non_finite[:3])}"
            )
        return {"grad_norm": update.grad_norm, "learning_rate": update.learning_rate}

    def save(self, folder: Path, *, optimizer: bool) -> None:
        """Write a Hugging Face or peft folder into an existing folder, optionally with the optimizer's state."""
        images = None
        if self.settings.rank is None:
            save_model_folder(self.model, self.base.tokenizer, folder / MODEL, images)
        else:
            parameters = dict(self.model.named_parameters(remove_duplicate=False))
            trained = {name: parameters[name] for name in trained_names(self.model)}
            save_adapter_folder(self.model, self.base.tokenizer, folder / MODEL, images, trained=trained)
        if optimizer:
            save_state({"optimizer": self._optimizer.state_dict()}, folder / STATE_FILE)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Load the weights of a folder that `save` wrote, with its optimizer state or a new one; clear gradients."""
        load_weights(self.model, self.settings, folder, self.base)
        state: dict[str, Any] | None = load_state(folder / STATE_FILE) if optimizer else None
        self._optimizer = self._make_optimizer()
        if state is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        self._incomplete = None
        for parameter in self._parameters:
            parameter.grad = None


def load_weights(model: PreTrainedModel, settings: RunSettings, folder: Path, base: BaseWeights) -> None:
    """Load the weights of a checkpoint with the same settings into a model that `BaseWeights.copy` made."""
    if settings.rank is not None:
        load_adapter(model, folder / MODEL)
        return
    found = load_model(folder / MODEL, dtype=base.config.model.dtype, device=str(model.device))
    values = dict(found.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def _sequence(datum: Datum) -> ScoredSequence:
    targets = torch.from_numpy(datum.inputs[TARGETS])
    return ScoredSequence(
        input_ids=torch.from_numpy(datum.tokens),
        positions=torch.arange(len(datum.tokens)),
        targets=targets if targets.ndim == 1 else targets[:, 0].contiguous(),
    )


def _others(datum: Datum, width: int) -> torch.Tensor:
    """Return the targets of each position except the first, padded to `width` columns: int64 [N, width - 1]."""
    targets = datum.inputs[TARGETS]
    columns: Sequence[int] = () if targets.ndim == 1 else range(1, targets.shape[1])
    filled = np.full((len(targets), width - 1), PAD_ID, dtype=np.int64)
    filled[:, : len(columns)] = targets[:, list(columns)] if columns else filled[:, :0]
    return torch.from_numpy(filled)
