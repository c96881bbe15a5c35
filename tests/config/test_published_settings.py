"""The configs of verl-agent's ALFWorld and WebShop runs have the published settings and updates."""

import pytest

from agentrl.config import load_config
from agentrl.config.estimate import derive

ALFWORLD = ("alfworld/gigpo_qwen2.5-1.5b", "alfworld/grpo_qwen2.5-1.5b")
WEBSHOP = (
    "webshop/published_gigpo_qwen2.5-1.5b",
    "webshop/gigpo_qwen2.5-1.5b",
    "webshop/grpo_qwen2.5-1.5b",
)


@pytest.mark.parametrize(
    ("name", "rows", "updates"), [*((name, 256, 25) for name in ALFWORLD), *((name, 64, 30) for name in WEBSHOP)]
)
def test_batches_and_optimizer_are_the_published_ones(name, rows, updates):
    config = load_config(name)
    trainer, algorithm, numbers = config.trainer, config.algorithm, derive(config)
    assert (trainer.tasks_per_step, algorithm.group_size, trainer.steps) == (16, 8, 150)
    assert (trainer.mini_batch_rows, numbers.updates_per_step, numbers.optimizer_steps) == (
        rows,
        updates,
        150 * updates,
    )
    assert (trainer.adam.betas, trainer.adam.weight_decay, trainer.learning_rate) == ((0.9, 0.999), 0.01, 1e-6)
    assert (algorithm.kl_coef, algorithm.reference.kl_estimator) == (0.01, "k3")
    assert algorithm.loss_options == {"clip_low": 0.2, "clip_high": 0.2}


def test_norms_and_splits_are_the_published_ones():
    options = {name: load_config(name).algorithm.advantage_options for name in (*ALFWORLD, *WEBSHOP)}
    assert options[ALFWORLD[0]] == {"omega": 1.0, "gamma": 0.95}
    assert options[WEBSHOP[0]] == options[WEBSHOP[1]] == {"omega": 1.0, "gamma": 0.95, "normalize": False}
    assert options[ALFWORLD[1]] == options[WEBSHOP[2]] == {}
    assert [(load_config(name).evaluation.split, load_config(name).evaluation.tasks) for name in ALFWORLD] == [
        ("valid_seen", 128),
        ("valid_seen", 128),
    ]
