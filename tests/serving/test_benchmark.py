import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_engine_benchmark_serves_the_same_tokens_as_generate():
    spec = importlib.util.spec_from_file_location("engine_benchmark", ROOT / "benchmarks" / "engine.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    result = json.loads(json.dumps(benchmark.run(sessions=5, turns=3, slots=4)))
    assert result["same_tokens"] == 1.0
    assert result["turns"] == 15
    assert 90 <= result["sampled_tokens"] <= 210
    assert result["ratio"] > 0
