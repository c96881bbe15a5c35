"""A mixture-of-experts model on a real server: loading, updates, and agreement with the trainer."""

import asyncio

import pytest
import torch
from support.models import tiny_model
from support.tokenizers import build_tokenizer

from agentrl.config.engines import SGLangEngineConfig
from agentrl.serving.sglang import SGLangServer, launch_command
from agentrl.training.weights import ModelWeights
from agentrl.weights import CheckpointSource, FolderTransport, Probe, write_served_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
CONFIG = SGLangEngineConfig(max_num_seqs=8, max_context=512)
TOLERANCE = 1e-4


def test_a_mixture_is_served_and_updated_by_sglang(started_server, sglang_python, tmp_path):
    tokenizer = build_tokenizer("qwen3")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "heads": 2, "kv_heads": 1, "max_context": 512}
    model = tiny_model("qwen3_moe", **sizes)
    write_served_model(model, tokenizer, tmp_path / "served")
    keys = {"python": sglang_python, "model": tmp_path / "served", "dtype": "float32"}
    with started_server(lambda port: launch_command(CONFIG, port=port, **keys), tmp_path / "sglang.log") as url:
        differences = asyncio.run(updated(url, model, len(tokenizer)))
    assert max(differences) < TOLERANCE


async def updated(url, model, vocab_size):
    """The probe's difference at the start, and after an update to changed weights."""
    server, source = SGLangServer(url, CONFIG, vocab_size=vocab_size), CheckpointSource(ModelWeights(model), model)
    await server.connect(deadline_s=60)
    probe = Probe.random(vocab_size, tolerance=TOLERANCE)
    found = [(await probe.compare(server, source, version=0, name="server")).difference]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    prepared = await FolderTransport.shared_memory().prepare(source.weights(), 1)
    await server.pause()
    await prepared.give_to(server)
    await server.resume()
    found.append((await probe.compare(server, source, version=1, name="server")).difference)
    await prepared.discard()
    await server.close()
    return found
