"""A process that answers like vLLM's token-id route without a model, so that only the client's work is measured.

Answers are random tokens, and take `TOKEN_S` per token. If the request has stop tokens, the first one ends the answer.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web

from agentrl.serving.vllm.wire import WORKER_EXTENSION

TOKEN_S = 0.002
_COUNTS = ("num_requests_running", "num_requests_waiting", "num_preemptions_total", "prompt_tokens_total")
_METRICS = (*_COUNTS, "prompt_tokens_cached_total", "generation_tokens_total", "kv_cache_usage_perc")
_ANSWERS: dict[str, Any] = {
    "/health": {},
    "/is_paused": {"is_paused": False},
    "/server_info": {
        "vllm_config": {
            "model_config": {"logprobs_mode": "processed_logprobs"},
            "parallel_config": {"worker_extension_cls": WORKER_EXTENSION},
        }
    },
    "/v1/models": {"data": [{"id": "policy", "max_model_len": 8192}]},
    "/version": {"version": "stand-in"},
    "/weight_info": {"weight_version": "default"},
}


@asynccontextmanager
async def open_stand_in(vocab_size: int) -> AsyncIterator[str]:
    """Yield the address of a stand-in whose tokens are below `vocab_size`; it ends with the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(vocab_size), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def _serve(vocab_size: int) -> None:
    application = web.Application(client_max_size=1 << 26)
    for route, body in _ANSWERS.items():
        application.router.add_get(route, _answering(web.json_response, body))
    text = "\n".join(f'vllm:{name}{{engine="0"}} 0.0' for name in _METRICS)
    application.router.add_get("/metrics", _answering(lambda text: web.Response(text=text), text))
    application.router.add_post("/reset_prefix_cache", _answering(web.json_response, {}))
    application.router.add_post("/inference/v1/generate", lambda request: _generate(request, vocab_size))
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def _answering(respond: Any, body: Any) -> Any:
    async def answer(_: web.Request) -> web.Response:
        response: web.Response = respond(body)
        return response

    return answer


async def _generate(request: web.Request, vocab_size: int) -> web.Response:
    body = orjson.loads(await request.read())
    sampling = body["sampling_params"]
    stops = set(sampling.get("stop_token_ids", ()))
    ids = random.choices(range(vocab_size), k=sampling["max_tokens"])
    end = next((number for number, token in enumerate(ids, 1) if token in stops), None)
    ids = ids[:end]
    await asyncio.sleep(TOKEN_S * len(ids))
    rows = [{"token": f"token_id:{token}", "logprob": -1.2345678, "bytes": [], "top_logprobs": []} for token in ids]
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": rows},
        "finish_reason": "length" if end is None else "stop",
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
    }
    return web.Response(body=orjson.dumps({"choices": [choice]}), content_type="application/json")


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
