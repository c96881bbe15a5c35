"""Result of a run that has no step left, read from its folder: resuming it starts neither a model nor an engine."""

from __future__ import annotations

from agentrl.evaluation.diagnosis.finding import finding_lines, top
from agentrl.evaluation.diagnosis.watch import read_findings
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import RunStatus, RunWatcher
from agentrl.observe.run_status import RunEnd, read_status
from agentrl.runs.start import Run, RunResult


def finished_result(run: Run, watcher: RunWatcher) -> RunResult | None:
    """Return the result of a run that has ended after its last step, and say so; ``None`` for any other run.

    The folder of a warm start is no such run, although it has checkpoints.
    A run that was killed after its last step is not finished: it may have to complete its metrics or an evaluation.
    """
    steps, status = run.config.trainer.steps, read_status(run.folder.path)
    if run.changes or status is None or status.end is not RunEnd.FINISHED or status.resumed_by != "train":
        return None
    newest = Checkpoints(run.folder.checkpoints, keep=run.config.checkpoint.keep).newest()
    if newest is None or newest.step < steps:
        return None
    watcher.on_start(run.folder.path, RunStatus(step=newest.step, steps=steps))
    watcher.on_message(f"the run has no steps left; to train longer, add trainer.steps={2 * newest.step}")
    problems = top(read_findings(run.folder))
    for line in finding_lines(problems):
        watcher.on_message(line)
    lines = read_metrics(run.folder.metrics_file)
    last = lines[-1] if lines else {}
    return RunResult(
        folder=run.folder.path,
        step=newest.step,
        checkpoint=str(newest.path),
        metrics={name: value for name, value in last.items() if name != "step" and value is not None},
        interrupted=False,
        problems=problems,
    )
