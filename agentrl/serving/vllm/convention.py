"""Which log-probabilities a vLLM server gives, and the requests for which they are those that agentrl promises."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from agentrl.errors import EngineError, UsageError
from agentrl.policy import SamplingParams

WORKER_EXTENSION = "agentrl_vllm_worker.UncutLogprobs"
"""Module of `agentrl.serving.vllm.worker` that launched servers import."""
PROCESSED = "processed_logprobs"


class LogprobConvention(enum.Enum):
    """Of which distribution a server's log-probabilities are."""

    RAW = "raw"
    """The model's own, whatever the temperature; what vLLM does by default."""
    CUT = "cut"
    """The one that is sampled from: at the request's temperature, after top-p, top-k and min-p."""
    UNCUT = "uncut"
    """At the request's temperature and before the cuts: what `agentrl.policy` promises."""


def convention_of(server_info: Any) -> LogprobConvention:
    """The convention in the answer of ``/server_info?config_format=json``.

    `LogprobConvention.UNCUT` is what the server was told to do; `is_uncut` finds out whether it does.

    Raises:
        EngineError: the answer does not tell.
        UsageError: the server gives logits.
    """
    try:
        config = server_info["vllm_config"]
        mode = config["model_config"]["logprobs_mode"]
        extension = config["parallel_config"]["worker_extension_cls"]
    except (KeyError, TypeError) as error:
        raise EngineError("vLLM does not tell its logprobs mode", got=repr(server_info)[:200]) from error
    if mode == PROCESSED:
        return LogprobConvention.UNCUT if extension == WORKER_EXTENSION else LogprobConvention.CUT
    if mode == "raw_logprobs":
        return LogprobConvention.RAW
    raise UsageError("vLLM gives no log-probabilities", got=f"--logprobs-mode {mode}", expected=PROCESSED)


CUT_TO_ONE: Mapping[str, Any] = {"temperature": 2.0, "top_k": 1, "max_tokens": 1, "logprobs": 0, "ignore_eos": True}
"""Sampling parameters that tell the conventions apart: after the cut the log-probability is 0; before it, hardly any
model is so sure of a token at vLLM's greatest temperature."""


def is_uncut(logprob: float) -> bool:
    """Whether the log-probability of a token that was sampled with `CUT_TO_ONE` is that before the cut."""
    return logprob < 0


def check_convention(params: SamplingParams, convention: LogprobConvention) -> None:
    """Refuse requests for which the server's log-probabilities are not ``log_softmax(logits / temperature)``.

    Raises:
        UsageError: says how to start a server that can serve them.
    """
    is_cut = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
    if params.temperature in (0, 1) and not (is_cut and convention is LogprobConvention.CUT and params.temperature):
        return
    if convention is LogprobConvention.UNCUT or (convention is LogprobConvention.CUT and not is_cut):
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
