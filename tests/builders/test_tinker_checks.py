"""Settings that a Tinker-compatible service cannot follow."""

from __future__ import annotations

import pytest

from agentrl.builders.tinker import check_tinker
from agentrl.config import load_config
from agentrl.errors import ConfigError

FITTING = [
    "environment=guess_number",
    "engine={type: tinker, url: 'http://service.example.com'}",
    "model.lora={rank: 4}",
    "algorithm.loss_options={dual_clip: null}",
]


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("algorithm.shaping={ares: {}}", "algorithm.shaping"),
        ("algorithm.shaping={kl: {coef: 0.1}}", "algorithm.shaping"),
        ("sampling.first_token={temperature: 30, top_k: 16}", "sampling.first_token"),
        ("trainer.mini_batch_rows=4", "trainer.mini_batch_rows"),
    ],
)
def test_settings_that_the_service_would_ignore_are_refused(word: str, key: str) -> None:
    check_tinker(load_config(None, FITTING))
    with pytest.raises(ConfigError, match=f"^{key} does not work with engine tinker"):
        check_tinker(load_config(None, [*FITTING, word]))
