"""`agentrl bench NAME --versus PEER`: choice of peers, the check of the work, runs until success, and tables."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentrl.cli.bench import load_run
from agentrl.errors import AgentRLError, UsageError

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peers.compare")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("benchmark_tables")


@pytest.mark.parametrize(
    ("benchmark", "options", "message"),
    [
        ("rollout", {"versus": "nonsense"}, "unknown peer: got versus=nonsense, expected all, or some of trl"),
        ("rollout", {"versus": "trl", "engine": "sglang"}, "does not use this engine"),
        ("rollout", {"versus": "trl", "turns": 1}, "too small"),
        ("rollout", {"versus": "trl", "at_once": [0]}, "too small"),
        ("rollout", {"versus": "trl", "episodes": 5}, "has a model of its own"),
        (
            "gateway",
            {"versus": "nonsense"},
            "unknown peer: got versus=nonsense, expected all, or some of agentl",
        ),
        ("gateway", {"versus": "all", "rounds": 0}, "too small"),
        ("e2e", {"versus": "verifiers"}, "unknown peer: got versus=verifiers, expected trl"),
    ],
)
def test_bad_options_are_refused_with_what_is_expected(benchmark: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_run(BENCHMARKS / f"{benchmark}.py")(**options)


@pytest.mark.parametrize(("benchmark", "peer"), [("rollout", "trl"), ("gateway", "litellm"), ("e2e", "trl")])
def test_a_peer_that_is_not_installed_is_named_with_its_make_target(
    benchmark: str, peer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGENTRL_PEERS", str(tmp_path))
    with pytest.raises(UsageError, match=rf"the peer {peer} is not installed.*make bench-peers"):
        load_run(BENCHMARKS / f"{benchmark}.py")(versus=peer)


def test_the_makefile_installs_the_peers_that_the_benchmarks_look_for(compare: ModuleType) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (line,) = [line for line in makefile.splitlines() if line.startswith("PEER_FOLDERS :=")]
    folders = importlib.import_module("peers.installed").PEERS
    assert sorted(line.partition(":=")[2].split()) == sorted(folders.values())


class Recorded:
    """A side that has played before: its cabinets so far."""

    name, cabinet = "trl", 7


def test_a_side_that_did_less_is_refused(compare: ModuleType) -> None:
    comparison = compare.Comparison(url="", turns=3, answer_tokens=10)
    checksum = compare.Tally.checksum_of(range(7, 11))
    figures = {"calls": 4, "checksum": checksum, "ended": 2}
    counts = {"turns": 6, "last": 2}
    comparison._check(Recorded, figures, counts, 2)
    for worse in (
        {"calls": 3},
        {"checksum": compare.Tally.checksum_of(range(4))},  # cabinets of an earlier round
        {"ended": 1},
    ):
        with pytest.raises(AgentRLError, match="trl has not done the same work"):
            comparison._check(Recorded, {**figures, **worse}, counts, 2)
    with pytest.raises(AgentRLError, match="turns of the server"):
        comparison._check(Recorded, figures, {"turns": 5, "last": 2}, 2)


def test_a_run_that_is_killed_is_not_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runs = importlib.import_module("peers.e2e_runs")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"success/mean": 0.5, "tokens/sampled": 10}\n')
    words = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    with pytest.raises(AgentRLError, match="has failed: got exit code -9 after 1 steps"):
        runs._follow(words, tmp_path / "run", 0.85, 60.0, None)


class Playing:
    """A side that plays at once, or does not finish."""

    def __init__(self, name: str, failure: Exception | None = None) -> None:
        self.name, self.failure, self.cabinet, self.plays = name, failure, 0, 0
        self.rounds: dict[int, list[dict[str, float]]] = {}

    async def play(self, episodes: int, at_once: int) -> dict[str, float]:
        self.plays += 1
        if self.failure is not None:
            raise self.failure
        return {"seconds": 1.0, "cpu_s": 0.1, "grown_bytes": 0, "resident_bytes": 2**20}


async def test_a_side_that_does_not_finish_is_recorded_and_costs_no_other_figures(
    monkeypatch: pytest.MonkeyPatch, compare: ModuleType, tables: ModuleType
) -> None:
    async def no_counts(*_: object) -> dict[str, int]:
        return {}

    monkeypatch.setattr(compare.Comparison, "_counts", no_counts)
    monkeypatch.setattr(compare.Comparison, "_check", lambda *_: None)
    stuck, bare = Playing("trl", compare.UnfinishedError("trl does not finish")), Playing("bare")
    comparison = compare.Comparison(url="", turns=3, answer_tokens=10, sides=[stuck, bare])
    with pytest.raises(AgentRLError, match="does not finish"):  # none of its episodes can be compared
        await comparison.round(8, 8, kept=False)
    for _ in range(2):
        await comparison.round(4, 4)
    assert (stuck.plays, bare.plays) == (2, 3)
    assert comparison.unfinished == {"trl": 4}
    assert comparison.figures()["bare"]["4"]["cpu_ms_per_turn"] == pytest.approx(1000 * 0.1 / 12)
    conditions = {"date": "2026-01-01", "processor": "P", "cores": 2, "load": 0, "rounds": 2, "versions": {}}
    text = tables.conditions_text({"conditions": conditions | {"unfinished": comparison.unfinished}})
    assert text.endswith(f"Did not finish its episodes: {tables.NAMES['trl']} with 4 at once.")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sides_play_the_same_episodes_by_turns(monkeypatch: pytest.MonkeyPatch, compare: ModuleType) -> None:
    versus = importlib.import_module("peers.rollout_versus")
    monkeypatch.setattr(compare, "chosen_sides", lambda _: list(compare.LIMITS))
    import asyncio

    found = asyncio.run(versus.compare_rollouts("all", engine=None, at_once=[4], rounds=2, turns=3))
    assert set(found["sides"]) == {"agentrl", "agentrl_in_process", "bare"}
    for rows in found["sides"].values():
        row = rows["4"]
        assert 0 < row["cpu_ms_lowest"] <= row["cpu_ms_per_turn"] <= row["cpu_ms_highest"]
    assert found["sides"]["bare"]["4"]["cpu_ms_per_turn"] < found["sides"]["agentrl"]["4"]["cpu_ms_per_turn"]


PROGRAM = """
import json, sys, time
with open(sys.argv[1] + "/metrics.jsonl", "w") as file:
    for success in (0.2, 0.9, 0.7, 0.95, 0.9, 0.1):
        file.write(json.dumps({"success/mean": success, "tokens/sampled": 100}) + "\\n")
        file.flush()
        time.sleep(float(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_run_ends_once_three_steps_together_succeed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runs = importlib.import_module("peers.e2e_runs")
    folder = tmp_path / "run"
    folder.mkdir()
    words = [sys.executable, "-c", PROGRAM, str(folder)]
    monkeypatch.setattr(runs, "POLL_S", 0.05)
    learned = runs._follow([*words, "1"], folder, 0.85, 60.0, None)
    assert (learned.reached, learned.steps, learned.sampled_tokens) == (True, 4, 400)  # not after 0.9 alone
    assert learned.success == pytest.approx(0.85)
    assert not runs._follow([*words, "0"], folder, 0.99, 60.0, None).reached
    with pytest.raises(AgentRLError, match="has failed"):
        runs._follow([sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "none", 0.9, 60.0, None)


CONDITIONS = {"date": "2026-11-26", "processor": "P", "cores": 2, "load": 0.1, "rounds": 3, "server": "instant"}


def rollout_entry(**cpu_ms: float) -> dict[str, Any]:
    def row(value: float) -> dict[str, float]:
        return {
            "cpu_ms_per_turn": value,
            "cpu_ms_lowest": value / 2,
            "cpu_ms_highest": 2 * value,
            "turns_per_s": 1000 / value,
            "tokens_per_s": 1.0,
            "kb_per_episode": 1.0,
        }

    sides = {name: {"64": row(value)} for name, value in cpu_ms.items()}
    return {"benchmark": "rollout", "conditions": CONDITIONS, "sides": sides}


def test_tables_show_the_newest_comparison_and_all_of_the_history(tables: ModuleType) -> None:
    entries = [rollout_entry(agentrl=0.9, trl=2.0), rollout_entry(agentrl=0.8, bare=0.1, trl=0.5, verifiers=8.0)]
    shown = tables.comparison_table(entries, "rollout", "instant")
    assert "Measured on 2026-11-26: 2 cores of P, load 0.1, medians of 3 rounds." in shown
    assert "| agentrl | 64 | 0.80 (0.40 to 1.60) |" in shown
    assert "0.90" not in shown
    assert tables.comparison_table(entries, "rollout", "vllm") == tables.NOT_MEASURED
    history = tables.history_table(entries).splitlines()[2:]
    assert "| 0.90 | 2.00 (TRL 1.16.0) | 2.2 | 0.1 |" in history[0]
    assert "| 0.80 | 0.50 (TRL 1.16.0) | 0.6 | 0.1 |" in history[1]


def test_runs_until_success_are_shown_with_their_ratios_by_seed(tables: ModuleType) -> None:
    def learned(seconds: float, *, reached: bool) -> dict[str, Any]:
        figures = {"seconds": seconds, "cpu_s": seconds, "sampled_tokens": 1000, "steps": 9, "reached": reached}
        step = (seconds - 20) / 8  # the first step is not counted, because loading is part of it
        return figures | {"curve": [[20 + n * step, 20 + n * step, 0.5] for n in range(9)]}

    own = {"0": learned(100.0, reached=True), "1": learned(300.0, reached=True)}
    peer = {"0": learned(900.0, reached=True), "1": learned(1500.0, reached=False)}
    conditions = CONDITIONS | {"success": 0.85, "threads": 1, "rounds": 2}
    shown = tables.comparison_table(
        [{"benchmark": "e2e", "conditions": conditions, "sides": {"agentrl": own, "trl": peer}}], "e2e"
    )
    assert "1 core of P, load 0.1, 2 seeds." in shown
    assert "| agentrl | 200 (100 to 300) | 200 (100 to 300) | 1,000 (1,000 to 1,000) | 9 (9 to 9) |" in shown
    assert "| 22.5 (10.0 to 35.0) | 202.50 (90.00 to 315.00) | 2 of 2 |" in shown
    assert "| TRL 1.16.0 | 1,200 (900 to 1,500) |" in shown
    assert "lowest to highest): seconds 7.0 (5.0 to 9.0), CPU seconds 7.0 (5.0 to 9.0)" in shown
    assert "CPU seconds per step 8.1 (5.3 to 11.0)" in shown


def test_a_peer_that_is_ahead_is_listed_and_a_limit_is_not(tables: ModuleType) -> None:
    ahead = tables.ahead_table([rollout_entry(agentrl=0.8, bare=0.1, trl=0.5, verifiers=8.0)])
    assert "| rollout, 64 at once | CPU ms per turn | TRL 1.16.0 | 0.50 | 0.80 |" in ahead
    assert "turns/s | TRL 1.16.0 | 2,000 | 1,250 |" in ahead
    assert "bare client" not in ahead
    assert "verifiers" not in ahead
    vllm = rollout_entry(agentrl=0.9, trl=0.7)
    vllm["conditions"] = CONDITIONS | {"server": "vllm"}
    both = tables.ahead_table([rollout_entry(agentrl=0.8, trl=0.5), vllm])
    assert "| rollout, 64 at once | CPU ms per turn | TRL 1.16.0 | 0.50 | 0.80 |" in both
    assert "| rollout, on vLLM, 64 at once | CPU ms per turn | TRL 1.16.0 | 0.70 | 0.90 |" in both
    assert tables.ahead_table([rollout_entry(agentrl=0.4, trl=0.5)]) == "In none of the figures above."
    assert tables.ahead_table([]) == tables.NOT_MEASURED


def test_figures_are_recorded_and_files_without_a_comparison_are_refused(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("bench_record", BENCHMARKS / "_record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    figures, recorded = tmp_path / "figures.json", tmp_path / "recorded.json"
    entry = rollout_entry(agentrl=0.8, trl=0.5)
    figures.write_text(json.dumps({key: entry[key] for key in ("conditions", "sides")}))
    module.record("rollout", figures, recorded)
    module.record("rollout", figures, recorded)
    assert json.loads(recorded.read_bytes()) == [entry, entry]
    with pytest.raises(UsageError, match="no comparison of this name"):
        module.record("engine", figures, recorded)
    figures.write_text('{"cpu_ms": 1}')
    with pytest.raises(UsageError, match="has no comparison"):
        module.record("rollout", figures, recorded)
    figures.write_text("no JSON")
    with pytest.raises(UsageError, match="has no figures"):
        module.record("rollout", figures, recorded)
