"""Meeting a server: wait until it answers, check that it can be used, learn its limits."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from agentrl.policy import Capabilities
from agentrl.server import ServerLost
from agentrl.serving.http import HttpSession, Refused
from agentrl.serving.sglang.facts import (
    check_routes,
    check_settings,
    check_spans,
    decode_context,
    decode_vocabulary,
    encode_sample_probe,
    encode_vocabulary_probe,
)

CONTROL_S = 60.0
"""Deadline of what a server does at once: pausing, going on, aborting, telling its load."""
ATTEMPT_S = 5.0
"""Deadline of one attempt to reach a server that may still be starting."""
ATTEMPT_EVERY_S = 0.2
SERVICE_UNAVAILABLE = 503


async def shake_hands(http: HttpSession, *, deadline_s: float, answer_s: float) -> Capabilities:
    """Wait for a server and check it; one that was left paused goes on.

    Args:
        http: Its session.
        deadline_s: Most seconds of all this.
        answer_s: Deadline of one answer of ``/generate``.

    Raises:
        UsageError: it cannot be used.
        ServerLost: it does not answer within the deadline.
    """
    until = time.monotonic() + deadline_s
    model = await _wait_for_model(http, until)
    try:
        async with asyncio.timeout(until - time.monotonic()):
            return await _learn(http, model, answer_s)
    except TimeoutError as error:
        raise ServerLost(f"{http.url} is not ready", got=f"no answer in {deadline_s:g} s") from error


async def _wait_for_model(http: HttpSession, until: float) -> Any:
    while True:
        left = until - time.monotonic()
        try:
            return await http.get("/model_info", deadline_s=max(0.001, min(left, ATTEMPT_S)))
        except (ServerLost, Refused) as error:
            is_starting = isinstance(error, ServerLost) or error.status == SERVICE_UNAVAILABLE
            if not is_starting or left <= ATTEMPT_EVERY_S:
                raise
        await asyncio.sleep(ATTEMPT_EVERY_S)


async def _learn(http: HttpSession, model: Any, answer_s: float) -> Capabilities:
    info = await http.get("/server_info", deadline_s=CONTROL_S)
    version = str(info.get("version"))
    check_routes(http.url, await http.get("/openapi.json", deadline_s=CONTROL_S), version)
    check_settings(http.url, info, model)
    await http.post("/continue_generation", {}, deadline_s=CONTROL_S)
    check_spans(http.url, await http.post("/generate", encode_sample_probe(), deadline_s=answer_s), version)
    try:
        told = str(await http.post("/generate", encode_vocabulary_probe(), deadline_s=answer_s))
    except Refused as refused:
        told = refused.said
    return Capabilities(max_context=decode_context(info), vocab_size=decode_vocabulary(told))
