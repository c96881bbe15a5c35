"""Sampled tokens per second of the local engine with continuous batching, by number of sessions.

agentrl bench local_engine --folder benchmarks/gpu size=0.6B
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import torch
from _gpu_setup import choose_size, conditions, random_model, seconds_of

from agentrl.config.engines import LocalEngineConfig
from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.serving.local import LocalEngine


async def _play(engine: LocalEngine, prompts: list[list[int]], turns: int, answer: int, observation: int) -> None:
    async def session(number: int, ids: list[int]) -> None:
        generator = random.Random(number)
        for turn in range(turns):
            params = SamplingParams(temperature=1.0, max_tokens=answer)
            request = GenerateRequest(
                prompt_ids=list(ids), params=params, session_id=str(number), request_id=f"{number}/{turn}"
            )
            ids += (await engine.generate(request)).token_ids
            ids += generator.choices(range(100), k=observation)
        await engine.end_session(str(number))

    try:
        await asyncio.gather(*(session(number, list(prompt)) for number, prompt in enumerate(prompts)))
    finally:
        await engine.close()


def run(
    *,
    size: str | None = None,
    sessions: tuple[int, ...] = (1, 16, 64),
    turns: int = 4,
    prompt: int = 256,
    answer: int = 64,
    observation: int = 32,
) -> dict[str, Any]:
    """Play sessions of several turns, all concurrently, in bfloat16.

    Args:
        size: Size of the model.
        sessions: Numbers of sessions to measure.
        turns: Turns of each session.
        prompt: Tokens of the first prompt.
        answer: Sampled tokens of each turn.
        observation: Tokens between two answers.
    """
    size = choose_size(size)
    model = random_model(size, dtype=torch.bfloat16)
    length = prompt + turns * (answer + observation)
    found: dict[str, Any] = {**conditions(), "size": size, "tokens_per_session": length}
    for count in sessions:
        settings = LocalEngineConfig(max_num_seqs=count, max_context=length, cache_tokens=count * length)
        prompts = [random.Random(-number - 1).choices(range(100), k=prompt) for number in range(count)]
        engine = LocalEngine(model, settings)
        taken = seconds_of(lambda e=engine, p=prompts: asyncio.run(_play(e, p, turns, answer, observation)))  # type: ignore[misc]
        found[f"{count}_sessions"] = {"sampled_tokens_per_s": count * turns * answer / taken, "seconds": taken}
    return found
