"""The benchmark of the runtime runs."""

import importlib.util
from pathlib import Path


def test_the_benchmark_measures_every_loop():
    path = Path(__file__).parents[2] / "benchmarks" / "rollout.py"
    specification = importlib.util.spec_from_file_location("benchmark_of_rollout", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    figures = module.run(episodes=5, turns=3)
    assert [figures[loop]["turns"] for loop in ("react_text", "step_independent")] == [15, 15]
    assert figures["react_text"]["cpu_ms_per_turn"] > 0
