"""Request and response formats of vLLM's routes, as pure functions without I/O, and its log-probability conventions."""

from __future__ import annotations

import base64
import enum
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.engine import GenerateRequest, Generation, SamplingParams, ServerLoad, StopReason, TensorLayout
from agentrl.errors import EngineError, UsageError
from agentrl.routed_experts import RoutedExperts, small
from agentrl.serving.http import decode_versions, decoding

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
    request: GenerateRequest, *, wire_id: str, max_context: int, adapter: str | None = None
) -> dict[str, Any]:
    """Return the body of a request to ``/inference/v1/generate``.

    Args:
        request: The request, checked with `agentrl.serving.request.check_request`.
        wire_id: Name of the request at the server.
        max_context: Most tokens of prompt and answer together.
        adapter: The server's name of the adapter that is to answer; the model itself when left out.
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
    if params.stop:
        sampling |= {
            "stop": list(params.stop),
            "include_stop_str_in_output": True,
            "detokenize": True,
            "skip_special_tokens": False,
        }
    if params.structure is not None:
        sampling["structured_outputs"] = {"structural_tag": params.structure}
    if request.routed_experts_from is not None:
        sampling["routed_experts_prompt_start"] = request.routed_experts_from
    body = {"token_ids": list(request.prompt_ids), "request_id": wire_id, "sampling_params": sampling}
    return body if adapter is None else body | {"model": adapter}


def adapter_name(adapter: str) -> str:
    """Return the name that a server has for one of several adapters."""
    return f"{ADAPTER}-{adapter}"


def decode_adapters(models: Any) -> list[str]:
    """Return the names of the adapters in the answer of ``/v1/models``, in the order in which they were loaded."""
    with decoding("vLLM does not report its models", models):
        return [str(model["id"]) for model in models["data"] if model.get("parent")]


def encode_abort(wire_id: str) -> dict[str, Any]:
    """Return the body of a request to ``/inference/v1/abort_requests``."""
    return {"request_ids": [ID_PREFIX + wire_id]}


def encode_run(layout: TensorLayout, *, handle: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describe a run of bytes for `agentrl_vllm_receiver`; without a handle that opens it, it is broadcast."""
    shapes = [list(shape) for shape in layout.shapes]
    return {"names": list(layout.names), "dtype": layout.dtype, "shapes": shapes, "handle": handle}


def decode_checksums(body: Any) -> dict[str, str]:
    """Return the checksums in the answer of ``/weight_checker``; none if several workers have a part of each tensor."""
    with decoding("vLLM does not report the checksums of its weights", body):
        found = {tuple(name.rsplit(":", 1)): checksum[:CHECKSUM_DIGITS] for name, checksum in body["checksums"].items()}
    if len({place for place, *_ in found}) != 1:
        return {}
    return {name[-1]: checksum for name, checksum in found.items() if checksum != _OF_NOTHING}


def decode_answer(
    body: Any, stop_token_ids: frozenset[int], stop: Sequence[str] = (), *, decode_s: float = 0.0
) -> Generation:
    """Return the answer in the body of a response to a request with these stop tokens and texts, after `decode_s`."""
    with decoding("vLLM's answer is not a generation", body):
        choice = body["choices"][0]
        token_ids = [int(token) for token in choice["token_ids"]]
        rows = choice["logprobs"]["content"] if token_ids else []
        logprobs = [float(row["logprob"]) for row in rows]
        versions = decode_versions(choice.get("weight_versions") or (), len(token_ids))
        stop_reason = _STOP_REASONS[choice["finish_reason"]]
        routed_experts = _decode_routed_experts(choice.get("routed_experts"))
        details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
        cached_tokens = int(details.get("cached_tokens") or 0)
    if len(logprobs) != len(token_ids) or min(logprobs, default=0.0) <= _NO_LOGPROB:
        raise EngineError("vLLM left out log-probabilities", got=logprobs, expected=f"{len(token_ids)} numbers")
    matched = choice.get("stop_reason")
    if stop_reason is StopReason.STOP and token_ids[-1] not in stop_token_ids and matched not in stop:
        raise EngineError(
            "vLLM stopped at something that is not one of the request's stop tokens and texts",
            got=token_ids[-1] if matched is None else repr(matched),
            expected=[*sorted(stop_token_ids), *stop],
        )
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        stop_reason=stop_reason,
        cached_tokens=cached_tokens,
        decode_s=decode_s,
        routed_experts=routed_experts,
    )


def join_events(events: Sequence[Any]) -> dict[str, Any]:
    """Return the body of a response that came as events: tokens as they were sampled, the rest with the last ones."""
    with decoding("vLLM's events are not a generation", events[-1:]):
        choices = [choice for event in events for choice in event["choices"]]
        rows = [row for choice in choices if choice["token_ids"] for row in choice["logprobs"]["content"]]
        whole = {
            **choices[-1],
            "token_ids": [token for choice in choices for token in choice["token_ids"] or ()],
            "logprobs": {"content": rows},
        }
        return {"choices": [whole], "usage": events[-1].get("usage")}


def _decode_routed_experts(encoded: str | None) -> RoutedExperts | None:
    """Decode base64 of numpy's own format, [tokens, layers, chosen]."""
    if encoded is None:
        return None
    experts = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    return small(experts.reshape(len(experts), -1))


def decode_load(text: str) -> ServerLoad:
    """Return a server's load in the text of ``/metrics``: sums over its engines, and the use of the fullest cache."""
    figures: dict[str, list[float]] = {name: [] for name in (*_COUNTS.values(), _CACHE_USED)}
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        if name in figures:
            figures[name].append(float(rest.rpartition(" ")[2]))
    if missing := [name for name, values in figures.items() if not values]:
        raise EngineError("vLLM's metrics are not complete", got=f"no {', '.join(missing)}")
    counts = {field: int(sum(figures[name])) for field, name in _COUNTS.items()}
    return ServerLoad(cache_used=max(figures[_CACHE_USED]), **counts)


WORKER_EXTENSION = "agentrl_vllm_worker.UncutLogprobs"
"""Module of `agentrl.serving.vllm.worker` that launched servers import."""
PROCESSED = "processed_logprobs"


class LogprobConvention(enum.Enum):
    """Distributions of which a server may give log-probabilities."""

    RAW = "raw"
    """The model's own, whatever the temperature; what vLLM does by default."""
    POST_TRUNCATION = "post_truncation"
    """The one that is sampled from: at the request's temperature, after top-p, top-k and min-p."""
    PRE_TRUNCATION = "pre_truncation"
    """At the request's temperature and before the cuts: what `agentrl.engine` promises."""


def convention_of(server_info: Any) -> LogprobConvention:
    """Return the convention in the answer of ``/server_info?config_format=json``.

    `LogprobConvention.PRE_TRUNCATION` is the server's setting; `is_pre_truncation` finds out whether it is in effect.

    Raises:
        UsageError: the server gives logits.
    """
    with decoding("vLLM does not report its logprobs mode", server_info):
        config = server_info["vllm_config"]
        mode = config["model_config"]["logprobs_mode"]
        extension = config["parallel_config"]["worker_extension_cls"]
    if mode == PROCESSED:
        return LogprobConvention.PRE_TRUNCATION if extension == WORKER_EXTENSION else LogprobConvention.POST_TRUNCATION
    if mode == "raw_logprobs":
        return LogprobConvention.RAW
    raise UsageError("vLLM gives no log-probabilities", got=f"--logprobs-mode {mode}", expected=PROCESSED)


TOP_1_PROBE: Mapping[str, Any] = {"temperature": 2.0, "top_k": 1, "max_tokens": 1, "logprobs": 0, "ignore_eos": True}
"""Sampling parameters that tell the conventions apart: after the cut the log-probability is 0; before it, hardly any
model is so sure of a token at vLLM's greatest temperature."""


def is_pre_truncation(logprob: float) -> bool:
    """Return True if the log-probability of a token sampled with `TOP_1_PROBE` is that before the cut."""
    return logprob < 0


def check_convention(params: SamplingParams, convention: LogprobConvention) -> None:
    """Refuse requests for which the server's log-probabilities are not ``log_softmax(logits / temperature)``.

    Raises:
        UsageError: says how to start a server that can serve them.
    """
    is_cut = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
    if params.temperature in (0, 1) and not (is_cut and convention is LogprobConvention.POST_TRUNCATION and params.temperature):
        return
    if convention is LogprobConvention.PRE_TRUNCATION or (convention is LogprobConvention.POST_TRUNCATION and not is_cut):
        return
    sampling = f"temperature {params.temperature}, top_p {params.top_p}, top_k {params.top_k}, min_p {params.min_p}"
    if convention is LogprobConvention.RAW:
        raise UsageError(
            "this vLLM server gives log-probabilities of temperature 1",
            got=sampling,
            expected="temperature 1 or 0",
            hint=f"start it with --logprobs-mode {PROCESSED}, or let agentrl launch it",
        )
    raise UsageError(
        "this vLLM server gives log-probabilities of the cut distribution",
        got=sampling,
        expected="no top_p, top_k and min_p",
        hint="let agentrl launch the server (engine.servers: launch), or start it with --logprobs-mode raw_logprobs "
        "and sample at temperature 1",
    )
