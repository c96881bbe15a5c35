"""A teacher and a judge on real servers: log-probabilities agree with the model's, and no answer is no reward."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tokenizers import build_tokenizer

from agentrl.config.algorithm import TeacherConfig
from agentrl.config.judge import JudgeConfig
from agentrl.engine import SamplingParams
from agentrl.errors import EngineError, Outcome, UsageError
from agentrl.message import user
from agentrl.remote.chat import ChatService, ServiceSettings
from agentrl.rollout.judges.client import JudgeClient
from agentrl.rollout.judges.scorers import make_judge
from agentrl.rollout.judges.verdicts import FieldsFormat, RankingFormat, VerdictField
from agentrl.serving.launch.resources import reserve_port
from agentrl.serving.teacher import TeacherServers
from agentrl.task import Task
from agentrl.testing import ServerEngine
from agentrl.training.weights import ModelWeights
from agentrl.trajectory import Source, TokenSequence, Trajectory, Turn
from agentrl.weights import write_served_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
TOLERANCE = 1e-4
KEY_VARIABLE = "AGENTRL_TEST_KEY"
VERDICT = "Score: 7"
WORLDS = Path(__file__).parent.parent / "worlds"


@pytest.fixture
async def serve(client_of):
    """Lets the session's server serve the weights in a folder."""
    engine = ServerEngine(client_of())
    await engine.start()

    async def load(folder):
        await engine.update_weights({"folder": folder}, engine.version + 1)

    yield load
    await engine.close()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.capability(["{engine}", "attached {engine}"], "prompt log-probabilities")
async def test_a_teacher_says_what_its_model_says_here(engine, serve, url, model, model_folder):
    await serve(model_folder)
    rows = model.config.vocab_size
    sequences = [
        [(start + 7 * i) % rows for i in range(length)] for start, length in [(1, 1), (2, 2), (3, 300), (3, 310)]
    ]
    teacher = TeacherServers(
        TeacherConfig(path=str(model_folder), servers=[url], engine=engine, api_key_variable=KEY_VARIABLE)
    )
    try:
        twice = [await teacher.logprobs(sequences) for _ in range(2)]  # the second time prefixes are known
    finally:
        await teacher.close()
    source = ModelWeights(model)
    for found in twice:
        for ids, values in zip(sequences, found, strict=True):
            assert (len(values), math.isnan(values[0])) == (len(ids), True)
            if len(ids) == 1:
                continue
            np.testing.assert_allclose(values[1:], source.token_logprobs(ids[:1], ids[1:]), atol=TOLERANCE)


@pytest.mark.parametrize("engine", ["vllm"])
async def test_a_sequence_as_long_as_the_servers_context_is_refused_with_what_to_do(engine, serve, url, model_folder):
    await serve(model_folder)
    ids = [i % 300 for i in range(1024)]
    settings = TeacherConfig(path=str(model_folder), servers=[url], api_key_variable=KEY_VARIABLE)
    teacher = TeacherServers(settings)
    try:
        await teacher.logprobs([ids[:-1]])
        with pytest.raises(UsageError, match="rejects a sequence of 1024 tokens: got 400"):
            await teacher.logprobs([ids])
    finally:
        await teacher.close()


def parrot(model, tokenizer, text):
    """A model that answers a text: each of its tokens follows the one before, the first what a turn begins with."""
    ids = tokenizer.encode(text)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    chain = [prompt[-1], *ids, tokenizer.eos_token_id]
    assert len(set(chain)) == len(chain)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        rows = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=1)
        model.model.embed_tokens.weight.copy_(rows)
        model.lm_head.weight.zero_()
        for before, after in itertools.pairwise(chain):
            model.lm_head.weight[after] += 10 * rows[before]
    return model


def episode():
    trajectory = Trajectory(id="g/0.0", task_id="t-1", environment="w", seed=0, group_id="g", outcome=Outcome.FINISHED)
    sequence = TokenSequence()
    sequence.extend([1, 2], Source.PROMPT)
    sequence.extend_sampled([4, 5], logprobs=[-1.0, -1.0], versions=[0, 0])
    sequence.turns.append(Turn(index=0, start=2, end=4, reward=1.0))
    trajectory.sequences.append(sequence)
    return trajectory


def judge_at(url, **settings):
    engine = {"url": f"{url}/v1", "model": "policy", "api_key_variable": KEY_VARIABLE}
    service = ChatService(
        ServiceSettings(**engine, timeout_s=60.0, retries=1, section="agent.judge.engine"), first_wait_s=0.01
    )
    config = JudgeConfig(engine=engine, **{"max_tokens": 16, **settings})
    return make_judge(JudgeClient(service, config), config, lambda ids: " ".join(map(str, ids))), service


@pytest.mark.parametrize("engine", ["vllm"])
@pytest.mark.parametrize("trained", ["untied"], indirect=True)
async def test_a_judge_scores_and_one_that_talks_nonsense_or_is_gone_gives_no_reward(
    engine, serve, url, trained, model_folder, tmp_path
):
    tokenizer = build_tokenizer("qwen3")
    write_served_model(parrot(trained, tokenizer, VERDICT), tokenizer, tmp_path / "judge")
    await serve(tmp_path / "judge")
    task = Task(id="t-1", environment="w", prompt="Do it.")
    judge, service = judge_at(url, environment_weight=0.5, cache="off")  # another model answers the same question
    try:
        score = await judge.score(episode(), task)
        assert (score.reward, score.components) == (pytest.approx(1.2), {"judge": 0.7, "environment": 1.0})
        await serve(model_folder)
        with pytest.raises(EngineError, match=r"the judge gave no score for g/0\.0"):
            await judge.score(episode(), task)
    finally:
        await service.close()
    reservation = reserve_port()
    judge, service = judge_at(f"http://127.0.0.1:{reservation.port}")
    try:
        with pytest.raises(EngineError, match="failed after 2 attempts"):
            await judge.score(episode(), task)
    finally:
        await service.close()
        reservation.release()


FORMATS = [
    FieldsFormat(
        [
            VerdictField(name="reason", kind="string", longest=20),
            VerdictField(name="score", kind="number", low=0, high=10),
        ]
    ),
    FieldsFormat(
        [VerdictField(name="score", kind="integer", low=1, high=5), VerdictField(name="done", kind="boolean")]
    ),
    FieldsFormat([VerdictField(name="better", kind="string", choices=("1", "2", "tie"))]),
    RankingFormat(4, VerdictField(name="reason", kind="string", longest=20)),
]


@pytest.mark.parametrize("engine", ["vllm"])
async def test_servers_decode_only_answers_that_match_the_schema(engine, serve, url, model_folder):
    """The model has random weights, so only the schema can give its answers this format.

    Such a model may write white space, which JSON allows, until it runs out of tokens.
    """
    await serve(model_folder)
    _, service = judge_at(url)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    try:
        for answer_format in FORMATS:
            answer = await service.chat([user("Judge.")], (), params, "guided", json_schema=answer_format.schema)
            written = "".join(answer.message.text.split())
            first = f'{{"{next(iter(answer_format.schema["properties"]))}":'
            assert written.startswith(first[: len(written)])
        free = await service.chat([user("Judge.")], (), params, "free")
        assert not free.message.text.strip().startswith("{")
    finally:
        await service.close()
