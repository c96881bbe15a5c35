"""Diagnosis of a run: while it trains, at its end, and later from its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from agentrl.builders.training import TrainingParts
from agentrl.config.config import Config
from agentrl.errors import AgentRLError, UsageError
from agentrl.evaluation.diagnosis.finding import Finding, finding_lines, top
from agentrl.evaluation.diagnosis.read import (
    Diagnosis,
    RunIncidents,
    diagnose_evaluation,
    diagnose_run,
    read_incidents,
    save_incidents,
)
from agentrl.evaluation.diagnosis.summary import RunSummary
from agentrl.evaluation.diagnosis.watch import RunDiagnosis, save_findings
from agentrl.evaluation.panel import EPISODES_FILE
from agentrl.observe.idle_steps import steps_without_learning
from agentrl.observe.metrics import read_metrics
from agentrl.observe.run_folder import RUN_OR_EVALUATION, RunDirectory, require_run
from agentrl.render.tokenizers import load_tokenizer
from agentrl.runs.start import RunResult
from agentrl.training.algorithm_functions import learns_from_rewards, run_learns_from_rewards
from agentrl.training.stored_episodes import model_of_run


def open_diagnosis(folder: RunDirectory, config: Config, parts: TrainingParts) -> RunDiagnosis:
    """Open the diagnosis of a run, with the steps that are already finished."""
    parts.counters.incidents.add_record(read_incidents(folder).incidents.to_record())
    summary = RunSummary(
        config=config,
        learns_from_rewards=run_learns_from_rewards(config),
        incidents=parts.counters.incidents,
        definitions={
            name: location for part in parts.environments for name, location in part.runner.scorer.definitions.items()
        },
        decode=parts.renderer.encoder.decode,
    )
    if summary.definitions:
        save_incidents(folder, RunIncidents(incidents=summary.incidents, definitions=summary.definitions))
    return RunDiagnosis(summary, read_metrics(folder.metrics_file))


def save_failures(folder: RunDirectory, diagnosis: RunDiagnosis) -> None:
    """Write the failures so far, if there are any, for a diagnosis while the run trains or after a crash.

    Raises:
        UsageError: the disk is full.
    """
    run = diagnosis.run
    if run.incidents.found:
        save_incidents(folder, RunIncidents(incidents=run.incidents, definitions=run.definitions))


def report_problems(
    folder: RunDirectory, diagnosis: RunDiagnosis, say: Callable[[str], None], error: BaseException | None = None
) -> tuple[Finding, ...]:
    """Save all problems of a run at its end; report and return the worst ones.

    A problem that `error`, which ended the run, already describes is not reported again.
    """
    findings = diagnosis.findings()
    worst = top(findings)
    told = error.subject if isinstance(error, AgentRLError) else None
    for line in finding_lines([one for one in worst if told is None or not one.sentence.startswith(f"{told} failed ")]):
        say(line)
    with suppress(UsageError):  # a full disk, which another error reports already
        save_findings(folder, findings)
        save_failures(folder, diagnosis)
    return worst


def idle_steps(result: RunResult, config: Config) -> str:
    """Describe the steps without a training signal, if they are at least half of the run."""
    lines = read_metrics(RunDirectory(result.folder).metrics_file)
    idle = steps_without_learning(lines)
    if not run_learns_from_rewards(config) or not idle or 2 * idle < len(lines):
        return ""
    return f", but nothing was learned in {idle} of {len(lines)} steps: all episodes of a task had the same return"


def diagnose_folder(folder: Path) -> Diagnosis:
    """Diagnose the run or evaluation in a folder.

    Raises:
        UsageError: the folder is neither.
    """
    if (folder / EPISODES_FILE).is_file():
        return diagnose_evaluation(folder, folder / EPISODES_FILE)
    run = require_run(folder, RUN_OR_EVALUATION)
    return diagnose_run(run, decode=_decoder(run), learns_from_rewards=_learns_from_rewards)


def _learns_from_rewards(config: Config) -> bool:
    try:
        return learns_from_rewards(config.algorithm)
    except AgentRLError:  # a function of the user's that cannot be imported here
        return True


def _decoder(run: RunDirectory) -> Callable[[Sequence[int]], str] | None:
    try:
        tokenizer = load_tokenizer(model_of_run(run))
    except (AgentRLError, OSError, ValueError):  # no model, or a damaged one: the answers are not shown
        return None
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))
