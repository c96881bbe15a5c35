"""A pretrained model, SmolLM2-135M-Instruct, on every engine: what is sampled, sent, trained and saved is exact.

`make test-real-model` installs it first; a missing model is a failure here.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.cli import main
from agentrl.config.engines import LocalEngineConfig
from agentrl.engine import GenerateRequest, SamplingParams
from agentrl.errors import Outcome
from agentrl.evaluation.evaluate import PolicyKind
from agentrl.evaluation.session import EvaluationRequest, run_evaluation
from agentrl.evaluation.settings import evaluation_config
from agentrl.models.load import load_model
from agentrl.observe.metrics import read_metrics
from agentrl.observe.model_folder import find_model
from agentrl.render.tokenizers import load_tokenizer
from agentrl.runs.api import train
from agentrl.serving.local import LocalEngine
from agentrl.weights import write_served_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
NAME = "smollm2-135m-instruct"
DIFFERENCE = 5e-4
"""Most that log-probabilities of two computations in float32 differ by, here."""
MIN_TOKENS = 300
"""Fewest sampled tokens to compare; what 16 games sample, about 1,000, depends on the processor."""
GUESSES = (
    "agent.loop=react_text",
    "agent.options={format: action_tag}",
    "agent={max_turns: 1, max_parse_failures: 9, max_answer_tokens: 96, max_tokens: 1024}",
)
"""Games in which the model rambles; many at once, which is fast in float32."""
STOPPED = ("agent.options.prefill=<action>", "sampling.stop=[</action>]")
KEY = "AGENTRL_TEST_KEY"
LONG = 200
BOTH = pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("vllm", "sglang")]
)
"""Each server has a worker of its own."""


def main_code(words: list[str]) -> None:
    """Run a command that must succeed."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert not end.value.code


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """The model as servers load it."""
    folder = tmp_path_factory.mktemp("models") / "start"
    write_served_model(load_model(find_model(NAME), dtype="float32"), load_tokenizer(find_model(NAME)), folder)
    return folder


@pytest.fixture(scope="session")
def model():
    """Its weights in float32."""
    return load_model(find_model(NAME), dtype="float32")


@pytest.fixture
def trained(model):
    """Changed by updates, and restored."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    yield model
    model.load_state_dict(before)


def _play(folder: Path, *words: str, tasks: int = 16):
    config = evaluation_config(env="guess_number", model=NAME, overrides=[*words, f"run.directory={folder}"])
    request = EvaluationRequest(
        config=config, policy=PolicyKind.ENGINE, n_tasks=tasks, samples=1, seed=0, folder=folder
    )
    return [episode.trajectory for episode in asyncio.run(run_evaluation(request)).result.episodes]


def _check_exact(model, trajectories) -> int:
    """Compare each sampled token's log-probability with transformers'; how many there were."""
    count = 0
    for trajectory in trajectories:
        assert trajectory.outcome is not Outcome.ENGINE_ERROR, trajectory.error
        for sequence in trajectory.sequences:
            ids = torch.tensor([sequence.ids_list()])
            with torch.inference_mode():
                expected = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            sampled = torch.from_numpy(sequence.loss_mask[1:])
            difference = (expected - torch.from_numpy(sequence.logprobs[1:]))[sampled]
            assert difference.abs().max() < DIFFERENCE
            count += len(difference)
    return count


@pytest.mark.capability("local", "evaluation")
def test_what_the_local_engine_samples_is_transformers(model, tmp_path):
    assert _check_exact(model, _play(tmp_path, *GUESSES)) >= MIN_TOKENS


@BOTH
@pytest.mark.capability("attached {engine}", "stop strings")
def test_what_servers_sample_is_transformers(engine, url, model, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "secret")
    server = f"engine={{type: {engine}, servers: [{url}], api_key_variable: {KEY}}}"
    assert _check_exact(model, _play(tmp_path / "long", *GUESSES, server)) >= MIN_TOKENS
    stopped = _play(tmp_path / "short", *GUESSES, *STOPPED, server)
    answers = [
        sequence.ids_list()[t.start : t.end] for e in stopped for sequence in e.sequences for t in sequence.turns
    ]
    tokenizer = load_tokenizer(find_model(NAME))
    ended = [ids for ids in answers if "</action>" in tokenizer.decode(ids)]
    assert len(ended) > len(answers) / 4
    assert not any("</action>" in tokenizer.decode(ids[:-1]) for ids in ended), "a token after the stop text"


@BOTH
async def test_ten_updates_with_requests_in_flight_are_exact(probe, model):
    engine = probe.engine
    prompts = [load_tokenizer(find_model(NAME)).encode(f"Question {i}: why is the sky blue?") for i in range(3)]
    mixed, rest_s = 0, 0.5
    for _ in range(10):
        old = engine.version
        requests = [probe.request(prompt, max_tokens=LONG) for prompt in prompts]
        tasks = await asyncio.gather(*map(probe.submit, requests))
        await engine.pause()
        new = await probe.update()
        await engine.resume()
        await asyncio.sleep(rest_s)
        await asyncio.gather(*(engine.abort(request.request_id) for request in requests))
        answers = await asyncio.gather(*tasks)
        assert all(set(answer.versions) <= {old, new} for answer in answers)
        is_mixed = any(len(set(answer.versions)) == 2 for answer in answers)
        mixed, rest_s = mixed + is_mixed, rest_s if is_mixed else 2 * rest_s  # if it sampled nothing
        for prompt, answer in zip(prompts, answers, strict=True):
            probe.check_logprobs(prompt, answer, 1.0, answer.versions.count(old))
    assert mixed >= 5


async def test_greedy_decoding_is_generate(model):
    tokenizer = load_tokenizer(find_model(NAME))
    texts = ("What is the capital of France?", "Count from one to ten.", "Write a short poem about the sea.")
    engine = LocalEngine(model, LocalEngineConfig(max_context=512, cache_tokens=4096))
    messages = [[{"role": "user", "content": text}] for text in texts]
    prompts = [tokenizer.apply_chat_template(m, add_generation_prompt=True)["input_ids"] for m in messages]
    params = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=frozenset({tokenizer.eos_token_id}))
    answers = await asyncio.gather(
        *(
            engine.generate(GenerateRequest(prompt_ids=p, params=params, session_id=str(i), request_id=str(i)))
            for i, p in enumerate(prompts)
        )
    )
    await engine.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :]
        assert answer.token_ids == expected.tolist()[: len(answer.token_ids)]
        assert len(answer.token_ids) >= min(40, len(expected))


def test_fifty_tool_calling_turns_do_not_drift(model, tmp_path):
    """Each episode stays one sequence, and each token's log-probability is that of the whole."""
    words = (
        "model.chat_template=chatml",
        "agent.loop=tool_calling",
        "agent.options={prefill: true}",
        "agent.few_shot_turns=2",
    )
    limits = "agent={max_turns: 5, max_parse_failures: 99, max_answer_tokens: 32, max_tokens: 2048}"
    played = _play(tmp_path, *words, limits, "sampling.stop=[</tool_call>]", tasks=11)
    turns = [turn for episode in played for turn in episode.turns]
    assert len(turns) >= 50
    assert sum(turn.valid for turn in turns) > len(turns) / 2
    assert all(len(episode.sequences) == 1 for episode in played), "no history was rewritten"
    assert _check_exact(model, played) > 300


def test_a_run_is_trained_resumed_and_exported(tmp_path):
    """Two steps of a shipped recipe at a small size, one more after it was resumed, and the model that is exported."""
    small = ("trainer={steps: 2, tasks_per_step: 2, learning_rate: 1e-4, warmup_steps: 0}", "algorithm.group_size=4")
    result = train("smollm2/blackjack", overrides=[*small, f"run.directory={tmp_path}", "run.name=run"])
    assert result.step == 2
    main_code(["train", "--resume", str(result.folder), "trainer.steps=3"])
    lines = read_metrics(result.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["mismatch/prob_abs_mean"] < 0.02, "what bfloat16 costs"
        assert line["episodes"] == 8
    assert max(line["train/grad_norm"] for line in lines) > 0
    main_code(["export", str(result.folder), str(tmp_path / "whole")])
    exported = load_file(tmp_path / "whole" / "model.safetensors")
    trained = load_file(result.folder / "checkpoints" / "step-000003" / "model" / "model.safetensors")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)
    start = load_model(find_model(NAME), dtype="bfloat16").state_dict()
    assert any(not torch.equal(tensor.to(torch.bfloat16), start[name]) for name, tensor in exported.items())
