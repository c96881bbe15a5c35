"""Throughput of the local engine on multi-turn sessions, compared with padded `transformers.generate` once per turn.

Both serve the same sessions greedily with the same model in the same process. `generate` takes all sessions in one
left-padded batch per turn and computes the whole history each time. The engine runs every session independently and
computes only the new tokens.

    agentrl bench engine
"""

from __future__ import annotations

import asyncio
import operator
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.models import tiny_model
from throughput.sessions import Session, Turn
from transformers import PreTrainedModel

from agentrl.config.engines import LocalEngineConfig
from agentrl.engine import GenerateRequest, PolicyEngine, SamplingParams
from agentrl.serving.local import LocalEngine


def make_sessions(*, sessions: int, turns: int, vocab_size: int, seed: int) -> list[Session]:
    """Make sessions with first prompts of 50 to 250 tokens, observations of 20 to 60 and answers of 6 to 14."""
    generator = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return generator.choices(range(vocab_size), k=generator.randint(low, high))

    return [
        [
            Turn(new_ids=ids(20, 60) if turn else ids(50, 250), answer_tokens=generator.randint(6, 14))
            for turn in range(turns)
        ]
        for _ in range(sessions)
    ]


async def serve(engine: PolicyEngine, sessions: list[Session], name: str = "s") -> list[list[int]]:
    """Play all sessions concurrently on an engine; return the final ids of each."""

    async def play(name: str, session: Session) -> list[int]:
        ids: list[int] = []
        for number, turn in enumerate(session):
            ids += turn.new_ids
            params = SamplingParams(temperature=0.0, max_tokens=turn.answer_tokens)
            request = GenerateRequest(
                prompt_ids=list(ids), params=params, session_id=name, request_id=f"{name}/{number}"
            )
            ids += (await engine.generate(request)).token_ids
        await engine.end_session(name)
        return ids

    try:
        return await asyncio.gather(*(play(f"{name}{i}", session) for i, session in enumerate(sessions)))
    finally:
        await engine.close()


def generate_padded(model: PreTrainedModel, sessions: list[Session]) -> list[list[int]]:
    """Play all sessions in lockstep with one padded `generate` per turn; return the final ids of each."""
    histories: list[list[int]] = [[] for _ in sessions]
    for number in range(len(sessions[0])):
        turns = [session[number] for session in sessions]
        for history, turn in zip(histories, turns, strict=True):
            history += turn.new_ids
        longest = max(map(len, histories))
        padding = [longest - len(history) for history in histories]
        output = model.generate(
            torch.tensor([[0] * pad + history for pad, history in zip(padding, histories, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
            max_new_tokens=max(turn.answer_tokens for turn in turns),
            do_sample=False,
            pad_token_id=0,
        )
        for history, turn, row in zip(histories, turns, output[:, longest:].tolist(), strict=True):
            history += row[: turn.answer_tokens]
    return histories


@dataclass(frozen=True, slots=True)
class Measurement:
    """Tokens and duration of one method of serving the sessions."""

    histories: list[list[int]]
    figures: dict[str, float]


def _measure(play: Callable[[], list[list[int]]], sampled_tokens: int) -> Measurement:
    start, start_cpu = time.perf_counter(), time.process_time()
    histories = play()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    figures = {"seconds": seconds, "cpu_seconds": cpu_seconds, "sampled_tokens_per_s": sampled_tokens / seconds}
    return Measurement(histories, figures)


def run(
    *, sessions: int = 64, turns: int = 12, max_num_seqs: int = 64, threads: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Measure both on the same workload; the model has 2 layers of width 128 and a vocabulary of 450, in float32.

    Returns:
        Plain JSON types: conditions, seconds and sampled tokens per second of each, their ratio, and the share of
        sessions in which both sampled the same tokens.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    model = tiny_model(vocab_size=450, hidden_size=128, max_context=4096, initializer_range=0.06)
    workload = make_sessions(sessions=sessions, turns=turns, vocab_size=450, seed=seed)
    config = LocalEngineConfig(max_num_seqs=max_num_seqs)
    warm_up = [session[:1] for session in workload[:4]]
    asyncio.run(serve(LocalEngine(model, config), warm_up))
    generate_padded(model, warm_up)

    sampled = sum(turn.answer_tokens for session in workload for turn in session)
    local = _measure(lambda: asyncio.run(serve(LocalEngine(model, config), workload)), sampled)
    padded = _measure(lambda: generate_padded(model, workload), sampled)
    return {
        "sessions": sessions,
        "turns": sessions * turns,
        "max_num_seqs": max_num_seqs,
        "threads": torch.get_num_threads(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "longest_session": max(map(len, local.histories)),
        "sampled_tokens": sampled,
        "local": local.figures,
        "generate": padded.figures,
        "ratio": padded.figures["seconds"] / local.figures["seconds"],
        "same_tokens": sum(map(operator.eq, local.histories, padded.histories)) / sessions,
    }
