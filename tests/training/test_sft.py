"""Supervised fine-tuning on demonstrations."""

import copy
import math
import random

import pytest
import torch
from support.trainers import learn_all

from agentrl.config.config import TrainerConfig
from agentrl.config.trainer import SFTConfig
from agentrl.errors import TrainingError
from agentrl.training.sft import SupervisedLearner
from agentrl.trajectory import Source, TokenSequence, Trajectory


def demonstration(rng):
    """A prompt, and answers that repeat the last observation; observations count upwards."""
    sequence = TokenSequence()
    sequence.extend([2, rng.randrange(10, 20)], Source.PROMPT)
    for _ in range(rng.randint(1, 5)):
        last = sequence.ids_list()[-1]
        sequence.extend([last, 3], Source.FORCED)
        sequence.extend([rng.randrange(10, 20)], Source.OBSERVATION)
    return Trajectory(id="d", task_id="d", environment="echo", seed=0, group_id="d", sequences=[sequence])


@pytest.fixture
def demonstrations():
    rng = random.Random(0)
    return [demonstration(rng) for _ in range(60)]


def train(model, demonstrations, *, progress=lambda _: None, budget=8192, seed=0, **settings):
    config = SFTConfig(**{"learning_rate": 1e-2, "tokens_per_update": 60, "schedule": "constant", **settings})
    trainer = TrainerConfig(tokens_per_micro_batch=budget, max_grad_norm=1e9)
    learner = SupervisedLearner(model, demonstrations, config, trainer, seed=seed)
    return learn_all(learner, progress)


def cross_entropy(model, demonstrations, *, observation_weight):
    """Weighted mean over the tokens of all demonstrations, one sequence at a time."""
    total = weights = 0.0
    for trajectory in demonstrations:
        for sequence in trajectory.sequences:
            ids = torch.from_numpy(sequence.token_ids).long()
            distribution = model(ids[None]).logits[0].log_softmax(-1)
            for t in range(1, len(ids)):
                weight = 1.0 if sequence.sources[t] == Source.FORCED else observation_weight
                total -= weight * distribution[t - 1, ids[t]]
                weights += weight
    return float(total.detach()) / weights


@pytest.mark.parametrize("observation_weight", [0.0, 0.25, 1.0])
def test_loss_is_the_weighted_cross_entropy_of_the_tokens(model, demonstrations, observation_weight):
    expected = cross_entropy(model, demonstrations, observation_weight=observation_weight)
    found = train(model, demonstrations, tokens_per_update=100_000, observation_weight=observation_weight)
    assert found.updates == 1
    assert found.loss == pytest.approx(expected, abs=1e-5)
    assert found.extra["tokens"] == sum(len(t.sequences[0]) - (1 if observation_weight else 2) for t in demonstrations)


def test_the_weight_of_observations_falls_to_nothing(model, demonstrations):
    before = cross_entropy(model, demonstrations, observation_weight=0.5)
    seen = []
    train(
        model,
        demonstrations,
        epochs=2,
        tokens_per_update=100_000,
        observation_weight=1.0,
        learning_rate=0.0,
        progress=seen.append,
    )
    assert [p.loss for p in seen] == pytest.approx(
        [cross_entropy(model, demonstrations, observation_weight=1.0), before], abs=1e-5
    )


def test_gradient_does_not_depend_on_micro_batches(model, demonstrations):
    norms = [
        train(copy.deepcopy(model), demonstrations, budget=budget, tokens_per_update=100_000).grad_norm
        for budget in (1, 50, 10_000)
    ]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("observation_weight", [0.0, 1.0])
@pytest.mark.slow
def test_loss_falls_and_the_answers_are_learnt(model, demonstrations, observation_weight):
    seen = []
    last = train(model, demonstrations, progress=seen.append, epochs=12, observation_weight=observation_weight)
    assert seen[-1] == last
    assert [p.update for p in seen] == list(range(1, last.updates + 1))
    assert cross_entropy(model, demonstrations, observation_weight=0.0) < 0.3 < seen[0].loss


@pytest.mark.parametrize("observation_weight", [0.0, 0.5])
def test_mistakes_are_not_learnt(model, observation_weight):
    sequence = TokenSequence()
    sequence.extend([2, 11], Source.PROMPT)
    sequence.extend([12, 13], Source.MISTAKE)
    sequence.extend([14], Source.OBSERVATION)
    sequence.extend([15, 3], Source.FORCED)
    shown = Trajectory(id="d", task_id="d", environment="echo", seed=0, group_id="d", sequences=[sequence])
    weights = {Source.PROMPT: observation_weight, Source.OBSERVATION: observation_weight, Source.FORCED: 1.0}
    ids = sequence.token_ids
    distribution = model(torch.from_numpy(ids).long()[None]).logits[0].log_softmax(-1).detach()
    each = [weights.get(Source(int(source)), 0.0) for source in sequence.sources]
    expected = -sum(each[t] * float(distribution[t - 1, ids[t]]) for t in range(1, len(ids))) / sum(each[1:])
    told = train(model, [shown], observation_weight=observation_weight, learning_rate=0.0)
    assert told.loss == pytest.approx(expected, rel=1e-4)


def test_sampled_tokens_are_learnt_too(model):
    sequence = TokenSequence()
    sequence.extend([2, 5], Source.PROMPT)
    sequence.extend_sampled([6, 7], logprobs=[-1.0, -1.0], versions=[0, 0])
    good = Trajectory(id="g", task_id="g", environment="echo", seed=0, group_id="g", sequences=[sequence])
    assert train(model, [good], epochs=40).loss < 0.1


def test_equal_seeds_train_alike(model, demonstrations):
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    for each, seed in ((model, 4), (twin, 4), (other, 5)):
        train(each, demonstrations, seed=seed)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_updates_hold_about_the_configured_tokens(model, demonstrations):
    tokens = []
    train(model, demonstrations, progress=lambda p: tokens.append(p.extra["tokens"]))
    sizes = [b - a for a, b in zip([0, *tokens], tokens, strict=False)]
    assert max(sizes) <= 60
    assert sum(size > 40 for size in sizes) >= len(sizes) - 2


def test_nothing_to_learn(model):
    sequence = TokenSequence()
    sequence.extend([2, 5], Source.PROMPT)
    empty = Trajectory(id="e", task_id="e", environment="echo", seed=0, group_id="e", sequences=[sequence])
    with pytest.raises(TrainingError, match="no tokens to learn from: got 1 demonstrations"):
        train(model, [empty])


def test_loss_that_is_not_finite(model, demonstrations):
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(TrainingError, match="not finite"):
        train(model, demonstrations)
