"""Speed of engines on multi-turn sessions and of training steps with a pretrained language model on a CPU.

Engines: the local engine, vLLM's CPU build with each of `bindings` (VLLM_CPU_OMP_THREADS_BIND; "" as agentrl launches
it), and padded `transformers.generate`, on three loads: long prompts with one answer token, short prompts with long
answers, and sessions of several turns. Trainer: a GRPO step of agentrl's trainer, compared with only forward and
backward of transformers on the same sequences one by one, each in a separate process. Both are measured in the number
formats that this processor supports natively, with the speed of its matrix products. The machine should be idle.

    agentrl bench real_model --json real_model.json
    agentrl bench real_model --versus trl 'parts=["trainer"]'
    agentrl bench real_model 'parts=["engines"]' 'sessions=[16]' 'bindings=["", "auto"]'
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine import generate_padded, make_sessions, serve
from throughput.sessions import Session, Turn
from throughput.trainer_steps import Dtype, StepKind, load_unmodified, measure_alone

from agentrl.config.engines import LocalEngineConfig, VLLMEngineConfig
from agentrl.config.number_format import fastest_format
from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.errors import UsageError
from agentrl.models.load import embedding_rows, load_model
from agentrl.observe.console import note
from agentrl.observe.model_folder import find_model
from agentrl.render.tokenizers import load_tokenizer
from agentrl.serving.launch import ServerProcess, engine_python
from agentrl.serving.launch.resources import reserve_port
from agentrl.serving.local import LocalEngine
from agentrl.serving.vllm import VLLMServer, launch_command
from agentrl.testing import ServerEngine
from agentrl.weights import write_served_model

CONTEXT = 2048
START_S = 300.0


def loads(sessions: int, vocabulary: int, seed: int) -> dict[str, list[Session]]:
    """Make the sessions of the three loads."""
    generator = random.Random(seed)

    def one(prompt: int, answer: int) -> Session:
        return [Turn(new_ids=generator.choices(range(vocabulary), k=prompt), answer_tokens=answer)]

    return {
        "prefill": [one(300, 1) for _ in range(sessions)],
        "decode": [one(32, 64) for _ in range(sessions)],
        "turns": make_sessions(sessions=sessions, turns=5, vocab_size=vocabulary, seed=seed),
    }


def _tokens(sessions: list[Session]) -> int:
    return sum(len(turn.new_ids) + turn.answer_tokens for session in sessions for turn in session)


def _seconds(play: Callable[[], object]) -> float:
    start = time.perf_counter()
    play()
    return time.perf_counter() - start


@contextmanager
def _vllm(folder: Path, dtype: Dtype, binding: str) -> Iterator[Callable[[], ServerEngine]]:
    config = VLLMEngineConfig(max_num_seqs=64, max_context=CONTEXT)
    reservation = reserve_port()
    command = launch_command(
        config, python=engine_python("vllm", None), model=folder, port=reservation.port, dtype=dtype
    )
    if binding:
        command = replace(command, env={**command.env, "VLLM_CPU_OMP_THREADS_BIND": binding})
    log = folder.parent / f"vllm-{dtype}-{binding}.log"
    server = ServerProcess(command, name="vllm", port=reservation.port, log=log)
    try:
        asyncio.run(server.wait_ready(deadline_s=START_S))
        size = embedding_rows(str(folder))
        yield lambda: ServerEngine(VLLMServer(server.url, config, vocab_size=size))
    finally:
        asyncio.run(server.close())
        reservation.release()


async def _serve(make: Callable[[], ServerEngine], sessions: list[Session], name: str) -> None:
    engine = make()
    await engine.start()
    await serve(engine, sessions, name)


async def _serve_here(engine: LocalEngine, sessions: list[Session]) -> float:
    """Return the seconds of a warmed-up engine."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    await engine.generate(GenerateRequest(prompt_ids=[1], params=params, session_id="warm", request_id="warm"))
    start = time.perf_counter()
    await serve(engine, sessions)
    return time.perf_counter() - start


def measure_engines(
    path: str, folder: Path, dtypes: Sequence[Dtype], sessions: Sequence[int], bindings: Sequence[str], seed: int
) -> dict[str, Any]:
    """Return tokens per second, prompts included, by number of sessions, load, number format and engine."""
    found: dict[str, Any] = {}
    for dtype in dtypes:
        model = load_model(path, dtype=dtype, device="cpu")
        bare = load_unmodified(path, dtype)
        # seeds differ, because a server caches prompts
        work = {count: loads(count, model.config.vocab_size, seed + count) for count in sessions}
        config = LocalEngineConfig(max_num_seqs=64, max_context=CONTEXT, cache_tokens=64 * CONTEXT)

        def keep(count: int, load: str, engine: str, seconds: float, *, dtype: Dtype = dtype, work: Any = work) -> None:
            speed = _tokens(work[count][load]) / seconds
            note(f"{count} sessions, {load}, {dtype}, {engine}: {speed:,.0f} tokens/s")
            found.setdefault(str(count), {}).setdefault(load, {}).setdefault(dtype, {})[engine] = speed

        for count, by_load in work.items():
            for load, workload in by_load.items():
                keep(count, load, "local", asyncio.run(_serve_here(LocalEngine(model, config), workload)))
                if count == min(sessions):
                    keep(count, load, "generate", _seconds(lambda w=workload, m=bare: generate_padded(m, w)))
        written = folder / dtype
        write_served_model(model, load_tokenizer(path), written)
        for binding in bindings:
            with _vllm(written, dtype, binding) as make:
                asyncio.run(
                    _serve(
                        make,
                        make_sessions(sessions=16, turns=1, vocab_size=model.config.vocab_size, seed=seed - 1),
                        "warm",
                    )
                )
                for count, by_load in work.items():
                    for load, workload in by_load.items():
                        name = f"{count}{load}"
                        seconds = _seconds(lambda m=make, w=workload, n=name: asyncio.run(_serve(m, w, n)))
                        keep(count, load, f"vllm {binding}".strip(), seconds)
    return found


def measure_trainer(path: str, dtypes: Sequence[Dtype], rounds: int, seed: int, *, trl: bool) -> dict[str, Any]:
    """Return tokens per second and the memory of steps, by number format, and the peak of matrix products."""
    kinds = [StepKind("agentrl", adapters, tokens) for adapters in (False, True) for tokens in (1024, 4096)]
    kinds.append(StepKind("bare"))
    if trl:
        kinds += [StepKind("trl", adapters, episodes) for adapters in (False, True) for episodes in (1, 4)]
    found: dict[str, Any] = {}
    for dtype in dtypes:
        found[dtype] = {"matrix_gflops": matrix_speed(getattr(torch, dtype))}
        for kind in kinds:
            figures = measure_alone(kind, path, dtype, rounds, seed)
            found[dtype][kind.name] = figures
            note(
                f"trainer, {dtype}, {kind.name}: {figures['tokens_per_s']:.0f} tokens/s, "
                f"{figures['process_megabytes']:,.0f} MB"
            )
    return found


def matrix_speed(dtype: torch.dtype) -> float:
    """Return GFLOP/s of matrix products of the model's shape: [2048, 576] by [576, 1536]."""
    left, right = torch.randn(2048, 576, dtype=dtype), torch.randn(576, 1536, dtype=dtype)
    left @ right
    seconds = min(_seconds(lambda: left @ right) for _ in range(20))
    return 2 * 2048 * 576 * 1536 / seconds / 1e9


def run(
    *,
    model: str = "smollm2-135m-instruct",
    parts: Sequence[str] = ("trainer", "engines"),
    sessions: Sequence[int] = (16, 64),
    bindings: Sequence[str] = ("", "auto"),
    dtypes: Sequence[Dtype] = (),
    versus: str = "",
    rounds: int = 2,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure the parts, and TRL's trainer with ``--versus trl``; `dtypes` are this processor's by default.

    Returns:
        Plain JSON types: tokens per second.
    """
    if versus not in ("", "trl"):
        raise UsageError("unknown peer", got=f"versus={versus}", expected="trl")
    path = find_model(model)
    dtypes = dtypes or (("float32", "bfloat16") if fastest_format("cpu") == "bfloat16" else ("float32",))
    found: dict[str, Any] = {"model": model, "threads": torch.get_num_threads()}
    if "trainer" in parts:
        found["trainer"] = measure_trainer(path, dtypes, rounds, seed, trl=versus == "trl")
    if "engines" in parts:
        with tempfile.TemporaryDirectory() as folder:
            found["engines"] = measure_engines(path, Path(folder), dtypes, sessions, bindings, seed)
    return found
