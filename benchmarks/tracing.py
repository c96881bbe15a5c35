"""CPU time per turn of runs with and without tracing, in alternation.

A scratch model trains on `guess_number`; the local engine, trainer and tracker share the process. OpenTelemetry exports
to memory, so that no collector is needed (it needs the OTLP exporter's package).

    agentrl bench tracing --json tracing.json
    agentrl bench tracing trackers=[trace] rounds=5
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import agentrl
from agentrl.observe.metrics import read_metrics
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trace_trackers import OpenTelemetryTracker

SETTINGS = (
    "model.scratch={layers: 1, hidden_size: 32, heads: 2, kv_heads: 1, max_context: 512}",
    "agent={loop: react_text, max_answer_tokens: 8, max_turns: 8}",
    "algorithm.group_size=8",
    "trainer={tasks_per_step: 16, learning_rate: 1e-3}",
    "checkpoint.every=1000",
)


class MemoryTracker(OpenTelemetryTracker):
    """Tracker that keeps OpenTelemetry spans in memory."""

    def make_exporter(self) -> Any:
        """Return an exporter that needs no collector."""
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        return InMemorySpanExporter()


def run(*, trackers: list[str] | None = None, rounds: int = 3, steps: int = 6) -> dict[str, Any]:
    """Return CPU milliseconds per turn without a tracker and with each, and the ratios.

    Args:
        trackers: ``trace``, ``opentelemetry``, or both, the default.
        rounds: Runs of each kind.
        steps: Training steps of a run.
    """
    kinds = {"": "", "trace": "trace", "opentelemetry": "tracing:MemoryTracker"}
    chosen = ["", *(trackers or ("trace", "opentelemetry"))]
    measured: dict[str, list[float]] = {kind: [] for kind in chosen}
    for number in range(rounds):
        for kind in chosen:
            measured[kind].append(_cpu_per_turn(kinds[kind], steps, number))
    figures: dict[str, Any] = {"rounds": rounds, "steps": steps}
    off = statistics.median(measured[""])
    for kind, values in measured.items():
        figures[f"{kind or 'off'}_ms"] = values
        if kind:
            pairs = zip(values, measured[""], strict=True)
            figures[f"{kind}_ratio"] = statistics.median(on / alone for on, alone in pairs)
    return {**figures, "off_median_ms": off}


def _cpu_per_turn(tracker: str, steps: int, seed: int) -> float:
    """Train, and return the CPU milliseconds per turn after the first step."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        trained = agentrl.train(
            env="guess_number",
            model="scratch",
            steps=steps,
            overrides=[*SETTINGS, f"run.directory={folder}", f"run.seed={seed}", f"trackers=[{tracker}]"],
            progress=False,
        )
        seconds = time.process_time() - began
        lines = read_metrics(RunDirectory(trained.folder).metrics_file)
        turns = sum(line["turns/mean"] * line["episodes"] for line in lines)
    return 1000 * seconds / turns
