"""Meeting a server: wait until it answers, check that it can be used, learn its limits."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from agentrl.config.engines import ServerEngineConfig
from agentrl.policy import Capabilities
from agentrl.server import ServerLost
from agentrl.serving.http import HttpSession, Refused
from agentrl.serving.sglang.facts import (
    check_answers,
    check_routes,
    check_settings,
    check_updates,
    decode_context,
    decode_vocabulary,
    encode_probe,
    encode_vocabulary_probe,
)
from agentrl.serving.sglang.updates import BEGIN

ATTEMPT_S = 5.0
"""Deadline of one attempt to reach a server that may still be starting."""
ATTEMPT_EVERY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What a server can do."""

    capabilities: Capabilities
    has_sessions: bool
    """See `agentrl.serving.sglang.updates.WeightUpdates`."""
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
