"""Warnings about learning rates that are unusual for the model's size, with the usual rate and its source."""

import json

import pytest

from agentrl.config import load_config
from agentrl.config.usual_learning_rate import check_learning_rates, rate_rows, rate_warnings, usual_learning_rate

QWEN = {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@pytest.fixture
def half_billion(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return str(tmp_path)


def config_of(path, *words):
    return load_config(None, ["environment=guess_number", f"model.path={path}", *words])


@pytest.mark.parametrize(
    ("parameters", "lora", "expected"),
    [(494e6, False, 1e-6), (32e9, False, 1e-6), (494e6, True, 1e-5), (7e9, True, 1e-5), (5e5, False, 5e-4)],
)
def test_the_usual_rate(parameters, lora, expected):
    assert usual_learning_rate(parameters, lora=lora) == pytest.approx(expected, rel=0.02)


def test_adapters_take_more_in_very_short_runs(half_billion):
    lora = ("model.lora.rank=8", "trainer.learning_rate=1e-4")
    assert rate_warnings(config_of(half_billion, *lora, "trainer.steps=50")) == []
    (said,) = rate_warnings(config_of(half_billion, *lora, "trainer.steps=51"))
    assert "LoRA training of 494M parameters is about 1e-05" in said


def test_smaller_models_take_more():
    rates = [usual_learning_rate(size, lora=False) for size in (1e5, 5e5, 1e7, 135e6, 494e6, 1e9)]
    assert rates == sorted(rates, reverse=True)
    assert 2e-6 < rates[3] < 2e-5


def test_ten_times_the_usual_without_a_warm_up_is_named(half_billion):
    (said,) = rate_warnings(config_of(half_billion, "trainer.learning_rate=1e-5"))
    assert "trainer.learning_rate 1e-05 is 10 times the usual rate" in said
    assert "no warm-up (trainer.warmup_steps 0)" in said
    assert "full fine-tuning of 494M parameters is about 1e-06 (3e-07 to 3e-06)" in said


def test_a_warm_up_is_said_too(half_billion):
    (said,) = rate_warnings(config_of(half_billion, "trainer.learning_rate=1e-5", "trainer.warmup_steps=4"))
    assert "a warm-up of 4 optimizer steps" in said


@pytest.mark.parametrize("rate", ["1e-6", "2e-6", "5e-6", "3e-7", "0"])
def test_usual_rates_are_not_named(half_billion, rate):
    assert rate_warnings(config_of(half_billion, f"trainer.learning_rate={rate}")) == []


def test_adapters_take_ten_times_as_much(half_billion):
    lora = "model.lora={rank: 8}"
    assert rate_warnings(config_of(half_billion, lora, "trainer.learning_rate=1e-5")) == []
    (high,) = rate_warnings(config_of(half_billion, lora, "trainer.learning_rate=1e-4"))
    assert "LoRA training of 494M parameters is about 1e-05" in high
    (low,) = rate_warnings(config_of(half_billion, lora, "trainer.learning_rate=1e-6"))
    assert "1/10 of the usual rate" in low


@pytest.mark.parametrize(
    ("path", "rate", "is_far"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "5e-5", True),
        ("Qwen/Qwen3-0.6B", "5e-5", True),  # a public report: 57 % before, 2.4 % after
        ("Qwen/Qwen3-8B", "1e-6", False),
        ("Qwen/Qwen3-8B", "1e-5", True),
        ("example/smollm2-135m-instruct-x", "2e-5", False),
        ("example/unknown-model", "1e-1", False),
    ],
)
def test_a_model_that_is_not_here_is_judged_by_its_name(path, rate, is_far):
    config = config_of(path, f"trainer.learning_rate={rate}")
    assert any(check.is_far for check in check_learning_rates(config)) is is_far


def test_every_adapter_with_a_rate_of_its_own_is_judged(half_billion):
    words = ["model.lora={rank: 8}", "adapters={planner: {learning_rate: 2e-3}, worker: {learning_rate: 1e-5}}"]
    (said,) = rate_warnings(config_of(half_billion, *words))
    assert "adapters.planner.learning_rate 0.002 is 198 times" in said


def test_the_dry_run_shows_rate_and_range(half_billion):
    ((what, rate, how),) = rate_rows(config_of(half_billion, "trainer.learning_rate=1e-5"))
    assert (what, rate) == ("learning rate", "1e-05")
    assert how == "trainer.learning_rate; usual for full fine-tuning of 494M parameters: 3e-07 to 3e-06"


def test_a_warm_up_that_the_run_does_not_finish_is_named(half_billion):
    words = ("trainer.learning_rate=1e-6", "trainer.steps=10", "trainer.mini_batches=2")
    (warning,) = rate_warnings(config_of(half_billion, *words, "trainer.warmup_steps=40"))
    assert "trainer.warmup_steps 40 is not below the 20 optimizer steps" in warning
    assert "never more than 50% of trainer.learning_rate 1e-06" in warning
    assert rate_warnings(config_of(half_billion, *words, "trainer.warmup_steps=19")) == []
    assert rate_warnings(config_of(half_billion, *words)) == []
    roles = ["model.lora={rank: 8}", "adapters={planner: {learning_rate: 1e-5, warmup_steps: 30}, worker: {}}"]
    (warning,) = rate_warnings(config_of(half_billion, "trainer.learning_rate=1e-5", *words[1:], *roles))
    assert "adapters.planner.warmup_steps 30 is not below the 20 optimizer steps" in warning
