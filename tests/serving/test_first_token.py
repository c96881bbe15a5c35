"""A first token with its own temperature (FIRE): what it is drawn from, and its log-probability."""

import asyncio
import math

import numpy as np
import pytest
import torch

from agentrl.config import load_config
from agentrl.engine import FirstToken, GenerateRequest, Generation, SamplingParams, StopReason
from agentrl.errors import ConfigError, EngineError
from agentrl.serving.first_token import generate_with_first_token
from agentrl.serving.local import sample
from agentrl.serving.sglang.wire import encode_request as encode_for_sglang
from agentrl.serving.vllm.wire import encode_request as encode_for_vllm

LOGITS = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
HOT = FirstToken(temperature=2.0, top_k=3)
KEPT = [math.sqrt(p) for p in (0.4, 0.3, 0.2)]


@pytest.mark.parametrize(("number", "token"), [(0.0, 0), (0.5, 1), (0.99, 2)])
def test_the_local_engine_draws_the_first_token_from_the_cut_distribution(number, token):
    params = SamplingParams(temperature=0.5, top_p=0.3, first_token=HOT)
    rows = sample(LOGITS.repeat(2, 1), [params, params], np.full(2, number), {1})
    assert rows.token_ids == [0, token]
    assert rows.logprobs[0] == pytest.approx(math.log(0.16 / 0.30), rel=1e-5)
    assert rows.logprobs[1] == pytest.approx(math.log(KEPT[token] / sum(KEPT)), rel=1e-5)


def request(seed=0, max_tokens=5, stop=frozenset()):
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.5, top_p=0.9, first_token=HOT, stop_token_ids=stop, seed=seed
    )
    return GenerateRequest(prompt_ids=[7, 8], params=params, session_id="s", request_id="r")


def server(asked, tops=(0.4, 0.3, 0.2, 0.1), greedy=0):
    """A server that is greedy, and reports log-probabilities of the most probable tokens."""

    async def ask(given, found):
        asked.append(given)
        if found is None:
            count = given.params.max_tokens
            return Generation(
                token_ids=[3] * count, logprobs=[-0.5] * count, versions=[2] * count, stop_reason=StopReason.LENGTH
            )
        found.update({token: math.log(p) for token, p in enumerate(tops)})
        return Generation(token_ids=[greedy], logprobs=[-0.9], versions=[1], stop_reason=StopReason.LENGTH)

    return ask


def answers(count, **settings):
    asked = []
    given = [
        generate_with_first_token(request(seed, **settings), server(asked), max_context=100) for seed in range(count)
    ]

    async def collect():
        return await asyncio.gather(*given)

    return asyncio.run(collect()), asked


def test_a_server_samples_the_first_token_in_a_request_of_its_own():
    (answer, *_), asked = answers(1)
    assert answer.token_ids[1:] == [3, 3, 3, 3]
    token = answer.token_ids[0]
    assert answer.logprobs == pytest.approx([math.log(KEPT[token] / sum(KEPT)), *[-0.5] * 4])
    assert answer.versions == [1, 2, 2, 2, 2]
    first, rest = (given.params for given in asked)
    assert (first.temperature, first.top_k, first.top_p, first.max_tokens) == (0.0, 0, 1.0, 1)
    assert (rest.temperature, rest.top_k, rest.top_p, rest.max_tokens) == (0.5, 0, 0.9, 4)
    assert asked[1].prompt_ids == [7, 8, token]


def test_first_tokens_are_drawn_as_often_as_they_should():
    found, _ = answers(3000, max_tokens=1)
    for token, weight in enumerate(KEPT):
        share = sum(answer.token_ids == [token] for answer in found) / len(found)
        assert share == pytest.approx(weight / sum(KEPT), abs=0.03)


@pytest.mark.parametrize(
    ("given", "context", "reason"),
    [
        (request(max_tokens=1), 100, StopReason.LENGTH),
        (request(stop=frozenset({0, 1, 2})), 100, StopReason.STOP),
        (request(), 3, StopReason.LENGTH),
    ],
)
def test_an_answer_of_one_token_needs_no_other_request(given, context, reason):
    asked = []
    answer = asyncio.run(generate_with_first_token(given, server(asked), max_context=context))
    assert (len(answer.token_ids), answer.stop_reason, len(asked)) == (1, reason, 1)


@pytest.mark.parametrize("reported", [(), (0.2, 0.8)])
def test_a_server_that_omits_the_most_probable_tokens_is_an_error(reported):
    with pytest.raises(EngineError, match="did not report the most probable first tokens"):
        asyncio.run(generate_with_first_token(request(), server([], reported), max_context=100))


def test_the_servers_are_asked_for_the_most_probable_tokens():
    given = request()
    body = encode_for_vllm(given, wire_id="w", max_context=100)
    assert body["sampling_params"]["logprobs"] == 3
    assert encode_for_sglang(given, wire_id="w", max_context=100)["top_logprobs_num"] == 3


def test_evaluations_sample_as_usual():
    hot = "sampling.first_token={temperature: 30, top_k: 16}"
    config = load_config("quickstart", [hot])
    assert config.sampling.first_token.top_k == 16
    assert config.evaluation_sampling.first_token is None
    with pytest.raises(ConfigError, match="top_k"):
        load_config("quickstart", ["sampling.first_token={temperature: 30, top_k: 0}"])
