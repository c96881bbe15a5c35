import json
from pathlib import Path

import pytest

from agentrl.cli.bench import load_run
from agentrl.errors import UsageError

ROOT = Path(__file__).parents[2]


def test_the_engine_benchmark_serves_the_same_tokens_as_generate():
    run = load_run(ROOT / "benchmarks" / "engine.py")
    result = json.loads(json.dumps(run(sessions=5, turns=3, max_num_seqs=4)))
    assert result["same_tokens"] == 1.0
    assert result["turns"] == 15
    assert 90 <= result["sampled_tokens"] <= 210
    assert result["ratio"] > 0


@pytest.mark.slow
def test_the_rollout_benchmark_compares_the_runtime_with_a_bare_client_on_a_stand_in():
    run = load_run(ROOT / "benchmarks" / "rollout.py")
    figures = run(engine="vllm", stand_in=True, episodes=4, turns=2, concurrency=4, rounds=1)
    assert figures["turns_per_episode"] == 2
    assert 0 < figures["bare_cpu_ms_per_turn"] < figures["cpu_ms_per_turn"]
    assert figures["cpu_ms_per_turn_without_http"] > 0


@pytest.mark.parametrize("options", [{}, {"engine": "sglang"}, {"engine": "vllm", "url": "http://localhost:1"}])
def test_the_stand_in_takes_the_place_of_a_vllm_server_alone(options):
    with pytest.raises(UsageError):
        load_run(ROOT / "benchmarks" / "rollout.py")(stand_in=True, **options)
