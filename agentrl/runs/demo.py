"""A complete training from scratch: warm start, evaluation, reinforcement learning, evaluation, report.

config ─► (pretrained: evaluation) ─► (with `sft`: warm start ─► evaluation) ─► RL ─► evaluation ─► report, demo.json
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from agentrl.config import Config, load_config
from agentrl.config.config import SCRATCH
from agentrl.errors import TrainingError, UsageError
from agentrl.evaluation.diagnosis.watch import read_findings
from agentrl.evaluation.report import ReportFiles, choose_examples, write_report
from agentrl.evaluation.result import EvaluationResult, MeanInterval, estimate_text
from agentrl.evaluation.run_report import ReportedRun, config_of, run_report
from agentrl.observe.files import replace_file, writing
from agentrl.observe.metrics import read_metrics
from agentrl.observe.model_folder import find_model
from agentrl.observe.progress import RunWatcher
from agentrl.observe.run_folder import RunDirectory
from agentrl.render.tokenizers import load_tokenizer
from agentrl.runs.api import evaluate
from agentrl.runs.rl import train
from agentrl.runs.sft import warm_start
from agentrl.runs.start import RunResult, start_run
from agentrl.runs.start_record import read_start_record

RECIPE = "quickstart"
JSON_FILE = "demo.json"
AS_IT_COMES, BEFORE, AFTER = "as it comes", "before", "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Result of a demo."""

    folder: Path
    results: Mapping[str, EvaluationResult]
    """Evaluations by the time of measurement (`AS_IT_COMES`, `BEFORE`, `AFTER`), in order."""
    report: ReportFiles
    seconds: Mapping[str, float]
    """Duration of each part and ``total``."""

    def check_learned(self) -> None:
        """Check that the confidence interval of the last success rate is above that of the first.

        Raises:
            TrainingError: it does not.
        """
        first, *_, last = self.results.values()
        before, after = first.success, last.success
        if before is None or after is None or after.low <= before.high:
            raise TrainingError(
                "the agent did not learn",
                got=f"success {_success_text(before)} before training and {_success_text(after)} after",
                expected="an increase beyond the intervals",
            )


class DemoRunner:
    """Runner of a demo's parts, each in its own folder.

    Args:
        folder: Folder of the demo; must not exist.
        recipe: A config file or the name of a shipped config. A pretrained model is also measured before any training;
            a recipe without an ``sft`` section has no warm start.
        seed: Seed of the model, the tasks and the sampling.
        n_tasks: Number of unseen tasks per evaluation; by default the recipe's.
        overrides: Overrides of the recipe, ``key=value``.
        watching: Opens a watcher that receives the progress of one run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        recipe: str = RECIPE,
        seed: int,
        n_tasks: int | None = None,
        overrides: list[str],
        watching: Callable[[], AbstractContextManager[RunWatcher]],
    ) -> None:
        self.folder = folder
        self.seed = seed
        self._recipe = recipe
        self._overrides = [f"run.seed={seed}", f"run.directory={folder}", *overrides]
        self._watching = watching
        config = self._config("train")
        self._is_pretrained = config.model.path != SCRATCH
        self._has_warm_start = "sft" in config.model_fields_set
        self.n_tasks = n_tasks or config.evaluation.tasks

    def run(self) -> Demo:
        """Run all parts.

        Raises:
            UsageError: the folder exists already, or the disk is full.
            TrainingError: training cannot continue, or was interrupted.
        """
        if self.folder.exists():
            raise UsageError(
                "the demo's folder already exists", got=self.folder, hint="choose another folder, or delete it"
            )
        with writing(self.folder):
            self.folder.mkdir(parents=True)
        clock = _Clock()
        results: dict[str, EvaluationResult] = {}
        if self._is_pretrained:
            results[AS_IT_COMES] = self._evaluate_as_it_comes()
            clock.lap("evaluation_as_it_comes")
        words = []
        if self._has_warm_start:
            with self._watching() as watcher:
                warmed = warm_start(start_run(self._config("warm-start"), kind="sft", command="sft"), watcher=watcher)
            started = self._check_finished(warmed, "sft")
            clock.lap("warm_start")
            results[BEFORE] = self._evaluate(started.checkpoint)
            clock.lap("evaluation_before")
            words = [f"model.path={started.checkpoint}"]
        with self._watching() as watcher:
            result = train(start_run(self._config("train", *words), kind="train"), watcher=watcher)
        trained = self._check_finished(result, "train")
        clock.lap("training")
        results[AFTER] = self._evaluate(trained.checkpoint)
        clock.lap("evaluation_after")
        report = self._report(results, trained)
        demo = Demo(folder=self.folder, results=results, report=report, seconds=clock.laps())
        replace_file(self.folder / JSON_FILE, orjson.dumps(demo_json(demo), option=orjson.OPT_INDENT_2))
        return demo

    def _config(self, name: str, *more: str) -> Config:
        return load_config(self._recipe, [*self._overrides, f"run.name={name}", *more])

    def _check_finished(self, result: RunResult, command: str) -> RunResult:
        if result.interrupted:
            raise TrainingError(
                "the demo was interrupted",
                hint=f"resume its training with: agentrl {command} --resume {shlex.quote(str(result.folder))}",
            )
        return result

    def _evaluate(self, checkpoint: str) -> EvaluationResult:
        return evaluate(model=checkpoint, tasks=self.n_tasks, seed=self.seed)

    def _evaluate_as_it_comes(self) -> EvaluationResult:
        return evaluate(config=self._recipe, overrides=self._overrides, tasks=self.n_tasks, seed=self.seed)

    def _report(self, results: Mapping[str, EvaluationResult], trained: RunResult) -> ReportFiles:
        tokenizer = load_tokenizer(find_model(trained.checkpoint))
        after = results[AFTER]
        folder = RunDirectory(trained.folder)
        run = ReportedRun(
            folder=folder,
            config=config_of(folder),
            lines=read_metrics(folder.metrics_file),
            state=f"finished after step {trained.step}",
            start=read_start_record(folder),
            findings=read_findings(folder),
        )
        examples = choose_examples([episode.trajectory for episode in after.episodes])
        report = replace(
            run_report([run], results=results, examples=examples), title=f"agentrl demo: {after.panel.environment}"
        )
        return write_report(report, self.folder, lambda token: str(tokenizer.decode([token])))


def demo_json(demo: Demo) -> dict[str, Any]:
    """Return the content of ``demo.json``."""
    return {
        **{when.replace(" ", "_"): result.to_json() for when, result in demo.results.items()},
        "seconds": demo.seconds["total"],
        "seconds_by_part": dict(demo.seconds),
    }


def _success_text(estimate: MeanInterval | None) -> str:
    return "unknown" if estimate is None else estimate_text(estimate)


class _Clock:
    """Stopwatch with laps for consecutive parts."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name], self._last = now - self._last, now

    def laps(self) -> dict[str, float]:
        return {**self._laps, "total": self._last - self._began}
