"""The main job from nothing: a model is warm-started, measured, trained by reward, and measured again.

config ─► (pretrained: evaluation) ─► (with `sft`: warm start ─► evaluation) ─► RL ─► evaluation ─► report, demo.json
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agentrl.builders.models import SCRATCH, load_tokenizer
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

RECIPE = "quickstart"
JSON_FILE = "demo.json"
AS_IT_COMES, BEFORE, AFTER = "as it comes", "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Result of a demo."""

    folder: Path
    results: Mapping[str, EvaluationResult]
    """By when they were measured (`AS_IT_COMES`, `BEFORE`, `AFTER`), in order."""
    report: ReportFiles
    seconds: Mapping[str, float]
    """Of the whole and of its parts."""

    def check_learned(self) -> None:
        """Compare the intervals.

        Raises:
            TrainingError: they overlap.
        """
        first, *_, last = self.results.values()
        before, after = first.success, last.success
        if before is None or after is None or after.low <= before.high:
            raise TrainingError(
                "the agent did not learn", got=f"success {_shown(before)} and then {_shown(after)}", expected="a rise"
            )


class DemoRunner:
    """Runs the parts of a demo one after the other, each in its own folder.

    Args:
        folder: Where everything goes; made, and must not exist.
        recipe: A config file or a shipped config's name. With a pretrained model, that is measured as it comes, too;
            without an ``sft`` section of its own, there is no warm start.
        seed: Of the model, the tasks and the sampling.
        n_tasks: Unseen tasks of each evaluation; those of the recipe when left out.
        overrides: Changes of the recipe, ``key=value``.
        watcher: Receives the progress of the runs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        recipe: str = RECIPE,
        seed: int,
        n_tasks: int | None = None,
        overrides: list[str],
        watcher: RunWatcher | None = None,
    ) -> None:
        self.folder = folder
        self.seed = seed
        self._recipe = recipe
        self._overrides = [f"run.seed={seed}", f"run.directory={folder}", *overrides]
        self._watcher = watcher
        config = self._config("train")
        self._is_pretrained = config.model.path != SCRATCH
        self._has_warm_start = "sft" in config.model_fields_set
        self.n_tasks = n_tasks or config.evaluation.tasks

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
        results: dict[str, EvaluationResult] = {}
        if self._is_pretrained:
            results[AS_IT_COMES] = self._evaluate_as_it_comes()
            clock.lap("evaluation_as_it_comes")
        words = []
        if self._has_warm_start:
            started = self._finished(
                warm_start(start_run(self._config("warm-start"), kind="sft"), watcher=self._watcher)
            )
            clock.lap("warm_start")
            results[BEFORE] = self._evaluate(started.checkpoint)
            clock.lap("evaluation_before")
            words = [f"model.path={started.checkpoint}"]
        run = start_run(self._config("train", *words), kind="train")
        trained = self._finished(train(run, watcher=self._watcher))
        clock.lap("training")
        results[AFTER] = self._evaluate(trained.checkpoint)
        clock.lap("evaluation_after")
        report = self._report(results, trained)
        demo = Demo(folder=self.folder, results=results, report=report, seconds=clock.laps())
        replace_file(self.folder / JSON_FILE, orjson.dumps(demo_json(demo), option=orjson.OPT_INDENT_2))
        return demo

    def _config(self, name: str, *more: str) -> Config:
        return load_config(self._recipe, [*self._overrides, f"run.name={name}", *more])

    def _finished(self, result: RunResult) -> RunResult:
        if result.interrupted:
            raise TrainingError(
                "the demo was interrupted",
                hint=f"its training goes on with: agentrl train --resume {shlex.quote(str(result.folder))}",
            )
        return result

    def _evaluate(self, checkpoint: str) -> EvaluationResult:
        return evaluate(model=checkpoint, tasks=self.n_tasks, seed=self.seed)

    def _evaluate_as_it_comes(self) -> EvaluationResult:
        return evaluate(config=self._recipe, overrides=self._overrides, tasks=self.n_tasks, seed=self.seed)

    def _report(self, results: Mapping[str, EvaluationResult], trained: RunResult) -> ReportFiles:
        tokenizer = load_tokenizer(find_model(trained.checkpoint))
        after = results[AFTER]
        report = Report(
            title=f"agentrl demo: {after.panel.environment}",
            results=results,
            metrics=read_metrics(trained.folder / "metrics.jsonl"),
            examples=choose_examples([episode.trajectory for episode in after.episodes]),
        )
        return write_report(report, self.folder, lambda token: str(tokenizer.decode([token])))


def demo_json(demo: Demo) -> dict[str, Any]:
    """Return the content of ``demo.json``."""
    return {
        **{when.replace(" ", "_"): result.to_json() for when, result in demo.results.items()},
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
