"""Memory of a step: no [tokens, vocabulary] tensor, and little growth when the vocabulary doubles."""

import dataclasses

import pytest
import torch
from support.models import tiny_model

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.training.diagnostics.memory_trace import TensorMemory
from agentrl.training.trainer import Trainer

from .test_memory_plan import LENGTH, long_answers

MEGABYTES = 1
"""Of logits at once: small, so that the vocabulary of the test can be."""


def memory_of_a_step(vocabulary, **settings):
    """Of a second step: moments are there already."""
    model = tiny_model(vocab_size=vocabulary, hidden_size=32)
    trainer = Trainer(
        model,
        AlgorithmConfig(group_size=4, **settings),
        TrainerConfig(tokens_per_micro_batch=2 * LENGTH),
        seed=0,
        max_tokens=LENGTH,
    )
    for scorer in (
        trainer._policy,
        *(signal.runner for signal in trainer.signals.values() if signal.name == "reference"),
    ):
        layout = dataclasses.replace(scorer.passes.layout, logits_megabytes=MEGABYTES)
        scorer.passes = dataclasses.replace(scorer.passes, layout=layout)
    trajectories = long_answers(vocabulary)
    trainer.step(trajectories, temperature=1.0)
    with TensorMemory() as memory:
        trainer.step(trajectories, temperature=1.0)
    return model, memory


@pytest.mark.parametrize(
    "settings", [{}, {"kl_coef": 0.1, "entropy_coef": 0.1}, {"filters": {"k1": {"limit": 1e9}}}], ids=str
)
def test_no_tensor_of_tokens_by_vocabulary_is_made(settings):
    vocabulary = 8192
    model, memory = memory_of_a_step(vocabulary, **settings)
    head = model.get_output_embeddings().weight.numel()
    assert memory.largest <= max(head, (MEGABYTES << 20) // 4)
    assert memory.largest < 2 * (LENGTH - 4) * vocabulary / 4, (
        "the targets of a micro-batch have four times as many logits"
    )


@pytest.mark.slow
def test_memory_hardly_grows_with_the_vocabulary():
    """Beside what is the embedding's own: weights, their gradient, and what is about to be added to that."""
    beside = []
    for vocabulary in (8192, 16384):
        model, memory = memory_of_a_step(vocabulary)
        embedding = model.get_input_embeddings().weight.numel() * 4
        beside.append(memory.peak - 3 * embedding)
    assert beside[1] < 1.1 * beside[0], beside


def test_tensors_are_counted_while_they_live():
    with TensorMemory() as memory:
        first = torch.zeros(1000)
        view = first[:10]
        del first
        assert memory.live == 4000, "the view keeps it"
        second = torch.ones(500)
        assert (memory.live, memory.peak) == (6000, 6000)
        del view
        third = second + 1
        assert (memory.live, memory.peak, memory.largest) == (4000, 6000, 1000)
    assert third.numel() == 500
