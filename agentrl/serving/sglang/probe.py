"""Meeting a server: wait until it answers, check that it can be used, learn its limits.

- What a server says about itself, and whether it can be used; no I/O.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config.engines import ServerEngineConfig
from agentrl.engine import Capabilities, ServerLost
from agentrl.errors import EngineError, UsageError
from agentrl.serving.http import HttpSession, Refused
from agentrl.serving.sglang.updates import BEGIN

TRIED_VERSION = "0.5.23"
"""The version that all promises were checked on."""
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
TRANSPORT_ROUTES = {
    "collective": ("/init_weights_update_group", "/update_weights_from_distributed"),
    "tensor": ("/update_weights_from_tensor",),
}
"""More routes that a transport needs."""
NEARLY_CERTAIN = -1e-3
"""Log-probability above which a temperature need not show."""
_VALID_KEYS = re.compile(r"logit_bias must has keys in \[0, (\d+)\]")
_NO_ID = 2**31 - 1


def check_routes(url: str, openapi: Mapping[str, Any], version: str) -> None:
    """Refuse a server that lacks a route.

    Raises:
        UsageError: names what is missing.
    """
    missing = [route for route in NEEDED_ROUTES if route not in openapi.get("paths", {})]
    if missing:
        raise UsageError(
            f"the SGLang server at {url} cannot be used: it has no {', '.join(missing)}",
            got=f"SGLang {version}",
            expected=f"a version with these routes, such as {TRIED_VERSION}",
        )


def check_settings(url: str, info: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Refuse a server that was started with settings under which our requests mean something else.

    Args:
        url: Its address.
        info: The JSON of ``/server_info``.
        model: The JSON of ``/model_info``.

    Raises:
        UsageError: says which setting, and what it has to be.
    """
    if not model.get("is_generation", True):
        raise UsageError(f"the SGLang server at {url} serves a model that does not generate text")
    if preferred := model.get("preferred_sampling_params"):
        hint = "start it without --preferred-sampling-params: they change what is sampled, not its log-probability"
        raise UsageError(f"the SGLang server at {url} has sampling settings of its own", got=preferred, hint=hint)
    if not info.get("enable_metrics"):
        raise UsageError(f"the SGLang server at {url} does not tell its load", hint="start it with --enable-metrics")


def check_updates(url: str, openapi: Mapping[str, Any], info: Mapping[str, Any], config: ServerEngineConfig) -> None:
    """Refuse a server that lacks what the config asks of it; on a CPU SGLang takes a sleep for granted.

    Args:
        url: Its address.
        openapi: The JSON of ``/openapi.json``.
        info: The JSON of ``/server_info``.
        config: How weights will reach it, and whether it will sleep.

    Raises:
        UsageError: says which setting.
    """
    missing = [route for route in TRANSPORT_ROUTES.get(config.transport, ()) if route not in openapi["paths"]]
    if missing:
        hint = "set another engine.transport"
        raise UsageError(f"the SGLang server at {url} has no {', '.join(missing)}", hint=hint)
    if config.sleep and info.get("device") != "cpu" and not info.get("enable_memory_saver"):
        hint = "start it with --enable-memory-saver, or remove engine.sleep"
        raise UsageError(f"the SGLang server at {url} cannot sleep", hint=hint)


def decode_context(info: Mapping[str, Any]) -> int:
    """Most tokens of prompt and answer together: SGLang takes prompts of up to one less, from ``/server_info``.

    Raises:
        EngineError: it does not say.
    """
    limit = info.get("max_req_input_len")
    if not isinstance(limit, int):
        raise EngineError("SGLang does not tell how long a prompt may be", got=limit, expected="max_req_input_len")
    return limit


def encode_vocabulary_probe() -> dict[str, Any]:
    """The body of a request to ``/generate`` that is refused in words that tell the size of the vocabulary."""
    params = {"max_new_tokens": 1, "logit_bias": {str(_NO_ID): 0.0}}
    return {"input_ids": [0], "sampling_params": params}


def decode_vocabulary(said: str) -> int:
    """The size of the vocabulary, from the refusal.

    Raises:
        EngineError: it is not in the words.
    """
    found = _VALID_KEYS.search(said)
    if found is None:
        raise EngineError("SGLang does not tell the size of its vocabulary", got=repr(said))
    return int(found[1]) + 1


def encode_probe(temperature: float) -> dict[str, Any]:
    """The body of a request to ``/generate`` for the most probable token."""
    params = {"max_new_tokens": 1, "temperature": temperature, "min_p": 1.0}
    return {"input_ids": [0], "sampling_params": params, "return_logprob": True}


def check_answers(url: str, plain: Any, sharpened: Any, version: str) -> None:
    """Refuse a server whose answers do not tell what we need.

    Args:
        url: Its address.
        plain: The answer to the probe at temperature 1.
        sharpened: That at a temperature below, at which the most probable token is more probable.
        version: Version of SGLang.

    Raises:
        UsageError: the version is too old, or a setting makes its log-probabilities something else.
    """
    if not plain["meta_info"].get("weight_versions"):
        raise UsageError(
            f"the SGLang server at {url} cannot be used: it does not tell which weights sampled a token",
            got=f"SGLang {version}",
            expected=f"a version whose answers have weight_versions, such as {TRIED_VERSION}",
        )
    before, after = (float(answer["meta_info"]["output_token_logprobs"][0][0]) for answer in (plain, sharpened))
    if before < NEARLY_CERTAIN and after == before:
        hint = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
        raise UsageError(f"the SGLang server at {url} gives log-probabilities of temperature 1", hint=hint)


ATTEMPT_S = 5.0
"""Deadline of one attempt to reach a server that may still be starting."""
ATTEMPT_EVERY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What a server can do."""

    capabilities: Capabilities
    has_sessions: bool
    """See `agentrl.serving.sglang.updates.SGLangUpdates`."""
    workers: int
    """Processes that hold weights."""


async def shake_hands(http: HttpSession, config: ServerEngineConfig, *, deadline_s: float) -> Met:
    """Wait for a server and check it; one that was left paused goes on.

    Args:
        http: Its session.
        config: How weights will reach it, and whether it will sleep.
        deadline_s: Most seconds of all this.

    Raises:
        UsageError: it cannot be used.
        ServerLost: it does not answer within the deadline.
    """
    until = time.monotonic() + deadline_s
    model = await _wait_for_model(http, until)
    return await _learn(http, config, model, max(ATTEMPT_S, until - time.monotonic()))


async def _wait_for_model(http: HttpSession, until: float) -> Any:
    while True:
        left = until - time.monotonic()
        try:
            return await http.get("/model_info", deadline_s=max(0.001, min(left, ATTEMPT_S)))
        except (ServerLost, Refused) as error:
            if isinstance(error, Refused) and not error.is_of_a_start:
                raise error.of_another_server("SGLang") from error
            if left <= ATTEMPT_EVERY_S:
                raise
        await asyncio.sleep(ATTEMPT_EVERY_S)


async def _learn(http: HttpSession, config: ServerEngineConfig, model: Any, limit_s: float) -> Met:
    info = await http.get("/server_info", deadline_s=limit_s)
    version = str(info.get("version"))
    openapi = await http.get("/openapi.json", deadline_s=limit_s)
    check_routes(http.url, openapi, version)
    check_settings(http.url, info, model)
    check_updates(http.url, openapi, info, config)
    await http.post("/continue_generation", {}, deadline_s=limit_s)
    plain = await http.post("/generate", encode_probe(1.0), deadline_s=limit_s)
    sharpened = await http.post("/generate", encode_probe(0.5), deadline_s=limit_s)
    check_answers(http.url, plain, sharpened, version)
    try:
        told = str(await http.post("/generate", encode_vocabulary_probe(), deadline_s=limit_s))
    except Refused as refused:
        told = refused.said
    return Met(
        capabilities=Capabilities(
            max_context=decode_context(info),
            vocab_size=decode_vocabulary(told),
            routes=bool(info.get("enable_return_routed_experts")),
        ),
        has_sessions=BEGIN in openapi["paths"],
        workers=int(info.get("tp_size") or 1),
    )
