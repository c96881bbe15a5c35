"""Makes the tables of docs/capabilities.md from the tests that prove each cell.

Tests have the marker ``capability`` (tests/support/capabilities.py). They are collected, not run: CI runs them.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.registry import Kind, names
from agentrl.testing.engine_check import RULES

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
MARKED = re.compile(r"mark\.capability\(")
PREFIX = "capability "
YES, REFUSED = "✓", "refused"
COLLECT_S = 600

ENGINES: Mapping[str, str] = {
    "local": "`local`",
    "vllm": "`vllm`, launched",
    "sglang": "`sglang`, launched",
    "attached vllm": "`vllm`, attached",
    "attached sglang": "`sglang`, attached",
    "scripted": "`scripted`",
}
FEATURES: Mapping[str, str] = {
    "evaluation": "evaluations, token by token as the local engine",
    "training": "whole training runs",
    "prompt log-probabilities": "log-probabilities of given tokens (served teacher)",
    "stop strings": "stop strings, cut at the token that completes them",
    "cuts": "`top_k`, `top_p`, `min_p` with log-probabilities before the cut",
    "schemas": "answers held to a JSON schema or a tool call",
    "tool parsers": "tool calls, read as the server's own parsers read them",
    "weights collective": "weights by broadcast",
    "weights shared_memory": "weights by files in shared memory",
    "weights cuda_ipc": "weights by CUDA IPC",
    "weights tensor": "weights in the request",
    "LoRA": "LoRA adapters, without the base model",
    "several adapters": "several LoRA adapters in one run",
    "images": "images",
    "routing replay": "routed experts of MoE models, for replay",
    "sleep": "releases its memory while the trainer trains",
    "restart": "a killed server comes back with the current weights",
}
"""Features in addition to the rules of `agentrl.testing.check_engine`."""
MODES: Mapping[str, str] = {
    "staleness 0": "synchronous",
    "staleness 1": "one version old",
    "staleness 4": "four versions old",
    "one sequence": "one conversation",
    "several sequences": "a prompt for each turn",
    "several roles": "several roles",
    "mixture": "own algorithm in a mixture",
    "distributed": "several ranks",
}
RULE_NAMES = tuple(rule.name for rule in RULES)


@functools.cache
def collected() -> Mapping[tuple[str, str], bool]:
    """Return whether a capability is refused, by subject and feature, as collected tests prove it.

    Raises:
        SystemExit: the tests cannot be collected, or two of them contradict each other.
    """
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if MARKED.search(path.read_text(encoding="utf-8"))]
    words = [sys.executable, "-m", "pytest", "-p", "support.capabilities", "-p", "no:cacheprovider", "--collect-only"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": ""}
    found = subprocess.run(
        [*words, *map(str, files)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=COLLECT_S,
        check=False,
    )
    if found.returncode:
        sys.exit(
            f"the tests of docs/capabilities.md cannot be collected:\n{found.stdout[-2000:]}{found.stderr[-2000:]}"
        )
    claims: dict[tuple[str, str], bool] = {}
    for line in found.stdout.splitlines():
        if line.startswith(PREFIX):
            subject, feature, refused = json.loads(line.removeprefix(PREFIX))
            if claims.setdefault((subject, feature), refused) != refused:
                sys.exit(f"one test proves that {subject} has {feature!r}, and another that it is refused")
    _check_names(claims)
    return claims


def _check_names(claims: Mapping[tuple[str, str], bool]) -> None:
    """Check that every claim has a cell.

    Raises:
        SystemExit: a test names an unknown subject or feature.
    """
    engines = {(engine, feature) for engine in ENGINES for feature in (*RULE_NAMES, *FEATURES)}
    algorithms = {(f"{kind} {name}", mode) for kind, name in _algorithms() for mode in MODES}
    if unknown := sorted(set(claims) - engines - algorithms):
        sys.exit(f"no table of docs/capabilities.md has a cell for {', '.join(map(' / '.join, unknown))}")


def _algorithms() -> list[tuple[str, str]]:
    return [(kind.value, name) for kind in (Kind.ADVANTAGE, Kind.LOSS) for name in names(kind)]


def engines_table() -> str:
    """Return the table of engines and features."""
    rows = {rule.name: f"{rule.name.replace('_', ' ')}: {rule.demand}" for rule in RULES} | dict(FEATURES)
    return _table("feature", rows, ENGINES, lambda feature, engine: (engine, feature))


def modes_table(kind: Kind) -> str:
    """Return the table of estimators or losses, and modes."""
    rows = {name: f"`{name}`" for name in names(kind)}
    return _table(kind.value, rows, MODES, lambda name, mode: (f"{kind.value} {name}", mode))


def _table(corner: str, rows: Mapping[str, str], columns: Mapping[str, str], key: object) -> str:
    assert callable(key)
    lines = [_line([corner, *columns.values()]), _line(["---"] + [":-:"] * len(columns))]
    for row, title in rows.items():
        cells = [collected().get(key(row, column)) for column in columns]
        lines.append(_line([title, *("" if cell is None else REFUSED if cell else YES for cell in cells)]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
