"""The scripts for GPUs run on the CPU, too, where their figures mean nothing; and the benchmark of vocabularies."""

import json
from pathlib import Path

import pytest

from agentrl.cli.bench import find_benchmarks, load_run

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "agreement": {"sessions": 2, "prompt": 8, "tokens": 6},
    "attention": {"sequences": 4, "prompt": 20, "answer": 6, "rounds": 1},
    "steps": {"sequences": 4, "prompt": 20, "answer": 40, "budget": 120, "rounds": 1},
    "local_engine": {"sessions": (1, 2), "turns": 2, "prompt": 8, "answer": 3, "observation": 2},
    "transports": {"megabytes": 1, "rounds": 2},
    "liger": {"sequences": 4, "prompt": 20, "answer": 6, "rounds": 1},
}


@pytest.fixture(scope="module")
def results():
    found = find_benchmarks(FOLDER / "gpu")
    assert set(found) == set(SMALL)
    return {name: json.loads(json.dumps(load_run(found[name])(**SMALL[name]))) for name in SMALL}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.slow
def test_figures_of_a_cpu_are_said_to_mean_nothing(results, name):
    assert results[name]["device"] == "cpu"
    assert "mean nothing" in results[name]["note"]


def test_trainer_and_engine_agree(results):
    assert results["agreement"]["float32"]["prob_abs_mean"] < 1e-5
    assert results["agreement"]["bfloat16"]["prob_abs_mean"] < 0.01
    assert results["agreement"]["bfloat16"]["tokens"] == 12


def test_attention_back_ends_are_equal(results):
    for name in ("packed", "shared"):
        assert results["attention"]["float32"][name]["gradient_difference"] < 1e-4
        assert results["attention"]["bfloat16"][name]["gradient_difference"] < 0.1


def test_steps_take_about_what_was_planned(results):
    assert 0.9 < results["steps"]["planned_over_measured"] < 1.5
    assert results["steps"]["utilization"] is None


def test_what_is_sent_arrives(results):
    assert results["transports"]["broadcast"]["equal"] is True
    assert results["transports"]["cuda_ipc"] == "needs a GPU"
    assert "needs a GPU" in results["liger"]["liger"]
    assert results["local_engine"]["2_sessions"]["sampled_tokens_per_s"] > 0


@pytest.mark.slow
def test_the_vocabulary_benchmark_separates_the_heads_own_memory():
    found = load_run(FOLDER / "vocabulary.py")(vocabulary=4096, width=16, budget=512)
    once, twice = found["once"], found["twice"]
    assert twice["own_megabytes"] == 2 * once["own_megabytes"] == 2 * 4 * 4 * 4096 * 16 / 2**20
    assert once["beside_megabytes"] == once["peak_megabytes"] - once["own_megabytes"] > 0
    assert once["largest_tensor"] <= 512 * 4096, "a micro-batch's logits fit into one chunk here"
