"""`make bench-check`: stored ratios against those of small benchmark runs."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from agentrl.errors import UnknownNameError, UsageError

ROOT = Path(__file__).parents[2]
STORED = ROOT / "docs" / "benchmarks.json"


@pytest.fixture(scope="module")
def guard() -> Any:
    spec = importlib.util.spec_from_file_location("bench_check", ROOT / "benchmarks" / "_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["bench_check"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("stored", "measured", "verdict"),
    [
        (7.7, 7.7, "ok"),
        (7.7, 12.0, "ok"),
        (7.7, 6.6, "ok"),
        (7.7, 6.5, "fell"),
        (0.28, 0.239, "ok"),
        (0.28, 0.237, "fell"),
        (2.0, 1.7, "fell"),  # by 15 % exactly
        (2.0, None, "not measured"),
    ],
)
def test_a_ratio_that_fell_by_15_percent_fails(guard: Any, stored: float, measured: float | None, verdict: str) -> None:
    assert guard.judge(stored, measured) == verdict


def test_a_ratio_is_a_figure_or_the_quotient_of_two(guard: Any) -> None:
    figures = {"ratio": 3.0, "ours.s": 2.0, "theirs.s": 5}
    assert guard.StoredRatio(name="a", figure="ratio", stored=1).measure(figures) == 3
    assert guard.StoredRatio(name="a", figure="theirs.s", over="ours.s", stored=1).measure(figures) == 2.5
    with pytest.raises(UsageError, match=r"no figure for speed: got ratio, ours.s, theirs.s, expected ours.seconds"):
        guard.StoredRatio(name="speed", figure="ratio", over="ours.seconds", stored=1).measure(figures)


def test_stored_ratios_are_those_of_benchmarks_that_accept_their_options(guard: Any) -> None:
    runs = guard.read_stored(STORED, [])
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for run in runs:
        source = ast.parse((ROOT / "benchmarks" / f"{run.benchmark}.py").read_text())
        (function,) = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
        assert run.options.keys() <= {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        assert f"agentrl bench {run.benchmark}" in text
    assert {run.benchmark for run in guard.read_stored(STORED, ["train", "engine"])} == {"engine", "train"}
    with pytest.raises(UnknownNameError, match="nonsense"):
        guard.read_stored(STORED, ["nonsense"])


BENCHMARK = '''"""A benchmark."""


def run(*, factor: float = 1.0) -> dict:
    assert factor > 0
    return {"peer": {"s": 6 * factor}, "own": {"s": 2}}
'''


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_guard_runs_benchmarks_and_prints_a_table(
    guard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "sleep.py").write_text(BENCHMARK)
    ratio = {"name": "peer / own", "figure": "peer.s", "over": "own.s", "stored": 3.2}
    stored = tmp_path / "stored.json"
    for factors, code, rows in (
        ([1.0], 0, ["3.20    3.00      -6%     ok"]),
        ([0.9, -1], 1, ["3.20    2.70      -16%    fell", "not measured"]),
    ):
        runs = [
            {"benchmark": "sleep", "options": {"factor": factor}, "conditions": "an idle core", "ratios": [ratio]}
            for factor in factors
        ]
        stored.write_text(json.dumps(runs))
        with pytest.raises(typer.Exit) as ended:
            guard.check(["sleep"], stored, tmp_path)
        printed = capsys.readouterr()
        assert ended.value.exit_code == code, printed.err
        assert all(row in printed.out for row in rows), printed.out
        assert ("stored conditions of sleep: an idle core" in printed.err) == bool(code)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_import_names_that_exist(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {"agentrl", "envs"}:
            name = str(node.module)
            module = importlib.import_module(name if name.startswith("agentrl") else f"agentrl.{name}")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{name}.{alias.name}")
