"""Checks, seeds and common prefixes of requests."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np

from agentrl.engine import Capabilities, GenerateRequest
from agentrl.errors import UsageError

SEED_BITS = 63


def check_request(request: GenerateRequest, capabilities: Capabilities, running: Container[str]) -> None:
    """Raise `UsageError` for a request that the engine does not support, or whose id is already running."""
    name, prompt = f"request {request.request_id}", request.prompt_ids
    if request.images and not capabilities.images:
        raise UsageError(f"{name} contains images", got=len(request.images), expected="an engine that accepts images")
    if any(image.end > len(prompt) for image in request.images):
        raise UsageError(f"{name} has an image outside its prompt", expected=f"within {len(prompt)} tokens")
    if request.routed_experts_from is not None and not capabilities.routed_experts:
        raise UsageError(f"{name} requests routed experts", expected="an engine that reports them")
    if request.params.structure is not None and not capabilities.structures:
        raise UsageError(f"{name} requests a structured answer", expected="an engine that supports structured answers")
    if request.params.first_token is not None and not capabilities.first_tokens:
        raise UsageError(f"{name} has settings of its first token", expected="an engine that supports them")
    if request.adapter is not None and request.adapter not in capabilities.adapters:
        known = ", ".join(sorted(capabilities.adapters)) or "none"
        raise UsageError(f"{name} names an adapter that the engine does not have", got=request.adapter, expected=known)
    if len(prompt) == 0:
        raise UsageError(f"{name} has an empty prompt", expected="at least one token")
    if len(prompt) >= capabilities.max_context:
        raise UsageError(
            f"the prompt of {name} does not fit",
            got=f"{len(prompt)} tokens",
            expected=f"fewer than the context of {capabilities.max_context}",
        )
    ids = np.asarray(prompt)  # of an array, without a copy
    if ids.min() < 0 or ids.max() >= capabilities.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < capabilities.vocab_size)
        raise UsageError(
            f"{name} has a token id outside the vocabulary", got=wrong, expected=f"0 to {capabilities.vocab_size - 1}"
        )
    if request.params.max_tokens < 1:
        raise UsageError(f"{name} requests no tokens", got=request.params.max_tokens, expected="max_tokens >= 1")
    check_is_new(request, running)


def check_is_new(request: GenerateRequest, running: Container[str]) -> None:
    """Raise `UsageError` for a request whose id is already running."""
    if request.request_id in running:
        raise UsageError(f"request {request.request_id} is already running", expected="a unique request id")


def seed_of(request: GenerateRequest, seeds: random.Random) -> GenerateRequest:
    """Return the request with its own seed, or with one drawn from `seeds`."""
    if request.params.seed is not None:
        return request
    return replace(request, params=replace(request.params, seed=seeds.getrandbits(SEED_BITS)))


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading ids that two sequences of the same type share."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:  # comparing slices is much faster than comparing elements
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
