"""A policy and a reward model that several ranks teach with pairs learn what one rank teaches."""

from functools import partial

import pytest
import torch
from ranks_here import group_of
from support.trainers import learn_all

from agentrl.builders.trainers import build_learner, build_on_ranks, build_reward_model
from agentrl.config.config import Config, ScratchModelConfig
from agentrl.models.scratch import build_scratch_model
from agentrl.render.tokenizers import load_tokenizer
from agentrl.training.preferences import PreferenceLearner, RewardModel, TextPair, make_pairs

TEXTS = [TextPair(better=f"up {i} " * (i + 1), worse=f"down {i} " * (4 - i)) for i in range(5)]


def settings(path, count, trainer, preferences):
    return Config(
        environment={"name": "maze"},
        model={"path": str(path), "device": "cpu"},
        trainer={"processes": count, "max_grad_norm": 1e9, **trainer},
        preferences={"learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 0, "epochs": 2, **preferences},
    )


def assert_same(found, expected):
    """Of the states after every update, and of the weights at the end."""
    for two, one in zip(found[0], expected[0], strict=True):
        assert two.extra == pytest.approx(one.extra, rel=1e-5, abs=5e-6)
        for name in ("update", "updates", "loss", "grad_norm", "learning_rate"):
            assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-5), name
        assert one.grad_norm > 0
    assert sorted(found[1]) == sorted(expected[1])
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("trainer", [{"gradient_checkpointing": True}, {"context_parallel": 2}])
@pytest.mark.slow
def test_a_policy_learns_the_same_from_pairs(model, trajectories, tmp_path, trainer):
    model.save_pretrained(tmp_path)
    pairs = make_pairs(trajectories, by="rewards", per_task=1)
    assert len(pairs) == 3

    def learnt(count, trainer):
        trainer = {"tokens_per_micro_batch": 60, **trainer}
        config, seen = settings(tmp_path, count, trainer, {"pairs_per_update": 2}), []
        with group_of(count) as group:
            learned = (PreferenceLearner, config, pairs, config.preferences)
            parts = build_on_ranks(group.ranks, build_learner, *learned, str(tmp_path), str(tmp_path))
            learn_all(parts.learner, seen.append)
            return seen, {name: tensor.clone() for name, tensor in parts.source.weights().items()}

    assert_same(learnt(2, trainer), learnt(1, {}))


@pytest.mark.slow
def test_a_reward_model_learns_the_same_from_pairs(tmp_path):
    """Five pairs, one at a time: an odd one that a rank computes for nothing; and it is saved whole."""
    sizes = ScratchModelConfig(layers=1, hidden_size=16, heads=2, kv_heads=1, vocab_size=300, max_context=64)
    build_scratch_model(tmp_path, ["up down up down 0 1 2"] * 20, sizes, seed=0)

    def learnt(count):
        trainer = {"tokens_per_micro_batch": 1, "gradient_checkpointing": True}
        config, seen = settings(tmp_path, count, trainer, {"pairs_per_update": 3}), []
        with group_of(count) as group:
            build = partial(build_reward_model, new_head=True)
            parts = build_on_ranks(group.ranks, build, config, TEXTS, str(tmp_path))
            learn_all(parts.learner, seen.append)
            parts.source.save(tmp_path / str(count), load_tokenizer(str(tmp_path)))
            return seen, {name: tensor.clone() for name, tensor in parts.source.weights().items()}

    one = learnt(1)
    assert_same(learnt(2), one)
    again = RewardModel(tmp_path / "2", dtype="float32", device="cpu").model.state_dict()
    assert "score.weight" in again
    for name, value in one[1].items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-5, msg=name)
