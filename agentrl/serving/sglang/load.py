"""A server's load, from what ``/v1/loads`` and ``/metrics`` say; no I/O."""

from __future__ import annotations

from typing import Any

from agentrl.errors import EngineError
from agentrl.server import ServerLoad

PREFIX = "sglang:"


def decode_load(loads: Any, metrics: str, *, paused: bool) -> ServerLoad:
    """The load, summed over the server's replicas; of `cache_used` the greatest.

    SGLang counts prompt and sampled tokens when a request ends.

    Args:
        loads: The JSON of ``/v1/loads``: what runs now. A paused server does not bring it up to date.
        metrics: The text of ``/metrics``: what has been since the start, and what was held when the server was paused.
        paused: Whether the server is paused.

    Raises:
        EngineError: a figure is missing.
    """
    sums = sums_of(metrics)
    try:
        ranks = loads["loads"]
        running = sum(int(rank["num_running_reqs"]) for rank in ranks)
        waiting = sum(int(rank["num_waiting_reqs"]) for rank in ranks)
        cache_used = max(float(rank["token_usage"]) for rank in ranks)
        if paused:
            running, waiting = (int(sums[PREFIX + name]) for name in ("num_running_reqs", "num_queue_reqs"))
            cache_used = 0.0  # a pause throws all requests out of the cache
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError("SGLang does not tell its load", got=repr(loads)[:300]) from error
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
    """SGLang's figures by name, each summed over its labels.

    Raises:
        EngineError: the text is not one of metrics.
    """
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
