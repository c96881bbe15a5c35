"""Model card of an exported model: how it was trained, with which results and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from agentrl.config.config import SCRATCH
from agentrl.evaluation.report import markdown_table, tables
from agentrl.evaluation.result import EvaluationResult, estimate_text
from agentrl.evaluation.run_report import ReportedRun, commands, run_tables

CARD = "README.md"


def model_card(run: ReportedRun, results: Mapping[str, EvaluationResult], *, is_adapter: bool) -> str:
    """Write the card of a run's model as Markdown with a YAML header, as the Hugging Face hub reads it.

    `is_adapter` is True if only an adapter is exported.
    """
    base = None if run.config is None or run.config.model.path == SCRATCH else run.config.model.path
    is_on_hub = base is not None and not Path(base).exists()
    header = [
        "---",
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        *([f"base_model: {json.dumps(base)}"] if is_on_hub else []),
        "tags: [agentrl, reinforcement-learning]",
        "---",
    ]
    lines = [
        *header,
        f"# Model of {run.name}",
        "",
        f"Trained with [agentrl](https://pypi.org/project/agentrl/) from {base or 'random weights'}: {run.state}.",
        "",
    ]
    for name, result in results.items():
        if result.success is not None:
            lines += [f"Success on {result.panel.environment} ({name}): {estimate_text(result.success)}.", ""]
    for table in (*tables(results), *run_tables([run])):
        lines += [f"## {table.title}", "", *markdown_table(table), ""]
    lines += ["## How to repeat it", "", "```text", *commands([run]), "```", ""]
    return "\n".join(lines)
