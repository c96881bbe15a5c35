"""Server that answers at once, or after a real server has computed as many tokens for the same prompt.

Its answers are those of a policy that calls the tool once per turn, each time with the next number, and stops in the
last turn. It counts what it was asked for.

    python -m peers.instant SETTINGS.json
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from proxies.upstream import SETTINGS
from pydantic import BaseModel

from peers.work import FOUND


class Script(BaseModel):
    """Answers of the server."""

    calls: list[list[int]]
    """Token ids of the call for each cabinet."""
    found: list[int]
    """Token ids of the last answer."""
    end_id: int
    """Token that ends each message of a prompt."""
    first_messages: int
    """Number of messages before the first answer, in a prompt of token ids."""
    turns: int
    """Number of answers of an episode."""
    behind: str = ""
    """Address of a vLLM server that computes as many tokens before each answer."""


class InstantServer:
    """Server of vLLM's token-id route, of Chat Completions, and of the route that TRL's server has for batches."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._http: aiohttp.ClientSession | None = None
        self._next = self._turns = self._last = self._tokens = 0

    def application(self) -> web.Application:
        """Return the server's routes."""
        application = web.Application(client_max_size=1 << 28)
        application.router.add_post("/inference/v1/generate", self._generate)
        application.router.add_post("/v1/chat/completions", self._chat)
        application.router.add_post("/generate/", self._batch)
        application.router.add_post("/counts", self._counts)
        application.router.add_get("/metrics", _answer({}))
        for path, body in (
            ("/health", {}),
            ("/v1/models", {"data": [{"id": "policy", "max_model_len": 32_768}]}),
            ("/server_info", SETTINGS),
            ("/is_paused", {"is_paused": False}),
            ("/weight_info", {"weight_version": "0"}),
        ):
            application.router.add_get(path, _answer(body))
        return application

    async def _counts(self, request: web.Request) -> web.Response:
        """Return the counts since the last request of this kind; the next call is for the cabinet that this one names.

        Each side looks into each cabinet only once, because a text that occurs again costs some sides less.
        """
        counts = {"turns": self._turns, "last": self._last, "tokens": self._tokens}
        self._turns = self._last = self._tokens = 0
        self._next = int(request.query["cabinet"])
        return _json(counts)

    def _take(self, turn: int) -> int | None:
        """Return the cabinet of the next answer; ``None`` in the last turn."""
        self._turns += 1
        if turn >= self._script.turns - 1:
            self._last += 1
            self._tokens += len(self._script.found)
            return None
        cabinet = self._next
        self._next += 1
        self._tokens += len(self._script.calls[cabinet])
        return cabinet

    def _answer_ids(self, prompt: list[int]) -> list[int]:
        cabinet = self._take((prompt.count(self._script.end_id) - self._script.first_messages) // 2)
        return self._script.found if cabinet is None else self._script.calls[cabinet]

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        if body["sampling_params"]["max_tokens"] == 1:  # a test of the returned log-probabilities
            return _json({"choices": [_choice(self._script.found[:1], "length")], "usage": {}})
        ids = self._answer_ids(body["token_ids"])
        await self._compute({"token_ids": body["token_ids"]}, len(ids))
        return _json({"choices": [_choice(ids, "stop")], "usage": {}})

    async def _batch(self, request: web.Request) -> web.Response:
        prompts = orjson.loads(await request.read())["prompts"]
        answers = [self._answer_ids(prompt) for prompt in prompts]
        await asyncio.gather(
            *(self._compute({"token_ids": ids}, len(answer)) for ids, answer in zip(prompts, answers, strict=True))
        )
        return _json({"completion_ids": answers, "logprobs": [[[-1.0]] * len(answer) for answer in answers]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        cabinet = self._take(turn)
        message: dict[str, Any] = {"role": "assistant", "content": FOUND}
        ids = self._script.found
        if cabinet is not None:
            ids = self._script.calls[cabinet]
            function = {"name": "look", "arguments": f'{{"cabinet": {cabinet}}}'}
            call = {"id": f"call_{cabinet}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        await self._compute({"messages": body["messages"], "tools": body.get("tools")}, len(ids))
        choice = {"index": 0, "message": message, "finish_reason": "stop" if cabinet is None else "tool_calls"}
        usage = {"prompt_tokens": 1, "completion_tokens": len(ids), "total_tokens": 1 + len(ids)}
        head = {"id": f"chatcmpl-{self._turns}", "object": "chat.completion", "created": 1, "model": "policy"}
        return _json({**head, "choices": [choice], "usage": usage})

    async def _compute(self, prompt: Mapping[str, Any], tokens: int) -> None:
        """Let the server behind this one sample as many tokens for a prompt."""
        if not self._script.behind:
            return
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=None)
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        sampling = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
        if "token_ids" in prompt:
            route, body = "/inference/v1/generate", {**prompt, "sampling_params": {**sampling, "logprobs": 0}}
        else:
            # without parsing of calls, which a model with random weights does not write; tools stay in the prompt
            route, body = "/v1/chat/completions", {**prompt, **sampling, "tool_choice": "none", "model": "policy"}
        headers = {"Content-Type": "application/json"}
        async with self._http.post(self._script.behind + route, data=orjson.dumps(body), headers=headers) as answer:
            text = await answer.text()
            if not answer.ok:
                raise RuntimeError(f"{route} answers {answer.status}: {text[:500]}")


def _choice(ids: list[int], finish: str) -> dict[str, Any]:
    rows = [{"token": f"token_id:{token}", "logprob": -1.0, "bytes": [], "top_logprobs": []} for token in ids]
    versions = [{"version": "0", "start": 0, "end": len(ids)}]
    return {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": rows},
        "weight_versions": versions,
        "finish_reason": finish,
    }


def _json(body: Any) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")


def _answer(body: Any) -> Any:
    async def tell(_request: web.Request) -> web.Response:
        return _json(body)

    return tell


async def _serve(server: InstantServer) -> None:
    runner = web.AppRunner(server.application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(InstantServer(Script.model_validate_json(Path(sys.argv[1]).read_bytes()))))
