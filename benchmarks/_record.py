"""Adds the figures of a comparison to docs/comparisons.json, from which the tables of docs/benchmarks.md are generated.

agentrl bench rollout --versus all --json rollout.json
python benchmarks/_record.py rollout rollout.json && make docs-tables
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agentrl.errors import UsageError
from agentrl.observe.console import note

RECORDED = Path(__file__).parent.parent / "docs" / "comparisons.json"
COMPARED = ("rollout", "e2e", "e2e_llm", "gateway")
"""Benchmarks that have an option `versus` and report their conditions."""


def record(
    benchmark: Annotated[str, typer.Argument(help=f"One of {', '.join(COMPARED)}.")],
    figures: Annotated[Path, typer.Argument(help="File of `agentrl bench NAME --versus PEER --json FILE`.")],
    recorded: Annotated[Path, typer.Option(help="File with all recorded comparisons.")] = RECORDED,
) -> None:
    """Append the figures of one comparison."""
    if benchmark not in COMPARED:
        raise UsageError("no comparison of this name", got=benchmark, expected=", ".join(COMPARED))
    try:
        found = json.loads(figures.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{figures} has no figures", got=str(error), expected="a file that --json wrote") from error
    if not isinstance(found, dict) or "conditions" not in found:
        hint = f"run agentrl bench {benchmark} --versus all --json {figures}"
        raise UsageError(f"{figures} has no comparison", got=str(figures), expected="conditions and figures", hint=hint)
    entries = json.loads(recorded.read_bytes()) if recorded.is_file() else []
    entries.append({"benchmark": benchmark, **found})
    recorded.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    note(f"recorded {benchmark} in {recorded}")


if __name__ == "__main__":
    typer.run(record)
