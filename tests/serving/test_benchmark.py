import json
from pathlib import Path

from agentrl.cli.bench import load_run

ROOT = Path(__file__).parents[2]


def test_the_engine_benchmark_serves_the_same_tokens_as_generate():
    run = load_run(ROOT / "benchmarks" / "engine.py")
    result = json.loads(json.dumps(run(sessions=5, turns=3, slots=4)))
    assert result["same_tokens"] == 1.0
    assert result["turns"] == 15
    assert 90 <= result["sampled_tokens"] <= 210
    assert result["ratio"] > 0
