"""Adaptive concurrency compared with a fixed limit, on a server whose key-value cache is too small for its requests.

agentrl bench concurrency --engine sglang
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from support.models import tiny_model
from support.tokenizers import build_tokenizer
from throughput.bare_client import WIRES, forget
from throughput.server import open_server, server_version

from agentrl.builders.servers import ServedModel, open_pool
from agentrl.config.engines import ServerEngineConfig, SGLangEngineConfig, VLLMEngineConfig
from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.errors import UnknownNameError
from agentrl.serving.pool import ServerPool
from agentrl.serving.pool.member import AdaptiveConcurrency
from agentrl.weights import write_served_model

CACHE_TOKENS = 16_384
VLLM_BLOCK = 128
"""Tokens per block of vLLM's cache on a CPU."""
MAX_CONTEXT = 1024
PROMPT_TOKENS = 100
ANSWER_TOKENS = (300, 600)
LOOK_EVERY_S = 0.2
MAX_S = 1800.0
"""Deadline of a measurement."""


def run(*, engine: str = "vllm", requests: int = 128, at_once: int = 64, rounds: int = 2) -> dict[str, Any]:
    """Return sampled tokens per second, preemptions and limits, for adaptive and fixed limits in alternation.

    Args:
        engine: ``vllm`` or ``sglang``.
        requests: Requests per measurement, all sent at the start.
        at_once: Initial limit, and maximum number of concurrent requests of the server.
        rounds: Measurements of each limit.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        return asyncio.run(_measure(_section(engine, at_once), Path(folder), requests, rounds))


def _section(engine: str, at_once: int) -> VLLMEngineConfig | SGLangEngineConfig:
    if engine == "vllm":
        small = ["--num-gpu-blocks-override", str(CACHE_TOKENS // VLLM_BLOCK)]
        return VLLMEngineConfig(max_num_seqs=at_once, max_context=MAX_CONTEXT, arguments=small)
    if engine == "sglang":
        small = ["--max-total-tokens", str(CACHE_TOKENS)]
        return SGLangEngineConfig(max_num_seqs=at_once, max_context=MAX_CONTEXT, arguments=small)
    raise UnknownNameError("this engine has no servers", got=engine, expected="vllm or sglang")


async def _measure(
    section: VLLMEngineConfig | SGLangEngineConfig, folder: Path, requests: int, rounds: int
) -> dict[str, Any]:
    tokenizer = build_tokenizer("qwen3")
    model = tiny_model(vocab_size=len(tokenizer), hidden_size=64, heads=2, kv_heads=1, max_context=MAX_CONTEXT)
    write_served_model(model, tokenizer, folder / "model")
    served = ServedModel(path=str(folder / "model"), dtype="float32", vocab_size=len(tokenizer))
    found: dict[str, list[dict[str, float]]] = {"adaptive": [], "fixed": []}
    async with open_server(section, served, folder) as url:
        attached = type(section)(servers=[url], max_num_seqs=section.max_num_seqs)
        for _ in range(rounds):
            for name, runs in found.items():
                await forget(url, WIRES[section.type])
                async with _pool(attached, served, folder, fixed=name == "fixed") as pool:
                    runs.append(await _play(pool, requests, served.vocab_size))
        engine = await server_version(url, section.type)
    medians = {
        name: {figure: median(run[figure] for run in runs) for figure in runs[0]} for name, runs in found.items()
    }
    return {
        **medians,
        "ratio": medians["adaptive"]["tokens_per_s"] / medians["fixed"]["tokens_per_s"],
        "engine": engine,
        "cores": len(os.sched_getaffinity(0)),
        "cache_tokens": CACHE_TOKENS,
        "requests": requests,
        "at_once": section.max_num_seqs,
        "rounds": rounds,
    }


@asynccontextmanager
async def _pool(
    section: ServerEngineConfig, served: ServedModel, folder: Path, *, fixed: bool
) -> AsyncIterator[ServerPool]:
    async with open_pool(section, served, folder) as pool:
        (member,) = pool.group.members
        if fixed:
            most = section.max_num_seqs
            member.concurrency = AdaptiveConcurrency(limit=most, least=most, most=most)
        yield pool


async def _play(pool: ServerPool, requests: int, vocab_size: int) -> dict[str, float]:
    generator = random.Random(0)
    (member,) = pool.group.members
    limits = [member.limit]

    async def look() -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            limits.append(member.limit)

    def request(number: int) -> GenerateRequest:
        return GenerateRequest(
            prompt_ids=generator.choices(range(vocab_size), k=PROMPT_TOKENS),
            params=SamplingParams(max_tokens=generator.randint(*ANSWER_TOKENS)),
            session_id=str(number),
            request_id=str(number),
        )

    before, watch, began = await member.server.load(), asyncio.create_task(look()), time.perf_counter()
    try:
        async with asyncio.timeout(MAX_S):
            answers = await asyncio.gather(*(pool.generate(request(number)) for number in range(requests)))
        seconds = time.perf_counter() - began
    finally:
        watch.cancel()
    after = await member.server.load()
    return {
        "tokens_per_s": sum(len(answer.token_ids) for answer in answers) / seconds,
        "preemptions": after.preemptions - before.preemptions,
        "least_limit": min(limits),
        "median_limit": median(limits),
    }
