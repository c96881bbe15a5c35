"""Duration of a weight sync of a model with 100 million parameters to a real server, by every supported transport.

The same run also times a plain copy of the weights' bytes (one file copied within the memory file system) and the
server's reload of an existing folder (with its caches dropped). A sync by shared memory should take at most three times
the copy, plus the reload. All figures are medians; the server is otherwise idle.

    agentrl bench sync --engine vllm --json sync.json
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from support.models import tiny_model
from support.tokenizers import build_tokenizer
from transformers import PreTrainedModel

from agentrl.builders.servers import ServedModel, make_transport, open_pool
from agentrl.config.engines import ServerEngineConfig, SGLangEngineConfig, VLLMEngineConfig
from agentrl.engine import InferenceServer
from agentrl.errors import UsageError
from agentrl.serving.pool import ServerPool
from agentrl.training.weights import ModelWeights
from agentrl.weights import TOLERANCE, FolderTransport, Probe, RemoteSync, SyncReport, write_served_model

ENGINES: dict[str, Callable[..., ServerEngineConfig]] = {"vllm": VLLMEngineConfig, "sglang": SGLangEngineConfig}
TRANSPORTS = {
    "vllm": ("shared_memory", "collective", "cuda_ipc"),
    "sglang": ("shared_memory", "collective", "tensor", "cuda_ipc"),
}
MAX_CONTEXT = 1024
ARGUMENTS: dict[str, list[str]] = {"vllm": [], "sglang": ["--max-total-tokens", "4096"]}


def run(*, engine: str | None = None, layers: int = 20, hidden_size: int = 768, repeats: int = 5) -> dict[str, Any]:
    """Return figures by engine and transport, in seconds.

    Args:
        engine: ``vllm`` or ``sglang``; both, one after the other, by default.
        layers: Layers of the model.
        hidden_size: Width of the model, a multiple of 64.
        repeats: Measurements of each kind.
    """
    if engine is not None and engine not in ENGINES:
        raise UsageError("unknown server", got=engine, expected=" or ".join(ENGINES))
    tokenizer = build_tokenizer("qwen3")
    model = tiny_model(
        vocab_size=len(tokenizer),
        layers=layers,
        hidden_size=hidden_size,
        heads=hidden_size // 64,
        kv_heads=hidden_size // 128,
        max_context=MAX_CONTEXT,
        initializer_range=0.02,
    )
    figures: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "torch_threads": torch.get_num_threads(),
        "repeats": repeats,
    }
    with tempfile.TemporaryDirectory() as folder:
        write_served_model(model, tokenizer, Path(folder) / "start")
        for name in ENGINES if engine is None else (engine,):
            figures[name] = asyncio.run(_measure(name, model, Path(folder), repeats))
    return figures


async def _measure(engine: str, model: PreTrainedModel, folder: Path, repeats: int) -> dict[str, Any]:
    section = ENGINES[engine](max_num_seqs=16, max_context=MAX_CONTEXT, arguments=ARGUMENTS[engine])
    vocab_size = model.config.get_text_config().vocab_size
    served = ServedModel(path=str(folder / "start"), dtype="float32", vocab_size=vocab_size)
    async with open_pool(section, served, folder / engine) as pool:
        copy_s, reload_s = await _parts(pool.servers[0], model, repeats)
        figures: dict[str, Any] = {"copy_s": copy_s, "reload_s": reload_s, "bound_s": 3 * copy_s + reload_s}
        for transport in TRANSPORTS[engine]:
            if transport == "cuda_ipc" and not torch.cuda.is_available():
                continue
            chosen = ENGINES[engine](max_context=MAX_CONTEXT, transport=transport)
            reports = await _syncs(pool, model, chosen, folder, repeats)
            figures[transport] = _medians(reports, bound_s=figures["bound_s"])
    return figures


async def _parts(server: InferenceServer, model: PreTrainedModel, repeats: int) -> tuple[float, float]:
    """Return the seconds of a plain copy of the weights, and of the server's reload."""
    transport = FolderTransport.shared_memory()
    written = await transport.prepare(ModelWeights(model).weights(), 0)
    [source] = written.folder.glob("*.safetensors")
    target = transport.path / "copy"
    copies, reloads = [], []
    try:
        for _ in range(repeats):
            copies.append(await _seconds(lambda: asyncio.to_thread(shutil.copyfile, source, target)))
            target.unlink()
            await server.pause()
            reloads.append(await _seconds(lambda: server.load_weights(written.folder, 0)))
            await server.resume()
    finally:
        await transport.close()
    return statistics.median(copies), statistics.median(reloads)


async def _seconds(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def _syncs(
    pool: ServerPool, model: PreTrainedModel, section: ServerEngineConfig, folder: Path, repeats: int
) -> list[SyncReport]:
    vocab_size = model.config.get_text_config().vocab_size
    probe = Probe.random(vocab_size, **TOLERANCE["float32"])
    sync = RemoteSync(ModelWeights(model), pool.group, make_transport(section, folder), probe)
    reports = []
    try:
        await sync.sync(pool.version + 1)  # the first sync creates folders and process groups
        for _ in range(repeats):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.999)
            reports.append(await sync.sync(pool.version + 1))
    finally:
        await sync.close()
    return reports


def _medians(reports: list[SyncReport], *, bound_s: float) -> dict[str, float]:
    def of(part: str) -> float:
        return statistics.median(getattr(report, part) for report in reports)

    return {
        "sync_s": of("transport_s"),
        "prepare_s": of("prepare_s"),
        "held_s": of("load_s"),
        "verify_s": of("verify_s"),
        "sync_to_bound": of("transport_s") / bound_s,
        "verified_sync_to_bound": of("seconds") / bound_s,
        "bytes": of("bytes"),
        "probe_difference": max(report.probe_difference for report in reports),
    }
