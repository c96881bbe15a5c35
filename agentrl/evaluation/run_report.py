"""Tables of a report about runs: results, cost, settings, machine, and how to repeat them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from agentrl.config.config import Config
from agentrl.config.load import load_config
from agentrl.errors import AgentRLError
from agentrl.evaluation.curves import NamedRuns
from agentrl.evaluation.diagnosis.finding import Finding, top
from agentrl.evaluation.report import Report, ReportTable, panel_warnings
from agentrl.evaluation.result import EvaluationResult, MeanInterval, estimate_text, wilson_interval
from agentrl.observe.idle_steps import steps_without_learning
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.secrets import hide_in_text, hide_secrets
from agentrl.observe.terminal import step_words
from agentrl.observe.trajectory_index import EpisodeFilter, EpisodeSummary, TrajectoryIndex
from agentrl.trajectory import Trajectory

SHARE = 4
"""The first and the last quarter of the steps are compared."""
PHASES = ("rollout", "train", "sync")
_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """A run with its metrics and findings, as a report needs them."""

    folder: RunDirectory
    config: Config | None
    lines: Sequence[Mapping[str, Any]]
    state: str
    """State of the run, in words."""
    start: Mapping[str, Any] = field(default_factory=dict)
    """Record of its start: command, machine, versions."""
    findings: Sequence[Finding] = ()

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.path.name


def named_runs(runs: Sequence[ReportedRun]) -> list[NamedRuns]:
    """Group runs that differ only in their seed and name, whose curves then have intervals over seeds."""
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        own = run.name if run.config is None else repr(sorted(_settings(run, but=("run.",)).items()))
        groups.setdefault(own, []).append(run)
    return [
        NamedRuns(
            name=members[0].name if len(members) == 1 else f"{members[0].name} and {len(members) - 1} more seeds",
            metrics=[member.lines for member in members],
        )
        for members in groups.values()
    ]


def run_tables(runs: Sequence[ReportedRun], *, price_per_hour: float | None = None) -> list[ReportTable]:
    """Return the tables of a report, one column for each run; empty ones are left out."""
    tables = [
        _overview(runs),
        _types_table(runs),
        _cost_table(runs, price_per_hour),
        _settings_table(runs),
        _machine_table(runs),
    ]
    return [table for table in tables if table.rows]


def _header(runs: Sequence[ReportedRun]) -> list[str]:
    return ["", *(run.name for run in runs)]


def _overview(runs: Sequence[ReportedRun]) -> ReportTable:
    def row(label: str, cell: Any) -> list[str]:
        return [label, *(str(cell(run)) for run in runs)]

    rows = [
        row("state", lambda run: run.state),
        row("environment", lambda run: _setting(run, _environments)),
        row("model", lambda run: _setting(run, lambda config: config.model.path)),
        row("algorithm", lambda run: _setting(run, lambda c: f"{c.algorithm.advantage}, {c.algorithm.loss}")),
        row("training success, first quarter", lambda run: _success(run.lines[: _quarter(run.lines)])),
        row("training success, last quarter", lambda run: _success(run.lines[-_quarter(run.lines) :])),
        row("reward, first and last quarter", _reward),
        row("best evaluation", _best_evaluation),
    ]
    return ReportTable(title="Runs", header=_header(runs), rows=rows)


def _setting(run: ReportedRun, read: Any) -> str:
    return "unknown" if run.config is None else str(read(run.config))


def _environments(config: Config) -> str:
    if config.environments:
        return ", ".join(config.environments)
    return "prompts" if config.environment is None else f"{config.environment.name}/{config.environment.split}"


def _quarter(lines: Sequence[Any]) -> int:
    return max(1, len(lines) // SHARE)


def _success(lines: Sequence[Mapping[str, Any]]) -> str:
    """Pool the success of some steps."""
    known = [line for line in lines if 0 <= line.get("success/mean", -1) <= 1 and line.get("episodes", 0) > 0]
    if not known:
        return "unknown"
    episodes = sum(float(line["episodes"]) for line in known)
    solved = sum(float(line["success/mean"]) * float(line["episodes"]) for line in known)
    return estimate_text(wilson_interval(min(solved, episodes), episodes))


def _reward(run: ReportedRun) -> str:
    values = [float(line["reward/mean"]) for line in run.lines if line.get("reward/mean") is not None]
    if not values:
        return "none"
    count = _quarter(values)
    return f"{sum(values[:count]) / count:.3f}, {sum(values[-count:]) / count:.3f}"


def _best_evaluation(run: ReportedRun) -> str:
    found = [line for line in run.lines if line.get("eval/success") is not None]
    if not found:
        return "none"
    best = max(found, key=lambda line: float(line["eval/success"]))
    mean = float(best["eval/success"])
    low, high = (float(best.get(f"eval/success_{side}", mean)) for side in ("low", "high"))
    step = int(best.get("eval/at_step", best["step"]))
    return f"{estimate_text(MeanInterval(mean=mean, low=low, high=high))}, step {step}"


def _types_table(runs: Sequence[ReportedRun]) -> ReportTable:
    """Compare the success by type of task in the first with the last quarter of the steps."""
    found = [success_by_type(run) for run in runs]
    types = sorted({name for one in found for name in one})
    rows = [[name, *(one.get(name, "not played") for one in found)] for name in types]
    title = "Success by type of task, first and last quarter of the steps"
    return ReportTable(title=title, header=_header(runs), rows=rows)


def success_by_type(run: ReportedRun) -> dict[str, str]:
    """Return the success of training episodes by type of task; empty if tasks have no types."""
    if not run.folder.trajectories.is_dir() or not run.lines:
        return {}
    quarter = _quarter(run.lines)
    first, last = int(run.lines[quarter - 1]["step"]), int(run.lines[-quarter]["step"])
    with TrajectoryIndex(run.folder.trajectories) as index:
        early = _successes(index, EpisodeFilter(is_trainable=True, last_step=first))
        late = _successes(index, EpisodeFilter(is_trainable=True, first_step=last))
    types = sorted(name for name in {*early, *late} if name)
    return {name: f"{_share(early.get(name))} to {_share(late.get(name))}" for name in types}


def _successes(index: TrajectoryIndex, where: EpisodeFilter) -> dict[str | None, EpisodeSummary]:
    return {row.values[0]: row for row in index.summarize(["task_type"], where) if row.judged}


def _share(row: EpisodeSummary | None) -> str:
    if row is None:
        return "not played"
    return f"{estimate_text(wilson_interval(row.solved, row.judged))}, n = {row.judged}"


def _cost_table(runs: Sequence[ReportedRun], price_per_hour: float | None) -> ReportTable:
    columns = [_costs(run, price_per_hour) for run in runs]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    rows = [[label, *(column.get(label, "not measured") for column in columns)] for label in labels]
    return ReportTable(title="Cost", header=_header(runs), rows=rows)


def _costs(run: ReportedRun, price_per_hour: float | None) -> dict[str, str]:
    def total(name: str) -> float:
        return sum(float(line.get(name) or 0.0) for line in run.lines)

    if not run.lines:
        return {}
    seconds = total("time/step_s")
    whole = seconds or 1.0
    costs = {
        "steps": str(len(run.lines)),
        "episodes": f"{total('episodes'):,.0f}",
        "tokens in episodes": f"{total('tokens/total'):,.0f}",
        "sampled tokens": f"{total('tokens/sampled'):,.0f}",
        "time of the steps": _duration(seconds),
        "time by phase": ", ".join(f"{name} {total(f'time/{name}_s') / whole:.0%}" for name in PHASES),
        "time of evaluations": _duration(total("time/evaluate_s")),
        "CPU time of the trainer's process": _duration(cpu) if (cpu := total("time/cpu_s")) else "not measured",
    }
    judge = sum(map(total, {name for line in run.lines for name in line if name.endswith("judge/cost")}))
    machine = price_per_hour * seconds / _HOUR if price_per_hour is not None else 0.0
    if judge:
        costs["judge"] = f"{judge:.2f} (agent.judge.budget)"
    if price_per_hour is not None:
        costs["machine"] = f"{machine:.2f} ({price_per_hour:g} per hour)"
    return costs


def _duration(seconds: float) -> str:
    """Format seconds.

    >>> _duration(42.3), _duration(600), _duration(9000)
    ('42 s', '10.0 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 2 * _HOUR else f"{seconds / _HOUR:.1f} h"


def _settings(run: ReportedRun, *, but: Sequence[str] = ()) -> dict[str, str]:
    """Return the settings that differ from their defaults, by key; those of a warm start only if the run is one."""
    found = {} if run.config is None else _flat(hide_secrets(run.config.model_dump(mode="json", exclude_defaults=True)))
    ignored = (*but, *(() if any("sft/loss" in line for line in run.lines) else ("sft.",)))
    return {key: value for key, value in found.items() if not key.startswith(ignored)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{key}.")
        else:
            flat[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return flat


def _settings_table(runs: Sequence[ReportedRun]) -> ReportTable:
    found = [_settings(run, but=("run.name", "run.directory")) for run in runs]
    keys = list(dict.fromkeys(key for one in found for key in one))
    rows = [[key, *(one.get(key, "default") for one in found)] for key in keys]
    return ReportTable(title="Settings that differ from their defaults", header=_header(runs), rows=rows)


def _machine_table(runs: Sequence[ReportedRun]) -> ReportTable:
    found = [{**run.start.get("machine", {}), **run.start.get("versions", {})} for run in runs]
    keys = list(dict.fromkeys(key for one in found for key in one))
    rows = [[key, *(str(one.get(key, "unknown")) for one in found)] for key in keys]
    return ReportTable(title="Machine and versions", header=_header(runs), rows=rows)


def commands(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the commands that repeat the runs, each after the one that started it."""
    found = []
    for run in runs:
        if command := run.start.get("command"):
            found.append(f"{run.name} was started with: {hide_in_text(command)}")
        again = ["agentrl", "train", str(run.folder.config_file), f"run.name={run.name}-again"]
        found.append(f"to repeat it exactly: {shlex.join(again)}")
    return found


def run_report(
    runs: Sequence[ReportedRun],
    *,
    results: Mapping[str, EvaluationResult] = MappingProxyType({}),
    examples: Sequence[Trajectory] = (),
    price_per_hour: float | None = None,
) -> Report:
    """Make the report of some runs and evaluations.

    Args:
        runs: Runs; several that differ only in their seed share a curve.
        results: Evaluations by the name of their column; each one is compared with the first.
        examples: Episodes to show token by token.
        price_per_hour: Price of the machine per hour.
    """
    names = [run.name for run in runs] or list(results)
    several = len(runs) > 1
    return Report(
        title=f"{'Runs' if several else 'Run'} {', '.join(names)}" if runs else f"Evaluations: {', '.join(names)}",
        results=results,
        metrics=runs[0].lines if len(runs) == 1 else (),
        examples=examples,
        notes=[
            *(f"{f'{run.name}: ' if several else ''}{_run_note(run.lines)}" for run in runs),
            *panel_warnings(results),
        ],
        problems=[
            f"{f'{run.name}: ' if several else ''}{finding.text}" for run in runs for finding in top(run.findings)
        ],
        run_tables=run_tables(runs, price_per_hour=price_per_hour) if runs else (),
        runs=named_runs(runs),
        commands=commands(runs),
    )


def _run_note(metrics: Sequence[Mapping[str, Any]]) -> str:
    if not metrics:
        return "No training step has finished."
    last = step_words(metrics[-1]["step"], len(metrics), metrics[-1]).replace("  ", ", ")
    note = f"{len(metrics)} training steps. The last one: {last}."
    idle = steps_without_learning(metrics)
    if not idle:
        return note
    return f"{note} In {idle} of the steps nothing was learned: all episodes of a task had the same return."


def config_of(run: RunDirectory) -> Config | None:
    """Read the config of a run; ``None`` if it cannot be read, such as that of another version."""
    try:
        return load_config(run.config_file)
    except (AgentRLError, OSError, UnicodeDecodeError):
        return None
