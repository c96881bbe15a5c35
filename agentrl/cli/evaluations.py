"""Evaluations that commands play, and finished ones that they read."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import orjson

from agentrl.cli.exits import message_when_interrupted
from agentrl.errors import UsageError
from agentrl.evaluation.panel import EPISODES_FILE, FOLDER, RESULT_FILE, Panel, stored_episodes
from agentrl.evaluation.result import EvaluationResult, summarize
from agentrl.evaluation.session import EvaluationRequest, FinishedEvaluation, run_evaluation
from agentrl.observe.console import note
from agentrl.observe.files import UNREADABLE
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.terminal import counting
from agentrl.rollout.events import RolloutCounters
from agentrl.runs.stop import run_until_stopped


def play_request(request: EvaluationRequest) -> FinishedEvaluation:
    """Play an evaluation with progress on standard error; Ctrl-C ends the program with a message."""
    counters = RolloutCounters()
    display = counting(request.n_tasks * request.samples, counters.progress)
    kept = "finished episodes are kept, and the same command resumes the evaluation"
    with display as counter, message_when_interrupted(lambda: f"stopped after {counter.line()}: {kept}"):
        return run_until_stopped(
            run_evaluation(
                request, on_episode=lambda episode: counter.add(episode.trajectory), on_stall=note, counters=counters
            )
        )


def own_evaluations(run: RunDirectory) -> dict[str, EvaluationResult]:
    """Read the finished evaluations in a run's folder, in the order in which they ended."""
    files = sorted(run.path.glob(f"{FOLDER}/*/{RESULT_FILE}"), key=lambda file: file.stat().st_mtime_ns)
    found = {}
    for file in files:
        with suppress(UsageError):  # an unfinished or damaged evaluation
            found[file.parent.name] = read_evaluation(file.parent)
    return found


def read_evaluation(folder: Path) -> EvaluationResult:
    """Read a finished evaluation, with its episodes.

    Raises:
        UsageError: the evaluation has not finished, or its result is damaged.
    """
    try:
        record = orjson.loads((folder / RESULT_FILE).read_bytes())
        panel = Panel(
            environment=record["env"],
            policy=record["policy"],
            model=record["model"],
            n_tasks=record["n_tasks"],
            samples=record["samples"],
            seed=record["seed"],
            settings=record["settings"],
        )
        seconds, speed = float(record["seconds"]), float(record["tokens_per_s"])
    except (OSError, *UNREADABLE) as error:
        raise UsageError(
            f"evaluation {folder} has no result that can be read",
            got=f"{type(error).__name__}: {error}",
            hint="the same agentrl eval command finishes it",
        ) from error
    episodes = list(stored_episodes(folder / EPISODES_FILE).values())
    return replace(summarize(panel, episodes, seconds), tokens_per_s=speed, panel_hash=record.get("panel_hash"))
