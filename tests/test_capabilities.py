"""The tables of docs/capabilities.md have a mark only where a collected test says so."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support.capabilities import claims_of

ROOT = Path(__file__).parent.parent
MARK = pytest.mark.capability


def item(*marks: pytest.MarkDecorator, **params: object) -> SimpleNamespace:
    found = [mark.mark for mark in marks]
    return SimpleNamespace(callspec=SimpleNamespace(params=params), iter_markers=lambda name: found)


def test_a_marker_names_parameters_of_its_test() -> None:
    plain = MARK(["{engine}", "attached {engine}"], "weights {transport}")
    assert claims_of(item(plain, engine="vllm", transport="tensor")) == {
        ("vllm", "weights tensor", False),
        ("attached vllm", "weights tensor", False),
    }
    assert claims_of(item(MARK("{engine}", "stop", "seeds", without="skipped"), engine="x", skipped=["seeds"])) == {
        ("x", "stop", False)
    }
    assert claims_of(item(MARK("sglang", "images", refused=True))) == {("sglang", "images", True)}
    assert claims_of(item()) == set()


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("capability_tables")


def collect(tables: ModuleType, monkeypatch: pytest.MonkeyPatch, *claims: tuple[str, str, bool]) -> dict:
    lines = "".join(f"capability {json.dumps(claim)}\n" for claim in claims)
    done = SimpleNamespace(returncode=0, stdout=f"noise\n{lines}", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found: dict = tables.collected.__wrapped__()
    return found


def test_cells_are_filled_by_claims_alone(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = [("vllm", "images", True), ("local", "images", False), ("local", "images", False)]
    found = collect(tables, monkeypatch, *claims)
    assert found == {("vllm", "images"): True, ("local", "images"): False}
    monkeypatch.setattr(tables, "collected", lambda: found)
    (row,) = [line for line in tables.engines_table().splitlines() if line.startswith("| images |")]
    assert row == "| images | ✓ | refused |  |  |  |  |"


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ([("vllm", "wings", False)], "no table .* has a cell for vllm / wings"),
        ([("advantage nosuch", "mixture", False)], "advantage nosuch / mixture"),
        ([("vllm", "images", True), ("vllm", "images", False)], "one test proves"),
    ],
)
def test_claims_without_a_cell_or_against_each_other_are_errors(tables, monkeypatch, claims, message) -> None:
    with pytest.raises(SystemExit, match=message):
        collect(tables, monkeypatch, *claims)


def test_tests_that_cannot_be_collected_are_an_error(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=2, stdout="ImportError: no such module", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match="cannot be collected:\nImportError"):
        tables.collected.__wrapped__()
