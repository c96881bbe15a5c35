"""A client that only sends requests: each prompt is the previous prompt, the answer, and the session's next tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from throughput.sessions import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Routes and message formats of a kind of server."""

    generate: str
    forget: str
    """Route that empties the prefix cache."""
    encode: Callable[[Sequence[int], int], dict[str, Any]]
    """Function that makes a request for a number of tokens after a prompt, at temperature 1 with log-probabilities."""
    decode: Callable[[Any], list[int]]
    """Function that returns the tokens of a response."""


def _encode_vllm(ids: Sequence[int], tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    return {"token_ids": ids, "sampling_params": sampling}


def _encode_sglang(ids: Sequence[int], tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": ids, "return_logprob": True, "sampling_params": sampling}


WIRES = {
    "vllm": Wire(
        generate="/inference/v1/generate",
        forget="/reset_prefix_cache",
        encode=_encode_vllm,
        decode=lambda answer: answer["choices"][0]["token_ids"],
    ),
    "sglang": Wire(
        generate="/generate",
        forget="/flush_cache",
        encode=_encode_sglang,
        decode=lambda answer: answer["output_ids"],
    ),
}


async def forget(url: str, wire: Wire) -> None:
    """Empty the server's prefix cache."""
    async with aiohttp.ClientSession() as http, http.post(url + wire.forget) as answer:
        answer.raise_for_status()


async def play(url: str, wire: Wire, sessions: Iterable[Session], *, concurrency: int) -> int:
    """Play all sessions, at most `concurrency` at a time; return the number of received tokens."""
    remaining = iter(sessions)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:

        async def ask(ids: list[int], tokens: int) -> list[int]:
            body = orjson.dumps(wire.encode(ids, tokens))
            headers = {"Content-Type": "application/json"}
            async with http.post(url + wire.generate, data=body, headers=headers) as answer:
                answer.raise_for_status()
                return wire.decode(orjson.loads(await answer.read()))

        async def play_some() -> int:
            sampled = 0
            for session in remaining:
                ids: list[int] = []
                for turn in session:
                    ids += turn.new_ids
                    answer = await ask(ids, turn.answer_tokens)
                    ids += answer
                    sampled += len(answer)
            return sampled

        return sum(await asyncio.gather(*(play_some() for _ in range(concurrency))))
