"""The benchmark of the runtime runs."""

from pathlib import Path

from agentrl.cli.bench import load_run


def test_the_benchmark_measures_every_loop():
    run = load_run(Path(__file__).parents[2] / "benchmarks" / "rollout.py")
    figures = run(episodes=5, turns=3)
    assert [figures[loop]["turns"] for loop in ("react_text", "step_independent")] == [15, 15]
    assert figures["react_text"]["cpu_ms_per_turn"] > 0
