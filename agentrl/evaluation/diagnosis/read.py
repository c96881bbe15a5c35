"""Diagnosis of a folder: a finished, running, stopped or crashed run, or an evaluation.

with                     the diagnosis reads
-----------------------  ---------------------------------------------------------------------------------------
``config.yaml``          the current values of the keys to change
``metrics.jsonl``        the steps
``trajectories``         the episodes; of a large store, those of some steps
``incidents.json``       failures of rewards, environments and tools, with file and line
``logs``                 the error that ended the run
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from agentrl.config.config import Config
from agentrl.config.load import load_config
from agentrl.errors import AgentRLError, SourceLocation, UsageError
from agentrl.evaluation.diagnosis.finding import Finding
from agentrl.evaluation.diagnosis.summary import RunSummary
from agentrl.evaluation.diagnosis.watch import RunDiagnosis
from agentrl.observe.files import UNREADABLE, replace_file
from agentrl.observe.incidents import Incidents
from agentrl.observe.metrics import read_metrics
from agentrl.observe.run_folder import LOCK, RunDirectory, is_locked
from agentrl.observe.run_status import Liveness, read_status
from agentrl.observe.trajectory_index import EpisodeFilter, TrajectoryIndex
from agentrl.trajectory import Trajectory

MAX_EPISODES = 2000
"""Maximum number of episodes that are read, unless there are more than `MAX_STEPS` steps."""
MAX_STEPS = 200
"""Maximum number of steps whose episodes are read."""
MIN_PER_STEP = 16
INCIDENTS_FILE = "incidents.json"
"""File in the folder of a run or an evaluation with counts of failures."""
_ERROR = re.compile(r"\b(?:\w+Error|Exception|CRITICAL|Segmentation fault|out of memory)\b", re.IGNORECASE)
_TAIL = 65536
"""Bytes at the end of a log that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Diagnosis of a run or an evaluation."""

    folder: Path
    state: Liveness | None
    """State that `agentrl status` prints; ``None`` for an evaluation."""
    step: int
    """Last finished step."""
    steps: int | None
    """Steps of the whole run; ``None`` if the config cannot be read, and for evaluations."""
    episodes: int
    """Number of episodes that were read, without infrastructure failures."""
    findings: tuple[Finding, ...]
    """Ranked, the root cause first."""
    errors: tuple[str, ...] = ()
    """Errors that ended the run, from its logs."""
    notes: tuple[str, ...] = ()
    """Files that could not be read."""

    @property
    def ending(self) -> str:
        """Description of the state."""
        of = "" if self.steps is None else f" of {self.steps}"
        steps = f"step {self.step}{of}"
        match self.state:
            case None:
                return f"an evaluation of {self.episodes} episodes"
            case Liveness.CRASHED:
                return f"crashed after {steps} without an error in its log: it was killed, perhaps for lack of memory"
            case Liveness.STOPPED:
                return f"interrupted after {steps}"
            case state:
                return f"{state} {'after' if state.is_over else 'at'} {steps}"

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``--json``."""
        return {
            "folder": str(self.folder),
            "state": self.state or "evaluation",
            "ending": self.ending,
            "step": self.step,
            "steps": self.steps,
            "episodes": self.episodes,
            "errors": list(self.errors),
            "notes": list(self.notes),
            "findings": [
                finding.to_json()
                | {"look": None if finding.example is None else finding.example.view_command(self.folder)}
                for finding in self.findings
            ],
        }


def diagnose_run(
    run: RunDirectory,
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
    learns_from_rewards: Callable[[Config], bool] = lambda config: True,
) -> Diagnosis:
    """Apply the rules to a run, step by step as the running run does.

    Args:
        run: Folder of the run.
        decode: Decodes the tokens of answers.
        learns_from_rewards: Returns False for a config whose algorithm also learns from equal rewards.
    """
    notes: list[str] = []
    config = _read_config(run, notes)
    lines = read_metrics(run.metrics_file)
    incidents = read_incidents(run)
    summary = RunSummary(
        config=config,
        is_training=not run.rollout_file.is_file(),
        learns_from_rewards=config is None or learns_from_rewards(config),
        incidents=incidents.incidents,
        definitions=incidents.definitions or _names_of_rewards(config),
        decode=decode,
    )
    by_step = _read_episodes(run.trajectories, notes)
    diagnosis = RunDiagnosis(summary)
    for line in lines:
        diagnosis.record_step(line["step"], line, by_step.pop(line["step"], []))
    for step, trajectories in by_step.items():  # of steps that have not finished
        summary.episodes.add_step(trajectories, step)
        if not lines:
            summary.newest.add_step(trajectories, step)
    step, steps = lines[-1]["step"] if lines else 0, None if config is None else config.trainer.steps
    is_rl = any("groups/trained" in line for line in lines) or not lines
    state = _state_of(run, is_complete=steps is None or step >= steps or not is_rl)
    failed = state in (Liveness.FAILED, Liveness.CRASHED)
    return Diagnosis(
        folder=run.path,
        state=state,
        step=step,
        steps=steps if is_rl else None,
        episodes=summary.episodes.episodes,
        findings=diagnosis.findings(),
        errors=tuple(_errors_of(run)) if failed else (),
        notes=tuple(notes),
    )


def diagnose_evaluation(folder: Path, episodes: Path) -> Diagnosis:
    """Apply the rules that make sense for an evaluation to its episodes.

    Args:
        folder: Folder of the evaluation.
        episodes: File of its episodes.
    """
    notes: list[str] = []
    summary = RunSummary(is_training=False, incidents=read_counts(folder / INCIDENTS_FILE))
    for trajectories in _read_episodes(episodes, notes).values():
        summary.episodes.add_step(trajectories, None)
    return Diagnosis(
        folder=folder,
        state=None,
        step=0,
        steps=None,
        episodes=summary.episodes.episodes,
        findings=RunDiagnosis(summary).findings(),
        notes=tuple(notes),
    )


def _read_config(run: RunDirectory, notes: list[str]) -> Config | None:
    try:
        return load_config(run.config_file)
    except (AgentRLError, OSError, UnicodeDecodeError) as error:
        notes.append(f"config.yaml cannot be read, so advice lacks the present values: {error}")
        return None


def _names_of_rewards(config: Config | None) -> dict[str, SourceLocation | None]:
    """Return the names of the config's reward functions as messages name them; their lines are not known."""
    entries = [] if config is None else config.agent.reward
    names = [entry if isinstance(entry, str) else entry["name"] for entry in entries]
    return {f"reward function {name}": None for name in names if name != "environment"}


def _read_episodes(store: Path, notes: list[str]) -> dict[int, list[Trajectory]]:
    """Read the episodes of a store by training step: all of a small store, else those of evenly spread steps."""
    if not store.exists():
        return {}
    found: dict[int, list[Trajectory]] = {}
    ended = EpisodeFilter(is_infrastructure=False)
    with TrajectoryIndex(store) as index:
        steps, count = index.steps(ended), index.count(ended)
        chosen = steps if count <= MAX_EPISODES else _spread(steps)
        most = None if count <= MAX_EPISODES else max(MIN_PER_STEP, MAX_EPISODES // len(chosen))
        for step in chosen:
            where = EpisodeFilter(is_infrastructure=False, first_step=step, last_step=step)
            for row in index.select(where, limit=most):
                with suppress(UsageError):  # the run has changed it since
                    found.setdefault(step, []).append(index.read(row).trajectory)
        if index.damaged:
            notes.append(f"{index.damaged} damaged records of {store} are left out")
        if most is not None:
            read = sum(map(len, found.values()))
            notes.append(f"{read} of {count} episodes were read, of {len(chosen)} of {len(steps)} steps")
    return found


def _spread(steps: Sequence[int]) -> list[int]:
    """Return at most `MAX_STEPS` steps: evenly spread ones, with the first and the last."""
    if len(steps) <= MAX_STEPS:
        return list(steps)
    return sorted({steps[round(i * (len(steps) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)})


def _state_of(run: RunDirectory, *, is_complete: bool) -> Liveness:
    """Return the state by the run's status; by its lock, steps and log if it has none, as of another version."""
    status = read_status(run.path)
    state = None if status is None else status.liveness(time.time())
    if (state is None or state.is_over) and is_locked(run.path / LOCK):  # it may just have been resumed
        return Liveness.RUNNING
    if state is not None:
        return state
    if is_complete:
        return Liveness.FINISHED
    return Liveness.CRASHED if _last_error(_tail(run.run_log)) is None else Liveness.FAILED


def _tail(file: Path) -> str:
    """Return the end of a log, with its damaged bytes replaced; empty if it cannot be read."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - _TAIL))
            return opened.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _last_error(text: str) -> str | None:
    """Return the last record of level ERROR in a run's log, unless the run was resumed after it."""
    records = re.split(r"^(?=\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} )", text, flags=re.MULTILINE)
    last = next((record for record in reversed(records) if record.strip()), "")
    _, found, message = last.partition(" ERROR ")
    return message.partition(": ")[2].strip() if found else None


def _errors_of(run: RunDirectory) -> list[str]:
    """Return the run's last error, and the last lines with an error in the logs of its servers and ranks."""
    own = _last_error(_tail(run.run_log))
    found = [] if own is None else [own]
    for log in sorted(run.logs.glob("*.log")):
        lines = [line.strip() for line in _tail(log).splitlines() if _ERROR.search(line)]
        if log != run.run_log and lines:
            found.append(f"{log.name}: {lines[-1]}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIncidents:
    """Failures of a run's code, and its reward functions."""

    incidents: Incidents = field(default_factory=Incidents)
    definitions: Mapping[str, SourceLocation | None] = field(default_factory=dict)


def save_incidents(run: RunDirectory, found: RunIncidents) -> None:
    """Write the failures so far into the run's folder, for a diagnosis while it runs or after a crash.

    Raises:
        UsageError: the disk is full.
    """
    if not run.path.is_dir():  # it was moved, which another error reports
        return
    places = {
        name: None if place is None else {"file": place.file, "line": place.line}
        for name, place in found.definitions.items()
    }
    record = {"incidents": found.incidents.to_record(), "definitions": places}
    replace_file(run.path / INCIDENTS_FILE, orjson.dumps(record))


def read_counts(file: Path) -> Incidents:
    """Read the failures of an evaluation; none if there is no such file, or it is damaged."""
    incidents = Incidents()
    with suppress(OSError, *UNREADABLE):
        incidents.add_record(orjson.loads(file.read_bytes()))
    return incidents


def read_incidents(run: RunDirectory) -> RunIncidents:
    """Read what `save_incidents` wrote; nothing if there is no such file, or it is damaged."""
    incidents = Incidents()
    try:
        record = orjson.loads((run.path / INCIDENTS_FILE).read_bytes())
        incidents.add_record(record["incidents"])
        places = {
            name: None if place is None else SourceLocation(place["file"], place["line"])
            for name, place in record["definitions"].items()
        }
    except (OSError, *UNREADABLE):
        return RunIncidents()
    return RunIncidents(incidents=incidents, definitions=places)
