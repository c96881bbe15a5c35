"""Finding out whether a vLLM server can work with agentrl, and what it promises."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config.engines import ServerEngineConfig
from agentrl.engine import ServerLost
from agentrl.errors import EngineError, UsageError
from agentrl.serving.http import HttpSession, Refused
from agentrl.serving.vllm.launch import RECEIVER
from agentrl.serving.vllm.wire import (
    ADAPTER,
    CUT_TO_ONE,
    LogprobConvention,
    convention_of,
    is_uncut,
)

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 1.0
OLDEST = "0.32"
"""Versions before it do not stamp tokens with the version of the weights."""
PROBE_IDS = [1, 2, 3]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAbilities:
    """What a server can do."""

    max_context: int
    convention: LogprobConvention
    has_adapter: bool
    """Whether it was sent one."""
    routes: bool
    """It was started to tell which experts tokens went to."""


async def wait_until_healthy(http: HttpSession, *, deadline_s: float) -> None:
    """Ask until the server answers.

    Raises:
        UsageError: something else answers.
        ServerLost: it does not within the deadline; says what happened last.
    """
    end, wait_s = time.monotonic() + deadline_s, FIRST_WAIT_S
    while True:
        try:
            await http.get_text("/health", deadline_s=max(end - time.monotonic(), FIRST_WAIT_S))
        except (ServerLost, Refused) as error:
            if isinstance(error, Refused) and not error.is_of_a_start:
                raise error.of_another_server("vLLM") from error
            if time.monotonic() + wait_s >= end:
                raise ServerLost(f"{http.url} did not become ready in {deadline_s:g} s", got=error) from error
        else:
            return
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


async def probe(http: HttpSession, config: ServerEngineConfig, *, deadline_s: float) -> ServerAbilities:
    """Check a server that answers.

    Args:
        http: Its session.
        config: How weights will reach it, and whether it will sleep.
        deadline_s: Most seconds of one question.

    Raises:
        UsageError: it is not vLLM, too old, paused, or was started without what agentrl needs.
    """
    try:
        models = await http.get("/v1/models", deadline_s=deadline_s)
        info = await http.get("/server_info?config_format=json", deadline_s=deadline_s)
        await _check_awake(http, deadline_s)
        logprob = await _logprob_after_a_cut(http, deadline_s)
    except Refused as refused:
        raise await _reason(http, refused, deadline_s) from refused
    convention = convention_of(info)
    _check_updates(http.url, info["vllm_config"], config)
    if convention is LogprobConvention.UNCUT and not is_uncut(logprob):
        convention = LogprobConvention.CUT
    try:
        names = [model["id"] for model in models["data"]]
        max_context = int(models["data"][0]["max_model_len"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"{http.url} does not tell its longest context", got=repr(models)[:200]) from error
    routes = bool((info["vllm_config"].get("aux_output_config") or {}).get("enable_return_routed_experts"))
    return ServerAbilities(max_context=max_context, convention=convention, has_adapter=ADAPTER in names, routes=routes)


async def _check_awake(http: HttpSession, deadline_s: float) -> None:
    """Refuse a server that somebody holds: it would answer nothing. vLLM does not tell one that sleeps from others."""
    if await http.get("/is_paused", deadline_s=deadline_s) == {"is_paused": True}:
        hint = (
            f"wait for who updates its weights, or let it go on: curl -X POST {http.url}/resume (start it again "
            "if a run with engine.sleep was killed: then it has no weights)"
        )
        raise UsageError(f"{http.url} is paused", hint=hint)


def _check_updates(url: str, told: Mapping[str, Any], config: ServerEngineConfig) -> None:
    """Refuse a server that lacks what the config asks of it; on a CPU vLLM takes a sleep for granted."""
    receiver = (told.get("weight_transfer_config") or {}).get("backend")
    if config.transport in ("collective", "cuda_ipc") and receiver != RECEIVER:
        hint = "start it with agentrl serve, or set another engine.transport"
        raise UsageError(
            f"{url} takes no weights by {config.transport}", got=f"receiver {receiver}", expected=RECEIVER, hint=hint
        )
    _check_adapters(url, told, config.adapter_rank)
    is_on_cpu = (told.get("device_config") or {}).get("device") == "cpu"
    if config.sleep and not is_on_cpu and not told["model_config"].get("enable_sleep_mode"):
        raise UsageError(f"{url} cannot sleep", hint="start it with --enable-sleep-mode, or remove engine.sleep")


def _check_adapters(url: str, told: Mapping[str, Any], rank: int | None) -> None:
    """Refuse a server that takes no adapters of a rank."""
    if rank is None:
        return
    most = (told.get("lora_config") or {}).get("max_lora_rank")
    if most is None or most < rank:
        raise UsageError(
            f"{url} takes no adapters of rank {rank}",
            got="no --enable-lora" if most is None else f"--max-lora-rank {most}",
            expected=f"--max-lora-rank {rank} or more",
            hint=f"start it with agentrl serve … engine.adapter_rank={rank}, or remove engine.adapter_rank",
        )


async def _logprob_after_a_cut(http: HttpSession, deadline_s: float) -> float:
    body = {"token_ids": PROBE_IDS, "sampling_params": CUT_TO_ONE}
    answer: Any = await http.post("/inference/v1/generate", body, deadline_s=deadline_s)
    try:
        choice = answer["choices"][0]
        if "weight_versions" not in choice:
            raise _too_old(await _version(http, deadline_s))
        return float(choice["logprobs"]["content"][0]["logprob"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"{http.url} does not answer like vLLM", got=repr(answer)[:300]) from error


async def _reason(http: HttpSession, refused: Refused, deadline_s: float) -> EngineError | UsageError:
    """Why a route is missing: the version, or a flag."""
    if refused.status == 403:
        hint = "start it with --enable-scale-out, or let agentrl launch it"
        return UsageError(f"{http.url} does not take token ids", got=refused.said, hint=hint)
    if refused.status != 404:
        return refused
    version = await _version(http, deadline_s)
    if _numbers(version) < _numbers(OLDEST):
        return _too_old(version)
    hint = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, reachable for this machine only"
    return UsageError(f"{http.url} lacks the routes for updates of weights", got=f"vLLM {version}", hint=hint)


async def _version(http: HttpSession, deadline_s: float) -> str:
    try:
        return str((await http.get("/version", deadline_s=deadline_s))["version"])
    except (Refused, KeyError, TypeError) as error:
        raise UsageError(f"{http.url} is not a vLLM server", got=f"no version at {http.url}/version") from error


def _too_old(version: str) -> UsageError:
    return UsageError("this vLLM is too old", got=version, expected=f"{OLDEST} or newer")


def _numbers(version: str) -> list[int]:
    parts = version.split("+")[0].split(".")[:2]
    return [int("".join(filter(str.isdigit, part)) or 0) for part in parts]
