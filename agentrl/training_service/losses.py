"""The losses of the client's API, as its documentation defines them: sums over tokens, never means.

p is the trained policy, q the sampling policy, r = p / q the ratio of a token, and A its advantage.
https://tinker-docs.thinkingmachines.ai/losses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import UsageError, did_you_mean
from agentrl.training_service.wire import Datum, PassRequest

Inputs: TypeAlias = Mapping[str, Tensor]
Options: TypeAlias = Mapping[str, float]
TARGETS = "target_tokens"
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"


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


_RL = ("logprobs", "advantages")
LOSSES: Mapping[str, LossKind] = {
    "cross_entropy": LossKind(compute=cross_entropy, inputs=("weights",), options={}, several_targets=True),
    "importance_sampling": LossKind(compute=importance_sampling, inputs=_RL, options={}),
    "ppo": LossKind(compute=ppo, inputs=_RL, options={LOW: 0.8, HIGH: 1.2}),
    "cispo": LossKind(compute=cispo, inputs=_RL, options={LOW: 0.0, HIGH: 4.0}),
    "dro": LossKind(compute=dro, inputs=_RL, options={"beta": None}),
    "gspo": LossKind(compute=gspo, inputs=(*_RL, "sequence_ratio_mask"), options={LOW: None, HIGH: None}),
}


def check_pass(request: PassRequest, *, vocab_size: int, max_context: int) -> tuple[LossKind, Options]:
    """Check a request before it is computed; return its loss, and its options including defaults.

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
