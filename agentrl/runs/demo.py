"""The main job from nothing: a new model is warm-started, measured, trained by reward, and measured again.

shipped config ─► warm start on experts ─► evaluation ─► RL ─► evaluation ─► report.html, demo.json
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agentrl.builders.models import load_tokenizer
from agentrl.builders.run import RunResult, start_run
from agentrl.config import Config, load_config
from agentrl.errors import TrainingError, UsageError
from agentrl.evaluation.report import Report, ReportFiles, choose_examples, write_report
from agentrl.evaluation.result import EvaluationResult, MeanInterval, estimate_text
from agentrl.observe.files import replace_file, writing
from agentrl.observe.metrics import read_metrics
from agentrl.observe.model_folder import find_model
from agentrl.observe.progress import RunWatcher
from agentrl.runs.api import evaluate
from agentrl.runs.rl import train
from agentrl.runs.sft import warm_start

CONFIG = "quickstart"
JSON_FILE = "demo.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Result of a demo."""

    folder: Path
    before: EvaluationResult
    """After the warm start."""
    after: EvaluationResult
    """After training."""
    report: ReportFiles
    seconds: Mapping[str, float]
    """Of the whole and of its parts."""

    def check_learned(self) -> None:
        """Compare the intervals.

        Raises:
            TrainingError: they overlap.
        """
        before, after = self.before.success, self.after.success
        if before is None or after is None or after.low <= before.high:
            raise TrainingError(
                "the agent did not learn", got=f"success {_shown(before)} and then {_shown(after)}", expected="a rise"
            )


class DemoRunner:
    """Runs the parts of a demo one after the other, each in its own folder.

    Args:
        folder: Where everything goes; made, and must not exist.
        seed: Of the model, the tasks and the sampling.
        n_tasks: Unseen tasks of each evaluation.
        overrides: Changes of the shipped config, ``key=value``.
        watcher: Receives the progress of the runs.
    """

    def __init__(
        self, folder: Path, *, seed: int, n_tasks: int, overrides: list[str], watcher: RunWatcher | None = None
    ) -> None:
        self.folder = folder
        self.seed = seed
        self.n_tasks = n_tasks
        self._overrides = [f"run.seed={seed}", f"run.directory={folder}", *overrides]
        self._watcher = watcher

    def run(self) -> Demo:
        """Do it all.

        Raises:
            UsageError: the folder is there already, or the disk is full.
            TrainingError: training cannot go on, or was interrupted.
        """
        if self.folder.exists():
            raise UsageError("the demo's folder is there already", got=self.folder, hint="name another, or remove it")
        with writing(self.folder):
            self.folder.mkdir(parents=True)
        clock = _Clock()
        started = self._finished(warm_start(start_run(self._config("warm-start"), kind="sft"), watcher=self._watcher))
        clock.lap("warm_start")
        before = self._evaluate(started)
        clock.lap("evaluation_before")
        config = self._config("train", f"model.path={started.checkpoint}")
        trained = self._finished(train(start_run(config, kind="train"), watcher=self._watcher))
        clock.lap("training")
        after = self._evaluate(trained)
        clock.lap("evaluation_after")
        report = self._report(before, after, trained)
        demo = Demo(folder=self.folder, before=before, after=after, report=report, seconds=clock.laps())
        replace_file(self.folder / JSON_FILE, orjson.dumps(demo_json(demo), option=orjson.OPT_INDENT_2))
        return demo

    def _config(self, name: str, *more: str) -> Config:
        return load_config(CONFIG, [*self._overrides, f"run.name={name}", *more])

    def _finished(self, result: RunResult) -> RunResult:
        if result.interrupted:
            raise TrainingError(
                "the demo was interrupted", hint=f"its training goes on with: agentrl train --resume {result.folder}"
            )
        return result

    def _evaluate(self, run: RunResult) -> EvaluationResult:
        return evaluate(model=run.checkpoint, tasks=self.n_tasks, seed=self.seed, progress=False)

    def _report(self, before: EvaluationResult, after: EvaluationResult, trained: RunResult) -> ReportFiles:
        tokenizer = load_tokenizer(find_model(trained.checkpoint))
        report = Report(
            title="agentrl demo: household tasks in unseen rooms",
            results={"before": before, "after": after},
            metrics=read_metrics(trained.folder / "metrics.jsonl"),
            examples=choose_examples([episode.trajectory for episode in after.episodes]),
        )
        return write_report(report, self.folder, lambda token: str(tokenizer.decode([token])))


def demo_json(demo: Demo) -> dict[str, Any]:
    """Return the content of ``demo.json``."""
    return {
        "before": demo.before.to_json(),
        "after": demo.after.to_json(),
        "seconds": demo.seconds["total"],
        "seconds_by_part": dict(demo.seconds),
    }


def _shown(estimate: MeanInterval | None) -> str:
    return "unknown" if estimate is None else estimate_text(estimate)


class _Clock:
    """Seconds of consecutive parts."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name], self._last = now - self._last, now

    def laps(self) -> dict[str, float]:
        return {**self._laps, "total": self._last - self._began}
