"""Agreement of the trainer and the local engine in bfloat16: the same tokens, scored by both.

agentrl bench agreement --folder benchmarks/gpu size=0.6B
"""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import numpy as np
import torch
from _gpu_setup import choose_size, conditions, random_model

from agentrl.algorithms.correction import mismatch
from agentrl.config.config import TrainerConfig
from agentrl.config.engines import LocalEngineConfig
from agentrl.engine import GenerateRequest, Generation, SamplingParams
from agentrl.serving.local import LocalEngine
from agentrl.training.forward.runner import make_runner
from agentrl.training.forward.sequences import ScoredSequence, scored_sequence


async def _sample(engine: LocalEngine, prompts: list[list[int]], tokens: int) -> list[Generation]:
    async def one(number: int, prompt: list[int]) -> Generation:
        params = SamplingParams(temperature=1.0, max_tokens=tokens)
        return await engine.generate(
            GenerateRequest(prompt_ids=prompt, params=params, session_id=str(number), request_id=str(number))
        )

    try:
        return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    finally:
        await engine.close()


def _scored(prompt: list[int], answer: Generation) -> ScoredSequence:
    ids = np.array(prompt + answer.token_ids)
    return scored_sequence(ids, np.arange(len(ids)) >= len(prompt))


def _compare(size: str, dtype: torch.dtype, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    model = random_model(size, dtype=dtype)
    settings = LocalEngineConfig(max_num_seqs=len(prompts), max_context=4096, cache_tokens=len(prompts) * 4096)
    answers = asyncio.run(_sample(LocalEngine(copy.deepcopy(model), settings), prompts, tokens))
    found = make_runner(model, TrainerConfig()).logprobs(
        [_scored(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)],
        temperature=1.0,
    )
    engine = torch.tensor([logp for answer in answers for logp in answer.logprobs])
    apart = mismatch(found.logp.cpu(), engine)
    return {
        "prob_abs_mean": apart.prob_abs_mean,
        "prob_abs_max": apart.prob_abs_max,
        "k3": apart.k3,
        "logp_abs_mean": float((found.logp.cpu() - engine).abs().mean()),
        "tokens": float(engine.numel()),
    }


def run(*, size: str | None = None, sessions: int = 16, prompt: int = 200, tokens: int = 200) -> dict[str, Any]:
    """Sample at temperature 1, and score the sampled tokens with the trainer's forward pass.

    Args:
        size: Size of the model.
        sessions: Sessions sampled together.
        prompt: Minimum tokens of a prompt; the maximum is twice as many.
        tokens: Tokens of each answer.
    """
    size = choose_size(size)
    generator, vocabulary = random.Random(0), random_model("tiny").config.vocab_size
    prompts = [generator.choices(range(vocabulary), k=generator.randint(prompt, 2 * prompt)) for _ in range(sessions)]
    return {
        **conditions(),
        "size": size,
        "bfloat16": _compare(size, torch.bfloat16, prompts, tokens),
        "float32": _compare(size, torch.float32, prompts, tokens),
    }
