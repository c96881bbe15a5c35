"""Runs of the end-to-end comparison: each is a process that is followed by its metrics until it succeeds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from agentrl.builders.models import resolve_model
from agentrl.errors import AgentRLError, UsageError
from agentrl.observe.console import note
from agentrl.runs.sft import warm_start as clone
from agentrl.runs.start import start_run
from agentrl.sandbox.program_guard import children_of
from peers.e2e_tasks import Learning, check_same_reading, write_settings
from peers.installed import conditions, find_python

AVERAGED = 3
"""Number of successive steps whose mean success counts."""
SIDES: Mapping[str, tuple[str, ...]] = {
    "agentrl": (),
    "agentrl_async": ("rollout.max_staleness=2",),
    "trl": (),
}
"""Sides, with the overrides of agentrl's."""
POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """One run."""

    reached: bool
    """True if the success rate was reached; otherwise the figures are lower bounds."""
    seconds: float
    cpu_s: float
    steps: int
    sampled_tokens: float
    success: float
    """Mean success of the last steps."""
    curve: list[tuple[float, float, float]]
    """Seconds, CPU seconds and success of each step."""


def learn_all(
    learning: Learning,
    *,
    seeds: Sequence[int],
    success: float,
    steps: int,
    limit_s: float,
    folder: str | None,
    sides: Sequence[str],
    threads: int,
    warm_start: bool,
) -> dict[str, Any]:
    """Let the sides learn by turns; see `benchmarks/e2e.py` for the arguments.

    Args:
        learning: The task.
        seeds: Seeds.
        success: Success rate that ends a run.
        steps: Largest number of steps.
        limit_s: Seconds after which a run ends.
        folder: Folder that is kept.
        sides: Names in `SIDES`.
        threads: Threads of each side.
        warm_start: True if the model first clones the environment's expert.
    """
    find_python("trl")
    sides = [sides] if isinstance(sides, str) else sides
    if unknown := set(sides) - set(SIDES):
        raise UsageError("unknown side", got=f"sides={sorted(unknown)}", expected=", ".join(SIDES))
    limits = {"success": success, "steps": steps, "limit_s": limit_s, "threads": threads}
    found = conditions(["trl"], len(seeds)) | limits
    runs: dict[str, dict[str, Any]] = {name: {} for name in sides}
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as temporary:
        root = Path(folder or temporary).resolve()
        model = _start_model(learning, root, warm_start)
        for number, seed in enumerate(seeds):
            place = root / f"seed-{seed}"
            place.mkdir(parents=True, exist_ok=True)
            names = list(sides)
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                result = place / f"{name}.json"
                if not result.is_file():
                    note(f"seed {seed}: {name}")
                    learned = _learn(name, learning, model, place, seed, steps, success, limit_s, threads)
                    result.write_text(json.dumps(asdict(learned)))
                runs[name][str(seed)] = json.loads(result.read_bytes())
    return {"conditions": found, "sides": runs, "trl_over_agentrl": _ratios(runs)}


def _ratios(runs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return TRL's figures divided by those of agentrl, medians of the seeds; bounds if TRL did not succeed."""
    return {
        name: {
            figure: median(runs["trl"][seed][figure] / max(row[figure], 1e-9) for seed, row in runs[name].items())
            for figure in ("seconds", "cpu_s", "sampled_tokens")
        }
        for name in runs
        if name != "trl" and "trl" in runs
    }


def _start_model(learning: Learning, root: Path, warm_start: bool) -> str:
    """Return the folder of the model from which all runs start."""
    common = ("run.seed=0", f"run.directory={root}")
    if not warm_start:
        return str(resolve_model(learning.load(*common)).model.path)
    marker = root / "start.json"
    if not marker.is_file():
        note("warm start")
        began = time.perf_counter()
        result = clone(start_run(learning.load(*common, "run.name=warm-start"), kind="sft"))
        marker.write_text(json.dumps({"model": str(result.checkpoint), "seconds": time.perf_counter() - began}))
    return str(resolve_model(learning.load(f"model.path={json.loads(marker.read_bytes())['model']}")).model.path)


def _learn(
    name: str,
    learning: Learning,
    model: str,
    place: Path,
    seed: int,
    steps: int,
    success: float,
    limit_s: float,
    threads: int,
) -> Learned:
    common = [f"run.seed={seed}", f"run.directory={place}", f"trainer.steps={steps}", f"model.path={model}"]
    folder = place / name
    if name == "trl":
        config = learning.load(*common)
        settings = write_settings(config, learning, model, folder, steps=steps, threads=threads)
        words = [find_python("trl"), str(Path(__file__).parent / "e2e_trl.py"), str(folder / "settings.json")]
        return _follow(words, folder, success, limit_s, settings)
    overrides = [*learning.overrides, *common, f"run.name={name}", *SIDES[name]]
    overrides += [f"engine.lanes={threads}", f"trainer.lanes={threads}"]
    program = [sys.executable, "-c", "from agentrl.cli import main; main()", "train", learning.recipe, *overrides]
    return _follow(program, folder, success, limit_s, None)


def _follow(
    words: Sequence[str], folder: Path, success: float, limit_s: float, settings: Mapping[str, Any] | None
) -> Learned:
    """Run a program until its metrics show the success rate, and end it."""
    began, rows, cpu_s = time.perf_counter(), [], 0.0
    curve: list[tuple[float, float, float]] = []
    checked = settings is None
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            while True:
                ended, cpu_s = process.poll() is not None, max(cpu_s, _cpu_s(process.pid))
                rows = _read_rows(folder / "metrics.jsonl")
                if not checked and settings is not None and (folder / "check.json").is_file() and rows:
                    check_same_reading(settings, json.loads((folder / "check.json").read_bytes()))
                    checked = True
                last = [row["success/mean"] for row in rows[-AVERAGED:]]
                reached = len(last) == AVERAGED and fmean(last) >= success
                seconds = time.perf_counter() - began
                curve += [
                    (round(seconds, 1), round(cpu_s, 1), round(row["success/mean"], 3)) for row in rows[len(curve) :]
                ]
                if reached or ended or seconds >= limit_s:
                    break
                time.sleep(POLL_S)
        finally:
            for pid in (*children_of(process.pid), process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            process.wait()
    if ended and (process.returncode or not rows) and not reached:
        raise AgentRLError(
            "a run of the comparison has failed",
            got=f"exit code {process.returncode} after {len(rows)} steps",
            hint=f"read {folder}.log",
        )
    return Learned(
        reached=reached,
        seconds=seconds,
        cpu_s=cpu_s,
        steps=len(rows),
        sampled_tokens=sum(row["tokens/sampled"] for row in rows),
        success=fmean(last) if last else 0.0,
        curve=curve,
    )


def _read_rows(path: Path) -> list[dict[str, float]]:
    """Return the complete lines of a metrics file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1] if line]


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its children, ended ones included."""
    ticks = 0
    for one in (pid, *children_of(pid)):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
