"""Check that a model's logits are its output head's product with its last hidden states, softly capped at most.

Log-probabilities are computed from hidden states and head, without the model's own code between and after them. Some
models scale hidden states or logits there, cap logits under another name, or cut off a part of the vocabulary. There is
no common config key, so the check runs the model's code, with stand-ins for decoder and head: it needs no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.errors import UsageError

TOKENS = 3
TOLERANCE = 0.02
"""Maximum difference of logits from -5 to 5 that rounding to bfloat16 explains."""


def check_logits(path: str | Path, model: PreTrainedModel) -> None:
    """Check that log-probabilities can be computed from a model's hidden states and head.

    A model that does not call its `base_model` as a whole, such as OPT, is not checked.

    Raises:
        UsageError: the model changes hidden states before its head, or logits after it.
    """
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return
    (vocabulary, width), calls = head.weight.shape, list[Tensor]()
    hidden, made = _pattern(width, period=7) / 4, _pattern(vocabulary, period=11)
    if model.device.type != "meta":
        hidden, made = hidden.to(model.device), made.to(model.device)

    def decode(*_: Any, **__: Any) -> _Hidden:
        calls.append(hidden)
        return _Hidden((hidden,))

    def multiply(inputs: Tensor, *_: Any, **__: Any) -> Tensor:
        calls.append(inputs)
        return made.clone()

    logits, problem = made.new_zeros(0), ""
    with _replace_forward(model.base_model, decode), _replace_forward(head, multiply), torch.no_grad():
        ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=model.device)
        try:
            logits = model(input_ids=ids, use_cache=False).logits
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:  # from the model's code
            problem = f" ({error})"
    if not calls or calls[0] is not hidden:
        return
    if len(calls) != 2 or _differ(calls[1], hidden):
        raise _refusal(path, "its hidden states before the head" + problem)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if _differ(logits, made if cap is None else (made / cap).tanh() * cap):
        raise _refusal(path, "its logits after the head" + problem)


def _refusal(path: str | Path, what: str) -> UsageError:
    return UsageError(
        f"this model changes {what}, so its log-probabilities would be computed wrongly",
        got=path,
        expected="logits that are the product of hidden states and head, without scale or cut",
        hint="choose a model of another family",
    )


def _pattern(columns: int, *, period: int) -> Tensor:
    """Make numbers that bfloat16 represents exactly, around 0: float32 [1, TOKENS, columns]."""
    return (torch.arange(TOKENS * columns) % period - period // 2).float().view(1, TOKENS, columns)


def _differ(found: Tensor, expected: Tensor) -> bool:
    return found.shape != expected.shape or not torch.allclose(found.float(), expected, rtol=0, atol=TOLERANCE)


class _Hidden(tuple[Tensor]):
    """Output of a decoder with nothing but hidden states; other parts are ``None``."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


@contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Use another function as a module's forward pass in this block."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before
