"""Regression check of performance: measures the ratios stored in docs/benchmarks.json again and compares them.

A ratio compares agentrl with a peer or a physical limit in one run, so it depends less on the machine than seconds do.
Higher is better for all ratios. Each benchmark runs in its own process, through `agentrl bench`.

    python benchmarks/_check.py [BENCHMARK]...
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from rich.table import Table

from agentrl.cli.bench import flatten
from agentrl.errors import UnknownNameError, UsageError
from agentrl.observe.console import note, out

ROOT = Path(__file__).parent.parent
MAX_FALL = 0.15
"""Relative decrease at which a ratio fails."""


class StoredRatio(BaseModel):
    """A measured ratio, or the quotient of two figures of one run, such as 7.7 for ``generate`` over ``local``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    figure: str
    """Dotted name of a figure, as `agentrl bench` prints it."""
    over: str | None = None
    """Figure to divide by; none if `figure` is a ratio."""
    stored: float = Field(gt=0)

    def measure(self, figures: Mapping[str, Any]) -> float:
        """Return the ratio in the figures of a run.

        Raises:
            UsageError: the run has no such figure.
        """
        if missing := {self.figure, self.over or self.figure} - figures.keys():
            raise UsageError(
                f"the benchmark has no figure for {self.name}", got=", ".join(figures), expected=", ".join(missing)
            )
        return float(figures[self.figure]) / (float(figures[self.over]) if self.over else 1.0)


class StoredRun(BaseModel):
    """Run of a benchmark, and its measured ratios."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    benchmark: str
    options: dict[str, Any]
    conditions: str
    """Machine and versions of the stored measurement."""
    ratios: list[StoredRatio] = Field(min_length=1)


class Verdict(StrEnum):
    """Result of a comparison."""

    OK = "ok"
    FELL = "fell"
    NOT_MEASURED = "not measured"


def judge(stored: float, measured: float | None) -> Verdict:
    """Compare a measured ratio with a stored one; ``None`` if the benchmark failed.

    >>> judge(2.0, 1.71), judge(2.0, 1.7)
    (<Verdict.OK: 'ok'>, <Verdict.FELL: 'fell'>)
    """
    if measured is None:
        return Verdict.NOT_MEASURED
    return Verdict.OK if measured > (1 - MAX_FALL) * stored else Verdict.FELL


def read_stored(path: Path, names: Sequence[str]) -> list[StoredRun]:
    """Read the stored runs of the named benchmarks, by default of all.

    Raises:
        UnknownNameError: no run of this benchmark is stored.
    """
    runs = TypeAdapter(list[StoredRun]).validate_json(path.read_bytes())
    known = list(dict.fromkeys(run.benchmark for run in runs))
    for name in names:
        if name not in known:
            raise UnknownNameError("no ratio of this benchmark is stored", got=name, expected=", ".join(known))
    return [run for run in runs if not names or run.benchmark in names]


def run_benchmark(run: StoredRun, folder: Path) -> dict[str, Any] | None:
    """Run a benchmark and return its figures; ``None`` if it fails (it prints the reason)."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "figures.json"
        options = [f"{key}={json.dumps(value)}" for key, value in run.options.items()]
        words = ["bench", run.benchmark, *options, "--folder", str(folder), "--json", str(file)]
        note(f"agentrl {' '.join(words[:-4])}")
        program = [sys.executable, "-c", "from agentrl.cli import main; main()", *words]
        done = subprocess.run(program, stdout=subprocess.DEVNULL, check=False)
        return dict(flatten(json.loads(file.read_bytes()))) if done.returncode == 0 else None


def check(
    names: Annotated[list[str] | None, typer.Argument(help="Benchmarks to run; all by default.")] = None,
    stored: Annotated[Path, typer.Option(help="File with the stored ratios.")] = ROOT / "docs" / "benchmarks.json",
    folder: Annotated[Path, typer.Option(help="Folder of the benchmarks.")] = ROOT / "benchmarks",
) -> None:
    """Run benchmarks, and exit with 1 if a ratio fell by 15 % or more or could not be measured."""
    table = Table("benchmark", "ratio", "stored", "measured", "change", "verdict", box=None, pad_edge=False)
    verdicts, conditions = [], {}
    for run in read_stored(stored, names or []):
        figures = run_benchmark(run, folder)
        for ratio in run.ratios:
            measured = None if figures is None else ratio.measure(figures)
            verdicts.append(judge(ratio.stored, measured))
            change = ("", "") if measured is None else (f"{measured:.2f}", f"{measured / ratio.stored - 1:+.0%}")
            table.add_row(run.benchmark, ratio.name, f"{ratio.stored:.2f}", *change, verdicts[-1])
            if verdicts[-1] is not Verdict.OK:
                conditions[run.benchmark] = run.conditions
    out.print(table)
    note(f"load of this machine: {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    for name, text in conditions.items():
        note(f"stored conditions of {name}: {text}")
    raise typer.Exit(int(any(verdict is not Verdict.OK for verdict in verdicts)))


if __name__ == "__main__":
    typer.run(check)
