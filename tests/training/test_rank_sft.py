"""Supervised fine-tuning on several ranks gives the result of one rank."""

import random
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ranks_here import group_of
from safetensors.torch import load_file
from support.trainers import learn_all

from agentrl.builders.trainers import build_learner, build_on_ranks
from agentrl.config.config import Config
from agentrl.runs.sft import warm_start
from agentrl.training.sft import SupervisedLearner
from agentrl.trajectory import Source, TokenSequence, Trajectory


def demonstration(rng):
    sequence = TokenSequence()
    sequence.extend([2, rng.randrange(10, 20)], Source.PROMPT)
    for _ in range(rng.randint(1, 5)):
        sequence.extend([sequence.ids_list()[-1], 3], Source.FORCED)
        sequence.extend([rng.randrange(10, 20)], Source.OBSERVATION)
    return Trajectory(id="d", task_id="d", environment="echo", seed=0, group_id="d", sequences=[sequence])


@pytest.fixture
def demonstrations():
    rng = random.Random(0)
    return [demonstration(rng) for _ in range(12)]


def learnt(path, demonstrations, count, lora=None, **trainer):
    """Losses and weights after three updates."""
    config = Config(
        environment={"name": "maze"},
        model={"path": str(path), "device": "cpu", "lora": lora},
        trainer={"processes": count, "tokens_per_micro_batch": 30, **trainer},
        sft={"learning_rate": 1e-3, "tokens_per_update": 40, "schedule": "constant", "observation_weight": 0.5},
    )
    seen = []
    with group_of(count) as group:
        learned = (SupervisedLearner, config, demonstrations, config.sft)
        parts = build_on_ranks(group.ranks, build_learner, *learned, str(path), str(path))
        learn_all(parts.learner, seen.append, until=3)
        weights = {name: tensor.clone() for name, tensor in parts.source.weights().items()}
    return [(state.update, state.extra["tokens"], state.loss, state.grad_norm) for state in seen], weights


@pytest.mark.parametrize(
    ("trainer", "lora"), [({}, None), ({"context_parallel": 2}, None), ({"context_parallel": 2}, {"rank": 3})]
)
@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(model, demonstrations, tmp_path, trainer, lora):
    model.save_pretrained(tmp_path)
    expected, weights = learnt(tmp_path, demonstrations, 1, lora)
    found, shared = learnt(tmp_path, demonstrations, 2, lora, **trainer)
    assert [number for number, *_ in found] == [1, 2, 3]
    for one, two in zip(expected, found, strict=True):
        assert two == pytest.approx(one, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_warm_start_of_two_processes_measures_and_saves_the_whole_model(tiny_run, monkeypatch):
    @contextmanager
    def forked_ranks(count, *, logs):
        with group_of(count) as group:
            yield group.ranks

    monkeypatch.setattr("agentrl.runs.learning_run.open_ranks", forked_ranks)
    lessons = "sft={episodes: 8, tokens_per_update: 128, epochs: 1, stop_at: 0.99, check_every: 1, check_tasks: 2}"
    run, alone = tiny_run(lessons, "trainer.processes=2"), tiny_run(lessons, name="alone")
    found, expected = warm_start(run), warm_start(alone)
    assert found.step == expected.step
    assert found.metrics["sft/loss"] == pytest.approx(expected.metrics["sft/loss"], rel=1e-4)
    two, one = (load_file(Path(result.checkpoint) / "model" / "model.safetensors") for result in (found, expected))
    assert sorted(two) == sorted(one)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4)
