"""A stand-in for an inference server that always gives the same answer, on vLLM's token-id route and on OpenAI's.

python upstream.py '{"ids": [1, 2], "text": "Hi", "delay_s": 0.0}'
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

SETTINGS = {
    "vllm_config": {
        "model_config": {"logprobs_mode": "processed_logprobs"},
        "parallel_config": {"worker_extension_cls": "agentrl_vllm_worker.PreTruncationLogprobs"},
    }
}
"""Settings that a server launched by agentrl reports."""


class Upstream:
    """Server that answers whole at once, or as a stream with `delay_s` per token; it counts its answers."""

    def __init__(self, ids: list[int], text: str, delay_s: float) -> None:
        self._ids, self._delay_s = ids, delay_s
        size = max(1, len(text) // len(ids))
        self._pieces = [text[start : start + size] for start in range(0, len(text), size)]
        self._text = text
        self._answers = 0

    def application(self) -> web.Application:
        """Return the server."""
        application = web.Application(client_max_size=1 << 26)
        application.router.add_post("/inference/v1/generate", self._generate)
        application.router.add_post("/v1/chat/completions", self._chat)
        application.router.add_get("/answers", self._count)
        for path, body in (
            ("/health", {}),
            ("/v1/models", {"data": [{"id": "policy", "max_model_len": 100_000}]}),
            ("/server_info", SETTINGS),
            ("/is_paused", {"is_paused": False}),
            ("/weight_info", {"weight_version": "0"}),
        ):
            application.router.add_get(path, _respond_with(body))
        return application

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["sampling_params"]["max_tokens"] == 1:  # a test of the returned log-probabilities
            return web.json_response({"choices": [_choice(self._ids[:1], "length")], "usage": {}})
        self._answers += 1
        if not body.get("stream"):
            return web.json_response({"choices": [_choice(self._ids, "stop")], "usage": {}})
        ends: list[str | None] = [*[None] * (len(self._ids) - 1), "stop"]
        choices = [_choice([token], end, len(self._ids)) for token, end in zip(self._ids, ends, strict=True)]
        return await self._stream(request, [{"choices": [choice]} for choice in choices])

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        head = {"id": "chatcmpl-1", "created": 1, "model": "policy"}
        self._answers += 1
        if not body.get("stream"):
            message = {"role": "assistant", "content": self._text}
            choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": self._ids}
            usage = {"prompt_tokens": 9, "completion_tokens": len(self._ids), "total_tokens": 9 + len(self._ids)}
            return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        rows = [{"index": 0, "delta": {"role": "assistant", "content": piece}} for piece in self._pieces]
        rows.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        return await self._stream(
            request, [{**head, "object": "chat.completion.chunk", "choices": [row]} for row in rows]
        )

    async def _count(self, _request: web.Request) -> web.Response:
        return web.json_response(self._answers)

    async def _stream(self, request: web.Request, events: list[dict[str, Any]]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for event in self._paced(events):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _paced(self, events: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        for event in events:
            await asyncio.sleep(self._delay_s)
            yield event


def _choice(ids: list[int], finish: str | None, answer: int | None = None) -> dict[str, Any]:
    rows = [{"logprob": -1.0} for _ in ids]
    versions = [{"version": "0", "start": 0, "end": answer or len(ids)}]
    return {"token_ids": ids, "logprobs": {"content": rows}, "weight_versions": versions, "finish_reason": finish}


def _respond_with(body: dict[str, Any]) -> Any:
    async def tell(_request: web.Request) -> web.Response:
        return web.json_response(body)

    return tell


async def _serve() -> None:
    runner = web.AppRunner(Upstream(**json.loads(sys.argv[1])).application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
