"""The benchmark of all environments gives the figures that the documentation shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.cli.bench import load_run

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "environments.py"


@pytest.mark.slow
def test_each_environment_gets_figures_or_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(BENCHMARK)
    module = sys.modules[run.__module__]
    for name, value in {"EPISODES": 2, "ROUNDS": 1, "RESETS": 3, "INSTANCES": 2}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "names", lambda _kind: ["alfworld", "guess_number", "hanoi"])
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    figures = run()
    assert set(figures["conditions"]) == {"processor", "python", "date"}
    measured = figures["environments"]
    assert "no games" in measured["alfworld"]["not_measured"]
    assert "expert_steps_per_s" in measured["guess_number"]
    assert measured["hanoi"].keys() == measured["guess_number"].keys()
    assert min(measured["hanoi"].values()) > 0
