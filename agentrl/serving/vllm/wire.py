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
from agentrl.models.routed_experts import RoutedExperts, small
from agentrl.serving.http import decode_versions, decoding

ID_PREFIX = "generate-tokens-"
"""Prefix that vLLM adds to request ids. An abort must include it: unknown ids are ignored silently."""
ADAPTER = "policy-adapter"
"""Name of the policy's adapter at a server, used in place of the model's name."""
_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}
_NO_LOGPROB = -9999.0
"""Value that vLLM reports for a log-probability that is missing or not a number."""
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
"""Checksum of no bytes, reported for a tensor that vLLM keeps in a packed form elsewhere."""
WORKER_EXTENSION = "agentrl_vllm_worker.PreTruncationLogprobs"
"""Class in `agentrl.serving.vllm.worker` that launched servers load into their workers."""
PROCESSED = "processed_logprobs"
TOP_1_PROBE: Mapping[str, Any] = {"temperature": 2.0, "top_k": 1, "max_tokens": 1, "logprobs": 0, "ignore_eos": True}
"""Sampling parameters that distinguish the conventions: after truncation the log-probability is 0; before it, it is
below 0 for nearly every model at vLLM's maximum temperature."""


def encode_request(
    request: GenerateRequest, *, wire_id: str, max_context: int, adapter: str | None = None
) -> dict[str, Any]:
    """Return the body of a request to ``/inference/v1/generate``.

    `adapter` is the name at the server of the adapter that answers; by default the model answers without adapters.
    """
    params = request.params
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "max_tokens": min(params.max_tokens, max_context - len(request.prompt_ids)),
        "stop_token_ids": sorted(params.stop_token_ids),
        "ignore_eos": True,  # only the request's stop tokens apply, not the model folder's
        "logprobs": 0 if params.first_token is None else params.first_token.top_k,  # in addition to the sampled token's
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
    if request.images:
        body |= _encode_images(request)
    return body if adapter is None else body | {"model": adapter}


def _encode_images(request: GenerateRequest) -> dict[str, Any]:
    """Return the images and the prompt with one placeholder each, which vLLM repeats for the tokens of its image.

    Raises:
        EngineError: a placeholder does not belong to an image, because the policy sampled it.
    """
    ids = list(request.prompt_ids)
    placeholder = ids[request.images[0].start]
    for image in reversed(request.images):
        del ids[image.start + 1 : image.end]
    if ids.count(placeholder) != len(request.images):
        raise EngineError(
            f"vLLM cannot serve request {request.request_id}",
            got=f"{ids.count(placeholder)} placeholders of images, some of them sampled by the policy",
            expected=f"{len(request.images)}, one for each image",
        )
    parts = [{"type": "image_url", "url": image.image.data_url} for image in request.images]
    return {"token_ids": ids, "content_parts": parts, "return_token_ids": True}


def check_expansion(request: GenerateRequest, body: Any, url: str) -> None:
    """Check that vLLM's prompt, in which it repeated the placeholders, is the request's.

    Raises:
        UsageError: vLLM prepares an image differently, so that its log-probabilities belong to another prompt.
        EngineError: vLLM does not report its prompt.
    """
    with decoding(f"{url} does not report the places of images", body):
        places = [(int(place["offset"]), int(place["length"])) for place in body["mm_placeholders"]["image"]]
        ids = [int(token) for token in body["prompt_token_ids"]]
    wanted = [(image.start, image.tokens) for image in request.images]
    if places != wanted or ids != list(request.prompt_ids):
        raise UsageError(
            f"vLLM at {url} prepares images differently from the image processor of the model's folder",
            got=f"places and lengths {places}, {len(ids)} tokens in all",
            expected=f"{wanted}, {len(request.prompt_ids)} tokens in all",
            hint="start it with the same model folder, and without --mm-processor-kwargs",
        )


def reads_images(server_info: Any) -> bool:
    """Return True if the answer of ``/server_info?config_format=json`` describes a model that accepts images."""
    model = server_info["vllm_config"]["model_config"]
    section = model.get("multimodal_config")
    return section is not None and not section.get("language_model_only")


def adapter_name(adapter: str) -> str:
    """Return the name at the server of one of several adapters."""
    return f"{ADAPTER}-{adapter}"


def decode_adapters(models: Any) -> list[str]:
    """Return the names of the adapters in the answer of ``/v1/models``, in the order in which they were loaded."""
    with decoding("vLLM does not report its models", models):
        return [str(model["id"]) for model in models["data"] if model.get("parent")]


def encode_abort(wire_id: str) -> dict[str, Any]:
    """Return the body of a request to ``/inference/v1/abort_requests``."""
    return {"request_ids": [ID_PREFIX + wire_id]}


def encode_run(layout: TensorLayout, *, handle: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describe a run of bytes for `agentrl_vllm_receiver`: broadcast, or opened with a memory handle."""
    shapes = [list(shape) for shape in layout.shapes]
    return {"names": list(layout.names), "dtype": layout.dtype, "shapes": shapes, "handle": handle}


def decode_checksums(body: Any) -> dict[str, str]:
    """Return the checksums in the answer of ``/weight_checker``; empty if several workers share each tensor."""
    with decoding("vLLM does not report the checksums of its weights", body):
        found = {tuple(name.rsplit(":", 1)): checksum[:CHECKSUM_DIGITS] for name, checksum in body["checksums"].items()}
    if len({index for index, *_ in found}) != 1:
        return {}
    return {name[-1]: checksum for name, checksum in found.items() if checksum != _OF_NOTHING}


def decode_answer(
    body: Any, stop_token_ids: frozenset[int], stop: Sequence[str] = (), *, decode_s: float = 0.0
) -> Generation:
    """Decode the response to a request with these stop tokens and texts, which took `decode_s` seconds."""
    with decoding("vLLM's answer is not a generation", body):
        choice = body["choices"][0]
        token_ids = list(choice["token_ids"])
        rows = choice["logprobs"]["content"] if token_ids else []
        logprobs = [float(row["logprob"]) for row in rows]
        versions = decode_versions(choice.get("weight_versions") or (), len(token_ids))
        stop_reason = _STOP_REASONS[choice["finish_reason"]]
        routed_experts = _decode_routed_experts(choice.get("routed_experts"))
        details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
        cached_tokens = int(details.get("cached_tokens") or 0)
        matched = choice.get("stop_reason")
        is_stopped = stop_reason is not StopReason.STOP or token_ids[-1] in stop_token_ids or matched in stop
    if len(logprobs) != len(token_ids) or min(logprobs, default=0.0) <= _NO_LOGPROB:
        raise EngineError("vLLM omitted log-probabilities", got=logprobs, expected=f"{len(token_ids)} numbers")
    if not is_stopped:
        raise EngineError(
            "vLLM stopped at neither a stop token nor a stop string of the request",
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


def decode_top_logprobs(body: Any) -> dict[int, float]:
    """Return the most probable first tokens in an answer, with log-probabilities; empty for an empty answer."""
    with decoding("vLLM does not report the most probable tokens", body):
        rows = (body["choices"][0]["logprobs"] or {}).get("content") or ()
        return {int(top["token_id"]): float(top["logprob"]) for row in rows[:1] for top in row["top_logprobs"]}


def join_events(events: Sequence[Any]) -> dict[str, Any]:
    """Merge the events of a streamed response into one body; all but the tokens comes from the last events."""
    with decoding("vLLM's events are not a generation", events[-1:]):
        choices = [choice for event in events for choice in event["choices"]]
        rows = [row for choice in choices if choice["token_ids"] for row in choice["logprobs"]["content"]]
        whole = {
            **choices[-1],
            "token_ids": [token for choice in choices for token in choice["token_ids"] or ()],
            "logprobs": {"content": rows},
        }
        prompts = (event for event in events if event.get("prompt_token_ids") is not None)
        expansion = {name: event[name] for event in prompts for name in ("prompt_token_ids", "mm_placeholders")}
        return {"choices": [whole], "usage": events[-1].get("usage"), **expansion}


def _decode_routed_experts(encoded: str | None) -> RoutedExperts | None:
    """Decode base64 of an ``.npy`` file, [tokens, layers, experts per token]."""
    if encoded is None:
        return None
    experts = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    return small(experts.reshape(len(experts), -1))


def decode_load(text: str) -> ServerLoad:
    """Return a server's load from the text of ``/metrics``: sums over its engines; maximum for the cache use."""
    figures: dict[str, list[float]] = {name: [] for name in (*_COUNTS.values(), _CACHE_USED)}
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        if name in figures:
            figures[name].append(float(rest.rpartition(" ")[2]))
    if missing := [name for name, values in figures.items() if not values]:
        raise EngineError("vLLM's metrics are incomplete", got=f"no {', '.join(missing)}")
    counts = {field: int(sum(figures[name])) for field, name in _COUNTS.items()}
    return ServerLoad(cache_used=max(figures[_CACHE_USED]), **counts)


class LogprobConvention(enum.Enum):
    """Distribution whose log-probabilities a server reports."""

    RAW = "raw"
    """Temperature 1, whatever the request's temperature; vLLM's default."""
    POST_TRUNCATION = "post_truncation"
    """Distribution that is sampled from: the request's temperature, after top-p, top-k and min-p."""
    PRE_TRUNCATION = "pre_truncation"
    """The request's temperature, before truncation: the convention of `agentrl.engine`."""


def convention_of(server_info: Any) -> LogprobConvention:
    """Return the convention in the answer of ``/server_info?config_format=json``.

    The result `LogprobConvention.PRE_TRUNCATION` is only a setting; `is_pre_truncation` checks that it is in effect.

    Raises:
        UsageError: the server reports logits.
    """
    with decoding("vLLM does not report its logprobs mode", server_info):
        config = server_info["vllm_config"]
        mode = config["model_config"]["logprobs_mode"]
        extension = config["parallel_config"]["worker_extension_cls"]
    if mode == PROCESSED:
        is_extended = extension == WORKER_EXTENSION
        return LogprobConvention.PRE_TRUNCATION if is_extended else LogprobConvention.POST_TRUNCATION
    if mode == "raw_logprobs":
        return LogprobConvention.RAW
    raise UsageError("vLLM does not report log-probabilities", got=f"--logprobs-mode {mode}", expected=PROCESSED)


def is_pre_truncation(logprob: float) -> bool:
    """Return True if the log-probability of a token sampled with `TOP_1_PROBE` is that before truncation."""
    return logprob < 0


def check_convention(params: SamplingParams, convention: LogprobConvention) -> None:
    """Reject requests for which the server's log-probabilities are not ``log_softmax(logits / temperature)``.

    Raises:
        UsageError: the request cannot be served; the hint says how to start a server that can serve it.
    """
    truncates = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
    is_post = convention is LogprobConvention.POST_TRUNCATION
    if params.temperature in (0, 1) and not (truncates and is_post and params.temperature):
        return
    if convention is LogprobConvention.PRE_TRUNCATION or (is_post and not truncates):
        return
    sampling = f"temperature {params.temperature}, top_p {params.top_p}, top_k {params.top_k}, min_p {params.min_p}"
    if convention is LogprobConvention.RAW:
        raise UsageError(
            "this vLLM server reports log-probabilities at temperature 1",
            got=sampling,
            expected="temperature 1 or 0",
            hint=f"start it with --logprobs-mode {PROCESSED}, or let agentrl launch it",
        )
    raise UsageError(
        "this vLLM server reports log-probabilities after truncation",
        got=sampling,
        expected="no top_p, top_k and min_p",
        hint="let agentrl launch the server (engine.servers: launch), or start it with --logprobs-mode raw_logprobs "
        "and sample at temperature 1",
    )
