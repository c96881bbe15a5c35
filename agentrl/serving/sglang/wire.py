"""Request and response formats of SGLang's routes, as pure functions without I/O."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config.engines import ServerEngineConfig
from agentrl.engine import GenerateRequest, Generation, SamplingParams, ServerLoad, StopReason, TensorLayout
from agentrl.errors import EngineError, UsageError
from agentrl.models.routed_experts import RoutedExperts, small
from agentrl.serving.http import decode_versions, decoding

TRIED_VERSION = "0.5.23"
"""Version of SGLang that this client was tested with."""
NEEDED_ROUTES = (
    "/generate",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/model_info",
    "/server_info",
    "/v1/loads",
)
GRAMMAR = "xgrammar"
"""Grammar backend that supports the structural tags in requests."""
TRANSPORT_ROUTES = {
    "collective": ("/init_weights_update_group", "/update_weights_from_distributed"),
    "tensor": ("/update_weights_from_tensor",),
}
"""Additional routes that a transport needs."""
NEARLY_CERTAIN = -1e-3
"""Log-probability above which a change of the temperature may have no visible effect."""
_VALID_KEYS = re.compile(r"logit_bias must has keys in \[0, (\d+)\]")
VOCABULARY_PROBE = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "logit_bias": {str(2**31 - 1): 0.0}}}
"""Invalid request to ``/generate``: the error message contains the vocabulary size."""
_NOT_FLUSHED = "Weights were updated, but the cache was not flushed"
PREFIX = "sglang:"


@dataclass(frozen=True, slots=True)
class GeneratedPart:
    """Part of a generation that one call of ``/generate`` sampled."""

    generation: Generation
    continues: bool
    """True if SGLang stopped at an end token of the model that is not a stop token of the request."""


def encode_request(
    request: GenerateRequest,
    *,
    wire_id: str,
    max_context: int,
    sampled: Sequence[int] = (),
    routed_experts_from: int | None = None,
) -> dict[str, Any]:
    """Return the body of a request to ``/generate``, with all settings, so that no default of the server applies.

    `sampled` is the answer so far, which is continued; `routed_experts_from` is the position of the first token whose
    routed experts are requested.
    """
    params = request.params
    body: dict[str, Any] = {
        "input_ids": [*request.prompt_ids, *sampled],
        "rid": wire_id,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": tokens_left(request, max_context, len(sampled)),
            "temperature": params.temperature,
            **_encode_cuts(params),
            "stop_token_ids": sorted(params.stop_token_ids),
            # with ignore_eos, SGLang ignores the request's stop tokens, too
            "ignore_eos": not params.stop_token_ids,
        },
    }
    if params.stop:
        body["sampling_params"] |= {"stop": list(params.stop), "no_stop_trim": True, "skip_special_tokens": False}
    if params.structure is not None:
        body["sampling_params"]["structural_tag"] = params.structure
    if params.first_token is not None:
        body["top_logprobs_num"] = params.first_token.top_k
    if routed_experts_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": routed_experts_from}
    return body


def _encode_cuts(params: SamplingParams) -> dict[str, Any]:
    if params.top_k == 1 and params.temperature > 0:
        # with all requests of a batch at top_k 1, SGLang's log-probabilities are those of temperature 1
        return {"top_p": 1.0, "top_k": -1, "min_p": 1.0}
    return {"top_p": params.top_p, "top_k": params.top_k or -1, "min_p": params.min_p}


def tokens_left(request: GenerateRequest, max_context: int, sampled: int) -> int:
    """Return the number of tokens that may still be sampled for a request."""
    return min(request.params.max_tokens, max_context - len(request.prompt_ids)) - sampled


def encode_update(folder: Path, version: int) -> dict[str, Any]:
    """Return the body of a request to ``/update_weights_from_disk``."""
    return {"model_path": str(folder), "load_format": "auto", "weight_version": str(version), "flush_cache": True}


def encode_tensors(part: str, *, workers: int, version: int | None) -> dict[str, Any]:
    """Return the body of a request to ``/update_weights_from_tensor``; each of the `workers` gets the whole part.

    `part` is the base64 of a pickled list of names and tensors; only the last part has a `version`.
    """
    return {"serialized_named_tensors": [part] * workers} | _encode_end(version)


def encode_broadcast(layout: TensorLayout, *, group: str, version: int | None) -> dict[str, Any]:
    """Return the body of a request to ``/update_weights_from_distributed``, for tensors in one run of bytes.

    Only the last run has a `version`.
    """
    return {
        "names": list(layout.names),
        "dtypes": [layout.dtype] * len(layout.names),
        "shapes": [list(shape) for shape in layout.shapes],
        "group_name": group,
        "load_format": "flattened_bucket",
    } | _encode_end(version)


def _encode_end(version: int | None) -> dict[str, Any]:
    if version is None:
        return {"flush_cache": False}
    return {"flush_cache": True, "weight_version": str(version)}


def decode_checksums(body: Any) -> dict[str, str]:
    """Return the checksums of the first worker in the answer of ``/weights_checker``."""
    with decoding("SGLang does not report the checksums of its weights", body):
        return {str(name): str(checksum) for name, checksum in body["ranks"][0]["checksums"].items()}


def needs_flush(message: str) -> bool:
    """Return True if a failed update has replaced the weights, but not cleared the cache."""
    return message.startswith(_NOT_FLUSHED)


def decode_answer(
    body: Any, stop_token_ids: frozenset[int], stop: Sequence[str] = (), *, routed_experts_from: int | None = None
) -> GeneratedPart:
    """Decode a successful answer of ``/generate``.

    `routed_experts_from` is the position of the first token whose routed experts were requested.

    Raises:
        EngineError: the body is not an answer, or its parts are inconsistent.
    """
    with decoding("SGLang's answer is not a generation", body):
        meta = body["meta_info"]
        token_ids = list(body["output_ids"])
        logprobs = [float(row[0]) for row in meta.get("output_token_logprobs") or ()]
        versions = decode_versions(meta.get("weight_versions") or (), len(token_ids))
        stop_reason, continues = _decode_reason(meta["finish_reason"], stop_token_ids, stop)
        routed_experts = (
            None
            if routed_experts_from is None
            else _decode_routed_experts(meta, int(meta["prompt_tokens"]) - routed_experts_from)
        )
        cached_tokens, queue_s = int(meta.get("cached_tokens") or 0), float(meta.get("queue_time") or 0.0)
        prefill_s = _seconds(meta, "forward_entry_time", "prefill_finished_time")
        decode_s = _seconds(meta, "prefill_finished_time", "request_finished_ts")
    if continues and not token_ids:
        raise EngineError("SGLang stopped at a token that is not in its answer", got=meta["finish_reason"])
    if len(logprobs) != len(token_ids):
        raise EngineError("SGLang omitted log-probabilities", got=len(logprobs), expected=len(token_ids))
    generation = Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        stop_reason=stop_reason,
        cached_tokens=cached_tokens,
        queue_s=queue_s,
        routed_experts=routed_experts,
        prefill_s=prefill_s,
        decode_s=decode_s,
    )
    return GeneratedPart(generation, continues)


def decode_top_logprobs(body: Any) -> dict[int, float]:
    """Return the most probable first tokens in an answer, with log-probabilities; empty for an empty answer."""
    with decoding("SGLang does not report the most probable tokens", body):
        rows = body["meta_info"].get("output_top_logprobs") or ()
        return {int(top[1]): float(top[0]) for row in rows[:1] for top in row}


def _decode_routed_experts(meta: Mapping[str, Any], prompt: int) -> RoutedExperts | None:
    """Decode base64 of int32, for `prompt` prompt tokens and all answer tokens except the last."""
    encoded = meta.get("routed_experts")
    if encoded is None:
        return None
    experts = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    tokens = prompt + int(meta["completion_tokens"]) - 1
    return small(experts.reshape(tokens, -1)) if tokens else None


def _decode_reason(
    reason: Mapping[str, Any], stop_token_ids: frozenset[int], stop: Sequence[str]
) -> tuple[StopReason, bool]:
    stop_reason = StopReason(reason["type"])
    if stop_reason is not StopReason.STOP:
        return stop_reason, False
    matched = reason["matched"]
    if matched in stop:
        return stop_reason, False
    if not isinstance(matched, int):
        raise EngineError(
            "SGLang stopped at neither a stop token nor a stop string of the request",
            got=repr(matched),
            expected=[*sorted(stop_token_ids), *stop],
        )
    return stop_reason, matched not in stop_token_ids


def _seconds(meta: Mapping[str, Any], begin: str, end: str) -> float:
    first, last = meta.get(begin), meta.get(end)
    return max(0.0, float(last) - float(first)) if first and last else 0.0


def decode_load(loads: Any, metrics: str, *, paused: bool) -> ServerLoad:
    """Return the load, summed over the server's replicas; `cache_used` is their maximum.

    Args:
        loads: JSON of ``/v1/loads``: the current load, which a paused server does not update.
        metrics: Text of ``/metrics``: counts since the start, and the load at the beginning of a pause.
        paused: True if the server is paused.
    """
    sums = sums_of(metrics)
    with decoding("SGLang does not report its load", loads):
        ranks = loads["loads"]
        running = sum(int(rank["num_running_reqs"]) for rank in ranks)
        waiting = sum(int(rank["num_waiting_reqs"]) for rank in ranks)
        cache_used = max(float(rank["token_usage"]) for rank in ranks)
        if paused:
            running, waiting = (int(sums[PREFIX + name]) for name in ("num_running_reqs", "num_queue_reqs"))
            cache_used = 0.0  # a pause removes all requests from the cache
    return ServerLoad(
        running=running,
        waiting=waiting,
        cache_used=cache_used,
        preemptions=_count(sums, "num_retracted_requests_total"),
        prompt_tokens=_count(sums, "prompt_tokens_total"),
        cached_tokens=_count(sums, "cached_tokens_total"),
        sampled_tokens=_count(sums, "generation_tokens_total"),
    )


def sums_of(metrics: str) -> dict[str, float]:
    """Return SGLang's metrics by name, each summed over its labels."""
    sums: dict[str, float] = {}
    for line in metrics.splitlines():
        if not line.startswith(PREFIX):
            continue
        name, value = line.partition("{")[0].partition(" ")[0], line.rpartition(" ")[2]
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError as error:
            raise EngineError("SGLang's metrics cannot be read", got=line[:300]) from error
    return sums


def _count(sums: dict[str, float], name: str) -> int:
    return int(sums.get(PREFIX + name, 0.0))  # a counter appears with its first event


def check_routes(url: str, openapi: Mapping[str, Any], version: str) -> None:
    """Raise `UsageError` if a server lacks a required route."""
    missing = [route for route in NEEDED_ROUTES if route not in openapi.get("paths", {})]
    if missing:
        raise UsageError(
            f"the SGLang server at {url} cannot be used: it has no {', '.join(missing)}",
            got=f"SGLang {version}",
            expected=f"a version with these routes, such as {TRIED_VERSION}",
        )


def check_settings(url: str, info: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise `UsageError` if a server's settings would change the meaning of requests, or it does not report its load.

    `info` is the JSON of ``/server_info``, and `model` that of ``/model_info``.
    """
    if not model.get("is_generation", True):
        raise UsageError(f"the SGLang server at {url} serves a model that does not generate text")
    if preferred := model.get("preferred_sampling_params"):
        hint = "start it without --preferred-sampling-params: they change sampling, but not the log-probabilities"
        raise UsageError(f"the SGLang server at {url} has its own sampling settings", got=preferred, hint=hint)
    if not info.get("enable_metrics"):
        raise UsageError(f"the SGLang server at {url} does not report its load", hint="start it with --enable-metrics")


def check_updates(url: str, openapi: Mapping[str, Any], info: Mapping[str, Any], config: ServerEngineConfig) -> None:
    """Raise `UsageError` if a server lacks the transport or the sleep that the config needs.

    On a CPU, every server can sleep. `openapi` and `info` are the JSON of ``/openapi.json`` and ``/server_info``.
    """
    missing = [route for route in TRANSPORT_ROUTES.get(config.transport, ()) if route not in openapi["paths"]]
    if missing:
        hint = "use another engine.transport"
        raise UsageError(f"the SGLang server at {url} has no {', '.join(missing)}", hint=hint)
    if config.sleep and info.get("device") != "cpu" and not info.get("enable_memory_saver"):
        hint = "start it with --enable-memory-saver, or remove engine.sleep"
        raise UsageError(f"the SGLang server at {url} cannot sleep", hint=hint)


def decode_context(info: Mapping[str, Any]) -> int:
    """Return the maximum tokens of prompt and answer together, from ``/server_info``; the prompt limit is one less."""
    limit = info.get("max_req_input_len")
    if not isinstance(limit, int):
        raise EngineError("SGLang does not report its prompt limit", got=limit, expected="max_req_input_len")
    return limit


def decode_vocabulary(message: str) -> int:
    """Return the vocabulary size in the error message for `VOCABULARY_PROBE`."""
    found = _VALID_KEYS.search(message)
    if found is None:
        raise EngineError("SGLang does not report its vocabulary size", got=repr(message))
    return int(found[1]) + 1


def encode_probe(temperature: float) -> dict[str, Any]:
    """Return the body of a request to ``/generate`` that samples the most probable token."""
    params = {"max_new_tokens": 1, "temperature": temperature, "min_p": 1.0}
    return {"input_ids": [0], "sampling_params": params, "return_logprob": True}


def check_answers(url: str, plain: Any, sharpened: Any, version: str) -> None:
    """Raise `UsageError` if SGLang is too old, or if its log-probabilities ignore the temperature.

    `plain` and `sharpened` answer the probe at temperature 1 and at a lower one, where the most probable token has a
    higher probability.
    """
    if not plain["meta_info"].get("weight_versions"):
        raise UsageError(
            f"the SGLang server at {url} cannot be used: it does not report the weight version of each token",
            got=f"SGLang {version}",
            expected=f"a version whose answers have weight_versions, such as {TRIED_VERSION}",
        )
    before, after = (float(answer["meta_info"]["output_token_logprobs"][0][0]) for answer in (plain, sharpened))
    if before < NEARLY_CERTAIN and after == before:
        hint = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
        raise UsageError(f"the SGLang server at {url} reports log-probabilities at temperature 1", hint=hint)
