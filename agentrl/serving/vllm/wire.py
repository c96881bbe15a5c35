"""What vLLM's routes take and give, as pure functions; no I/O."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl.errors import EngineError
from agentrl.policy import GenerateRequest, Generation, StopReason
from agentrl.routes import Routes, small
from agentrl.server import ServerLoad, TensorLayout
from agentrl.serving.version_labels import decode_versions

ID_PREFIX = "generate-tokens-"
"""vLLM puts it before our request id; an abort must name both, unknown ids are ignored in silence."""

ADAPTER = "policy-adapter"
"""Name of the adapter that a server was sent, in place of its model's."""

_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}
_NO_LOGPROB = -9999.0
"""What vLLM writes where a log-probability is missing or not a number."""
_COUNTS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "preemptions": "vllm:num_preemptions_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "cached_tokens": "vllm:prompt_tokens_cached_total",
    "sampled_tokens": "vllm:generation_tokens_total",
}
_CACHE_USED = "vllm:kv_cache_usage_perc"
CHECKSUM_DIGITS = 16
_OF_NOTHING = "e3b0c44298fc1c14"
"""Checksum of a tensor whose bytes vLLM keeps in a packed form elsewhere."""


def encode_request(
    request: GenerateRequest, *, wire_id: str, max_context: int, adapted: bool = False
) -> dict[str, Any]:
    """The body of a request to ``/inference/v1/generate``.

    Args:
        request: It has passed `agentrl.serving.request.check_request`.
        wire_id: Name of the request at the server.
        max_context: `max_tokens` is cut to what fits.
        adapted: Whether the model's adapter is to answer.
    """
    params = request.params
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "max_tokens": min(params.max_tokens, max_context - len(request.prompt_ids)),
        "stop_token_ids": sorted(params.stop_token_ids),
        "ignore_eos": True,  # the request alone says where to stop, not the model's folder
        "logprobs": 0,  # of the sampled tokens only
        "detokenize": False,
    }
    if request.routes_from is not None:
        sampling["routed_experts_prompt_start"] = request.routes_from
    body = {"token_ids": list(request.prompt_ids), "request_id": wire_id, "sampling_params": sampling}
    return body | {"model": ADAPTER} if adapted else body


def encode_abort(wire_id: str) -> dict[str, Any]:
    """The body of a request to ``/inference/v1/abort_requests``."""
    return {"request_ids": [ID_PREFIX + wire_id]}


def encode_run(layout: TensorLayout, *, handle: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `agentrl_vllm_receiver` has to know of a run of bytes.

    Args:
        layout: Its tensors.
        handle: Opens it where it is; without one it is broadcast.
    """
    shapes = [list(shape) for shape in layout.shapes]
    return {"names": list(layout.names), "dtype": layout.dtype, "shapes": shapes, "handle": handle}


def decode_checksums(body: Any) -> dict[str, str]:
    """The checksums in the answer of ``/weight_checker``; none when several workers have a part of each tensor.

    Raises:
        EngineError: there are none.
    """
    try:
        told = {tuple(name.rsplit(":", 1)): checksum[:CHECKSUM_DIGITS] for name, checksum in body["checksums"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError("vLLM does not tell the checksums of its weights", got=repr(body)[:200]) from error
    if len({place for place, *_ in told}) != 1:
        return {}
    return {name[-1]: checksum for name, checksum in told.items() if checksum != _OF_NOTHING}


def decode_answer(body: Any, stop_token_ids: frozenset[int]) -> Generation:
    """The answer in the body of a successful response.

    Raises:
        EngineError: it is not one, or its parts do not fit one another.
    """
    try:
        choice = body["choices"][0]
        token_ids = [int(token) for token in choice["token_ids"]]
        rows = choice["logprobs"]["content"] if token_ids else []
        logprobs = [float(row["logprob"]) for row in rows]
        versions = decode_versions(choice.get("weight_versions") or (), len(token_ids))
        stop_reason = _STOP_REASONS[choice["finish_reason"]]
        routes = _decode_routes(choice.get("routed_experts"))
        details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
        cached_tokens = int(details.get("cached_tokens") or 0)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise EngineError("vLLM's answer is not a generation", got=repr(body)[:300]) from error
    if len(logprobs) != len(token_ids) or min(logprobs, default=0.0) <= _NO_LOGPROB:
        raise EngineError("vLLM left out log-probabilities", got=logprobs, expected=f"{len(token_ids)} numbers")
    if stop_reason is StopReason.STOP and token_ids[-1] not in stop_token_ids:
        raise EngineError(
            "vLLM stopped at a token that is not one of the request's stop tokens",
            got=token_ids[-1],
            expected=sorted(stop_token_ids),
        )
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        stop_reason=stop_reason,
        cached_tokens=cached_tokens,
        routes=routes,
    )


def _decode_routes(told: str | None) -> Routes | None:
    """From base64 of numpy's own format, [tokens, layers, chosen]."""
    if told is None:
        return None
    experts = np.load(io.BytesIO(base64.b64decode(told)), allow_pickle=False)
    return small(experts.reshape(len(experts), -1))


def decode_load(text: str) -> ServerLoad:
    """A server's load in the text of ``/metrics``: counts are summed over its engines, the fullest cache counts.

    Raises:
        EngineError: a figure is missing.
    """
    figures: dict[str, list[float]] = {name: [] for name in (*_COUNTS.values(), _CACHE_USED)}
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        if name in figures:
            figures[name].append(float(rest.rpartition(" ")[2]))
    if missing := [name for name, values in figures.items() if not values]:
        raise EngineError("vLLM's metrics are not complete", got=f"no {', '.join(missing)}")
    counts = {field: int(sum(figures[name])) for field, name in _COUNTS.items()}
    return ServerLoad(cache_used=max(figures[_CACHE_USED]), **counts)
