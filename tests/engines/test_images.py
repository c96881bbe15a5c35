"""Images through a real vLLM server: the same tokens and log-probabilities as transformers', and a training run.

vLLM needs torchvision for these models; without one that works, the tests are skipped. Images have whole numbers of
tokens as sides: torchvision and Pillow, which transformers uses without it, resize differently.
"""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from support.vision import FAMILIES, save_vision_model, vision_model, vision_processor, vision_tokenizer
from vision.conftest import noise

from agentrl.config import load_config
from agentrl.config.engines import VLLMEngineConfig
from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.errors import UsageError
from agentrl.message import TextPart, user
from agentrl.observe.metrics import read_metrics
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import Renderer
from agentrl.runs.rl import train
from agentrl.runs.start import start_run
from agentrl.serving.vllm import VLLMServer, launch_command
from agentrl.training.forward.logprobs import score
from agentrl.training.forward.sequences import scored_sequence
from agentrl.trajectory import Trajectory
from agentrl.weights import write_served_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]
HEAD_SIZE, MAX_CONTEXT, START_S = 32, 1024, 540
TOLERANCE = 1e-4
SIDES = {"qwen2_5_vl": 28, "qwen3_vl": 32}
"""Pixels of a token's side."""


@functools.cache
def has_torchvision(python: str) -> bool:
    return subprocess.run([python, "-c", "import torchvision"], capture_output=True, timeout=300).returncode == 0


@pytest.fixture
def seeing_python(vllm_python: str) -> str:
    if not has_torchvision(vllm_python):
        pytest.skip("torchvision does not work in vLLM's environment")
    return vllm_python


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.capability(["vllm", "attached vllm"], "images")
def test_answers_to_images_are_those_of_transformers(family, seeing_python, started_server, tmp_path):
    tokenizer = vision_tokenizer()
    images, model = vision_processor(family, tokenizer), vision_model(family, tokenizer, head_size=HEAD_SIZE)
    folder = tmp_path / "model"
    write_served_model(model, tokenizer, folder)
    images.processor.save_pretrained(folder)
    config = VLLMEngineConfig(max_num_seqs=8, max_context=MAX_CONTEXT)
    keys = {
        "python": seeing_python,
        "model": folder,
        "dtype": "float32",
        "python_path": os.environ.get("PYTHONPATH", ""),
    }
    with started_server(lambda port: launch_command(config, port=port, **keys), tmp_path / "vllm.log") as url:
        vocab_size = model.config.text_config.vocab_size
        sequence = asyncio.run(play(url, vocab_size, Renderer(tokenizer, images=images), family))
    end = sequence.turns[-1].end
    mask = sequence.loss_mask[:end]
    scored = scored_sequence(sequence.token_ids[:end], mask, [i for i in sequence.images if i.end <= end])
    with torch.no_grad():
        expected = score(model, [scored], temperature=1.0, image_processor=images).logp
    assert np.abs(expected.numpy() - sequence.logprobs[:end][mask]).max() < TOLERANCE


async def play(url, vocab_size, renderer, family):
    """Three turns, each after a new image; the sequence of the conversation."""
    server = VLLMServer(url, VLLMEngineConfig(servers=[url]), vocab_size=vocab_size)
    await server.connect(deadline_s=START_S)
    assert server.capabilities.images
    trajectory = Trajectory(id="t", task_id="t", environment="e", seed=0, group_id="g")
    side = SIDES[family]
    first = user(
        (TextPart(text="see "), noise(2 * side, 3 * side, 1), TextPart(text=" and "), noise(5 * side, side, 2))
    )
    conversation = LedgerConversation(renderer, trajectory, [first])
    for turn in range(3):
        conversation.accept(await server.generate(request_of(conversation, turn)))
        conversation.add([user((TextPart(text="next"), noise(2 * side, (2 + turn) * side, 5 + turn)))])
    await check_other_sizes_are_refused(server, family)
    await server.close()
    return conversation.sequence


def request_of(conversation, turn):
    ids = conversation.prepare()
    params = SamplingParams(max_tokens=6)
    return GenerateRequest(
        prompt_ids=ids, params=params, request_id=f"r{turn}", session_id="s", images=conversation.sequence.images
    )


async def check_other_sizes_are_refused(server, family):
    """A client whose processor makes images smaller gets an error instead of an answer to another prompt."""
    tokenizer = vision_tokenizer()
    other = vision_processor(family, tokenizer)
    other.processor.size = {"shortest_edge": SIDES[family] ** 2, "longest_edge": 4 * SIDES[family] ** 2}
    trajectory = Trajectory(id="o", task_id="o", environment="e", seed=0, group_id="g")
    smaller = LedgerConversation(Renderer(tokenizer, images=other), trajectory, [user((noise(140, 140, 3),))])
    with pytest.raises(UsageError, match="prepares images differently"):
        await server.generate(request_of(smaller, 9))


@pytest.mark.capability("vllm", "images")
def test_a_run_on_images_through_vllm(seeing_python, tmp_path):
    model = tmp_path / "model"
    save_vision_model(FAMILIES[0], model, head_size=HEAD_SIZE)
    settings = [
        *("environment.name=frozen_lake", "environment.options={observation: image, size: 3}", f"model.path={model}"),
        *("agent.loop=react_text", "agent.options={format: plain}", "agent.max_turns=3", "agent.max_answer_tokens=8"),
        *("agent.max_tokens=1000", "agent.max_parse_failures=10", "algorithm.group_size=2"),
        *("trainer={steps: 2, tasks_per_step: 2, learning_rate: 1e-3}", f"run.directory={tmp_path}"),
        f"engine={{type: vllm, python: {seeing_python}, max_num_seqs: 8, max_context: 1000}}",
    ]
    run = start_run(load_config(None, settings), kind="test")
    train(run)
    for line in read_metrics(run.folder.metrics_file):
        assert line["mismatch/prob_abs_mean"] < TOLERANCE
        assert line["sync/probe_difference"] < 1e-3
    assert all(t.trajectory.sequences[0].images for t in read_trajectories(Path(run.folder.trajectories)))
