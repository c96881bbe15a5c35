"""Engines report the routed experts of tokens."""

import asyncio
import base64
import dataclasses
import io

import numpy as np
import pytest
import torch
from support.models import tiny_model

from agentrl.config.engines import LocalEngineConfig, SGLangEngineConfig, VLLMEngineConfig
from agentrl.engine import Capabilities, Generation, StopReason
from agentrl.errors import UsageError
from agentrl.models.moe import ChosenExperts, routers
from agentrl.serving.launch.process import RETURN_ROUTES
from agentrl.serving.local import LocalEngine
from agentrl.serving.pool.group import common_capabilities
from agentrl.serving.sglang import launch_command as sglang_command
from agentrl.serving.sglang.server import RunningRequest
from agentrl.serving.sglang.wire import decode_answer as decode_sglang
from agentrl.serving.sglang.wire import encode_request as encode_sglang
from agentrl.serving.vllm import launch_command as vllm_command
from agentrl.serving.vllm.wire import decode_answer as decode_vllm
from agentrl.serving.vllm.wire import encode_request as encode_vllm

EXPERTS = np.arange(24, dtype=np.int32).reshape(3, 4, 2)
"""Of 3 tokens in 4 layers."""


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    "sizes", [{"max_num_seqs": 16, "lanes": 2}, {"max_num_seqs": 2, "prefill_tokens": 7, "cache_tokens": 512}]
)
@pytest.mark.capability("local", "routing replay")
async def test_the_local_engine_tells_what_a_forward_pass_chooses(family, sizes, play_sessions, request_of):
    model = tiny_model(family)
    config = LocalEngineConfig(**{"cache_tokens": 4096, **sizes})
    engine, known = LocalEngine(model, config, routed_experts=True), {}

    def request(ids, name, session, **params):
        before = known.get(session, 0)
        known[session] = len(ids)  # what is asked for begins within what is cached, and not always at its end
        return dataclasses.replace(request_of(ids, name, session, **params), routed_experts_from=max(0, before - 3))

    played = await play_sessions(engine, request, sessions=4)
    await engine.close()
    chosen = ChosenExperts(routers(model))
    for session in played:
        for turn, (ids, answer) in enumerate(session):
            whole = [*ids, *answer.token_ids]
            with torch.no_grad():
                model(input_ids=torch.tensor([whole]))
            first = max(0, len(session[turn - 1][0]) - 3) if turn else 0
            assert answer.routed_experts.dtype == np.uint8
            found, expected = sets(answer.routed_experts), sets(chosen.take()[first:-1])
            assert found.shape == expected.shape
            assert np.array_equal(found, expected)


def sets(routed_experts):
    """The experts of a layer, two each, in rising order."""
    return np.sort(routed_experts.reshape(len(routed_experts), -1, 2))


async def test_routes_are_those_of_the_first_time(request_of):
    """Weights change while a request runs: its log-probabilities came about with the experts of before."""
    model = tiny_model("qwen3_moe")
    engine = LocalEngine(model, LocalEngineConfig(max_num_seqs=1, cache_tokens=512), routed_experts=True)
    chosen = ChosenExperts(routers(model))
    with torch.no_grad():
        model(input_ids=torch.arange(5, 15)[None])
    before = chosen.take()
    asked = dataclasses.replace(request_of(list(range(5, 15)), max_tokens=200, seed=0), routed_experts_from=0)
    running = asyncio.ensure_future(engine.generate(asked))
    for _ in range(200):  # turns of the event loop, of which each step of the engine takes some
        await asyncio.sleep(0)
    assert 0 < engine.metrics().sampled_tokens < 200
    await engine.pause()
    with torch.no_grad():
        for router in routers(model):
            router.weight.neg_()
    await engine.update_weights(None, 1)
    await engine.resume()
    answer = await running
    await engine.close()
    assert set(answer.versions) == {0, 1}
    assert len(answer.routed_experts) == 10 + len(answer.token_ids) - 1
    assert np.array_equal(sets(answer.routed_experts[:10]), sets(before))


async def test_engines_that_tell_none_refuse_to(request_of):
    with pytest.raises(UsageError, match=r"cannot report routed experts: got Qwen3ForCausalLM"):
        LocalEngine(tiny_model(), LocalEngineConfig(cache_tokens=512), routed_experts=True)
    engine = LocalEngine(tiny_model(), LocalEngineConfig(cache_tokens=512))
    with pytest.raises(UsageError, match="requests routed experts"):
        await engine.generate(dataclasses.replace(request_of([1, 2]), routed_experts_from=0))
    await engine.close()
    told = [
        Capabilities(max_context=9, vocab_size=9, routed_experts=routed_experts) for routed_experts in (True, False)
    ]
    assert not common_capabilities(told).routed_experts


@pytest.mark.capability("vllm", "routing replay")
def test_what_vllm_is_asked_and_tells(request_of):
    asked = dataclasses.replace(request_of([4, 5, 6]), routed_experts_from=2)
    assert encode_vllm(asked, wire_id="a", max_context=9)["sampling_params"]["routed_experts_prompt_start"] == 2
    file = io.BytesIO()
    np.save(file, EXPERTS.astype(np.uint8))
    choice = {"finish_reason": "length", "token_ids": [7], "logprobs": {"content": [{"logprob": -1.0}]}}
    choice["weight_versions"] = [{"version": "1", "start": 0, "end": 1}]
    choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    answer = decode_vllm({"choices": [choice], "usage": {}}, frozenset())
    assert np.array_equal(answer.routed_experts, EXPERTS.reshape(3, 8))


def test_the_rest_of_an_answer_lacks_the_experts_that_are_not_known_yet(request_of):
    asked = dataclasses.replace(request_of([4, 5, 6]), routed_experts_from=1)
    told = Generation(token_ids=[7], logprobs=[-1.0], versions=[0], stop_reason=StopReason.ABORT)
    known = dataclasses.replace(told, routed_experts=EXPERTS)
    answers = [None, told, known]
    first = [RunningRequest(asked, answer=answer).routed_experts_from for answer in answers]
    assert first == [1, 1, 1 + len(EXPERTS)]
    assert RunningRequest(request_of([4]), answer=known).routed_experts_from is None


@pytest.mark.capability("sglang", "routing replay")
def test_what_sglang_is_asked_and_tells(request_of):
    plain = encode_sglang(request_of([4, 5, 6]), wire_id="a", max_context=9)
    body = encode_sglang(request_of([4, 5, 6]), wire_id="a", max_context=9, routed_experts_from=1)
    assert "return_routed_experts" not in plain
    assert body == plain | {"return_routed_experts": True, "routed_experts_start_len": 1}
    meta = {
        "finish_reason": {"type": "length"},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "output_token_logprobs": [[-1.0, 7, None], [-1.0, 8, None]],
        "weight_versions": [{"version": "1", "start": 0, "end": 2}],
        "routed_experts": base64.b64encode(EXPERTS.tobytes()).decode(),
    }
    answer = decode_sglang({"output_ids": [7, 8], "meta_info": meta}, frozenset(), routed_experts_from=1).generation
    assert np.array_equal(answer.routed_experts, EXPERTS.reshape(3, 8))


@pytest.mark.parametrize(
    ("config", "command"), [(VLLMEngineConfig, vllm_command), (SGLangEngineConfig, sglang_command)]
)
def test_servers_are_started_to_tell(config, command, tmp_path):
    keys = {"python": "python", "model": tmp_path, "port": 1, "dtype": "bfloat16", "gpus": [0]}
    told, plain = command(config(arguments=[RETURN_ROUTES]), **keys), command(config(), **keys)
    assert RETURN_ROUTES in told.argv
    assert ("VLLM_USE_V2_MODEL_RUNNER" in told.env) == (config is VLLMEngineConfig)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in plain.env
