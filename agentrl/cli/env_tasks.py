"""`agentrl env validate` and `agentrl env probe`: the tasks of an environment, one by one."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.status import Status
from rich.table import Table
from rich.text import Text

from agentrl.cli.arguments import option_pairs
from agentrl.cli.check import STANDARD_OUTPUT, write_report
from agentrl.cli.evaluations import play_request
from agentrl.cli.exits import discard_standard_output, message_when_interrupted
from agentrl.config.environment import EnvironmentConfig
from agentrl.config.estimate import evaluation_size
from agentrl.env import EnvironmentSpec
from agentrl.env.lookup import check_split, parse_env_name, resolve_environment
from agentrl.errors import AgentRLError, UsageError
from agentrl.evaluation.comparison import TaskScore, evaluation_scores
from agentrl.evaluation.evaluate import PolicyKind
from agentrl.evaluation.panel import choose_tasks, task_digest
from agentrl.evaluation.session import FinishedEvaluation, describe_request, environment_identity, make_request
from agentrl.evaluation.settings import evaluation_config
from agentrl.observe.console import err, note, out
from agentrl.observe.files import UNREADABLE, JsonLinesWriter, check_writable, numbered_records, warn_damaged
from agentrl.rollout.task_source import limited_by_tasks, task_source, write_tasks
from agentrl.task import Task, TaskSource
from agentrl.testing.task_validation import CALL_S, TaskStatus, TaskValidation, validate_tasks

Options = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options of the environment; values are YAML.")
]
Keys = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys.")]
TaskFile = Annotated[
    str | None, typer.Option("--tasks", metavar="FILE", help="Read the tasks from this file instead of a split.")
]
STYLES = {TaskStatus.VALID: "green", TaskStatus.INVALID: "bold red", TaskStatus.UNKNOWN: "yellow"}
MAX_SHOWN = 50
"""Maximum number of tasks in a printed table; the JSON report has all."""
LINES = 10
"""Number of progress lines without a terminal."""
BINS = 10
"""Number of bins of the histogram of success rates between 0 and 1."""


def environment_options(words: Sequence[str] | None) -> dict[str, Any]:
    """Parse options ``key=value`` of an environment; see `option_pairs`.

    Raises:
        UsageError: not valid options, or a config key.
    """
    for word in words or []:
        if word.startswith("environment."):
            raise UsageError(
                "a config key where options of the environment are expected",
                got=word,
                expected="the option alone, such as size=5",
                hint="--tasks FILE is for tasks"
                if word.startswith("environment.tasks=")
                else "remove 'environment.options.'",
            )
    return option_pairs(words)


def validate(
    name: Annotated[str, typer.Argument(help="Environment, as for env show, optionally with /SPLIT.")],
    options: Options = None,
    tasks: TaskFile = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of tasks to validate, starting with the first; default: all.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum number of tasks at a time.")] = 1,
    call_timeout_s: Annotated[
        float, typer.Option("--call-timeout", min=0.1, help="Seconds per call of the environment.")
    ] = CALL_S,
    records: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append each result to this file, and skip tasks that it already has."),
    ] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="Write the report to this file; - prints it.")] = None,
) -> None:
    """Validate every task: its solution must solve it, reproducibly, and doing nothing must not.

    The environment's expert plays the solution; without an expert, the solution is the task's ground truth. The exit
    code is 1 if a task is invalid. With --records, the same command resumes after Ctrl-C, and repeats tasks whose
    content, code or data has changed.
    """
    _check_files(records, json_file)
    named = parse_env_name(name)
    spec = resolve_environment(named.name)
    if spec.extra is not None:
        spec.extra.load()
    given = environment_options(options)
    source, split = _source(spec, named.split, given, tasks)
    chosen = [source[index] for index in range(min(len(source), limit or len(source)))]
    if not chosen:
        raise UsageError(f"split {split} of {spec.name} has no tasks", expected="at least one task to validate")
    identity = "" if records is None else environment_identity(named.name, given, records)
    store = _Records(records, identity, call_timeout_s)
    known = {task.id: result for task in chosen if (result := store.find(task)) is not None}
    if known:
        note(f"{records} already has the results of {len(known):,} of these tasks")
    counter = _Counter(spec.name, len(chosen))
    began = time.perf_counter()

    @message_when_interrupted(lambda: _stop_message(counter, records))
    def play_unknown() -> dict[str, TaskValidation]:
        found = dict(known)
        left = {task.id: task for task in chosen if task.id not in known}
        with counter.showing(found.values()), discard_standard_output():
            for new in validate_tasks(
                spec, {**spec.options, **given}, left.values(), concurrency=concurrency, call_timeout_s=call_timeout_s
            ):
                found[new.task_id] = new
                store.add(left[new.task_id], new)
                counter.add(new)
        return found

    found = play_unknown()
    results = [found[task.id] for task in chosen]
    report = ValidationReport(spec.name, split, results, len(known), time.perf_counter() - began)
    if json_file != STANDARD_OUTPUT:
        _print_validation(report)
    write_report(report.to_plain(), json_file)
    report.check()


def _check_files(output: Path | None, json_file: str | None) -> None:
    """Check that the results can be written, before anything is played.

    Raises:
        UsageError: a file cannot be written.
    """
    for file in (output, None if json_file in (None, STANDARD_OUTPUT) else Path(str(json_file))):
        if file is not None:
            check_writable(file)


def _source(
    spec: EnvironmentSpec, split: str | None, options: Mapping[str, Any], tasks: str | None
) -> tuple[TaskSource, str]:
    """Return the tasks, and the name of their split or file."""
    if tasks is not None and split is not None:
        raise UsageError(
            "there are two sources of tasks", got=f"split {split} and --tasks {tasks}", expected="only one of them"
        )
    chosen = check_split(spec, split or spec.splits_under(options)[0])
    config = EnvironmentConfig(name=spec.name, options=dict(options), tasks=tasks)
    return task_source(spec, config, split=None if tasks is not None else chosen), tasks or chosen


def on_tasks_of_file(name: str, options: Mapping[str, Any], tasks: str) -> EnvironmentSpec:
    """Return an environment whose only tasks are those of a file.

    Raises:
        UsageError: the environment does not exist, the name has a split, or the file cannot be read.
    """
    named = parse_env_name(name)
    spec = resolve_environment(named.name)
    source, _ = _source(spec, named.split, options, tasks)
    return replace(spec, tasks=lambda _split, **_options: source, splits=("train",), splits_of=None)


class _Records:
    """File of results, from which a later run of the command continues.

    Args:
        path: The file; nothing is kept for ``None``.
        identity: Digest of the environment's code, data and options; results of others are not reused.
        call_timeout_s: Deadline of calls; results that are not valid are not reused if they had a shorter one.
    """

    def __init__(self, path: Path | None, identity: str, call_timeout_s: float) -> None:
        self._identity, self._call_timeout_s = identity, call_timeout_s
        self._known: dict[str, TaskValidation] = {}
        if path is not None and path.exists():
            self._read(path)
        self._writer = None if path is None else JsonLinesWriter(path)

    def _read(self, path: Path) -> None:
        damaged: list[int] = []
        for number, record in numbered_records(path, damaged):
            try:
                result = TaskValidation.from_plain(record)
                if result.status is TaskStatus.VALID or record["call_timeout_s"] >= self._call_timeout_s:
                    self._known[record["key"]] = result
            except UNREADABLE:
                damaged.append(number)
        warn_damaged(path, damaged)

    def find(self, task: Task) -> TaskValidation | None:
        """Return the recorded result of a task that has not changed since; ``None`` if there is none."""
        return self._known.get(self._key(task))

    def add(self, task: Task, result: TaskValidation) -> None:
        """Keep a result."""
        if self._writer is not None:
            known = {"key": self._key(task), "call_timeout_s": self._call_timeout_s}
            self._writer.append({**known, **result.to_plain()})

    def _key(self, task: Task) -> str:
        return hashlib.blake2b(f"{self._identity} {task_digest(task)}".encode(), digest_size=8).hexdigest()


@dataclass(slots=True)
class _Counter:
    """Progress of a validation on standard error."""

    name: str
    total: int
    counts: Counter[TaskStatus] = field(default_factory=Counter)
    status: Status | None = None

    def add(self, result: TaskValidation) -> None:
        """Count a result."""
        self.counts[result.status] += 1
        if self.status is not None:
            self.status.update(f"{self.name}: {self.line()}")
        elif self.counts.total() % max(1, self.total // LINES) == 0 or self.counts.total() == self.total:
            note(self.line())

    def line(self) -> str:
        """Describe the progress in one line."""
        bad = [f"{self.counts[kind]} {kind}" for kind in (TaskStatus.INVALID, TaskStatus.UNKNOWN) if self.counts[kind]]
        return ", ".join([f"{self.counts.total()}/{self.total} tasks", *bad])

    @contextmanager
    def showing(self, known: Iterable[TaskValidation]) -> Iterator[None]:
        """Show the progress during the block, starting with the known results."""
        self.counts.update(result.status for result in known)
        if not err.is_terminal:
            yield
            return
        with err.status(f"{self.name}: {self.line()}") as self.status:
            yield


def _stop_message(counter: _Counter, records: Path | None) -> str:
    if records is None:
        return f"stopped after {counter.line()}; with --records FILE, the same command would resume"
    return f"stopped after {counter.line()}: the results are in {records}, and the same command resumes"


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Results of all tasks."""

    environment: str
    split: str
    """Split, or file of tasks."""
    results: Sequence[TaskValidation]
    reused: int
    """Number of results of an earlier run of the command."""
    seconds: float

    def count(self, status: TaskStatus) -> int:
        """Return the number of tasks with a status."""
        return sum(result.status is status for result in self.results)

    def to_plain(self) -> dict[str, Any]:
        """Return the report in plain JSON types."""
        return {
            "environment": self.environment,
            "split": self.split,
            "tasks": len(self.results),
            **{status.value: self.count(status) for status in TaskStatus},
            "reused": self.reused,
            "seconds": round(self.seconds, 3),
            "results": [result.to_plain() for result in self.results],
        }

    def check(self) -> None:
        """Check that all tasks with a known result are valid, and that there is one.

        Raises:
            AgentRLError: they are not.
        """
        invalid = [result.task_id for result in self.results if result.status is TaskStatus.INVALID]
        if invalid:
            more = ", …" if len(invalid) > 3 else ""
            raise AgentRLError(
                f"{len(invalid):,} of {len(self.results):,} tasks of {self.environment} are invalid",
                got=", ".join(invalid[:3]) + more,
                hint=f"play one of them: agentrl env play {shlex.quote(self.environment)} --task NUMBER",
            )
        if not self.count(TaskStatus.VALID):
            raise AgentRLError(
                f"no task of {self.environment} can be validated",
                got=self.results[0].problems[0],
                expected='an expert() or a ground_truth for each task, and info["success"] at the end of an episode',
            )


def _print_validation(report: ValidationReport) -> None:
    out.print(Text(f"environment {report.environment}, {report.split}", style="bold"))
    wrong = [one for one in report.results if one.status is not TaskStatus.VALID]
    noted = [one for one in report.results if one.status is TaskStatus.VALID and one.remarks]
    table = Table("", "task", "found", box=None, pad_edge=False)
    for result in [*wrong, *noted][:MAX_SHOWN]:
        found = "; ".join([*result.problems, *result.remarks])
        table.add_row(Text(result.status, style=STYLES[result.status]), result.task_id, found)
    if table.row_count:
        out.print(table)
    if (left := len(wrong) + len(noted) - MAX_SHOWN) > 0:
        out.print(f"… and {left:,} more; --json FILE lists all")
    counts = ", ".join(f"{report.count(status):,} {status}" for status in TaskStatus)
    reused = f", {report.reused:,} reused" if report.reused else ""
    out.print(Text(f"{len(report.results):,} tasks: {counts}; {report.seconds:.1f} s{reused}", style="dim"))


def probe(
    name: Annotated[str, typer.Argument(help="Environment, as for env show, optionally with /SPLIT.")],
    words: Keys = None,
    model: Annotated[str | None, typer.Option(help="Model folder or name, run, or checkpoint.")] = None,
    policy: Annotated[PolicyKind, typer.Option(help="Policy that plays.")] = PolicyKind.ENGINE,
    engine: Annotated[str | None, typer.Option(help="local, vllm, sglang, scripted or openai.")] = None,
    url: Annotated[str | None, typer.Option(help="Address of a running server or service.")] = None,
    tasks: TaskFile = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of tasks, drawn by the seed; default: all.")] = None,
    attempts: Annotated[int, typer.Option(min=1, help="Episodes per task.")] = 8,
    band: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="Success rates of the tasks to write, both ends included.")
    ] = "0.05:0.95",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tasks within the band to this file.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for task selection and sampling.")] = 0,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Maximum number of concurrent episodes.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the rates of all tasks to this file; - prints them.")
    ] = None,
) -> None:
    """Measure how difficult each task is for a model, and write tasks within a band of success rates to a task file.

    A task that is always or never solved gives no training signal. Train on the written file with
    agentrl train --tasks. Finished episodes are kept, so the same command resumes a stopped probe.
    """
    low, high = _band(band)
    _check_files(output, json_file)
    named = parse_env_name(name)
    spec = resolve_environment(named.name)
    if tasks is not None and named.split is not None:
        raise UsageError(
            "there are two sources of tasks",
            got=f"split {named.split} and --tasks {tasks}",
            expected="only one of them",
        )
    split = check_split(spec, named.split or spec.splits[0])
    config = evaluation_config(
        env=f"{named.name}/{split}",
        model=model,
        policy=policy,
        engine=engine,
        url=url,
        temperature=temperature,
        concurrency=concurrency,
        overrides=[*([] if tasks is None else _file_words(tasks)), *(words or [])],
    )
    source = task_source(spec, config.sole_environment)
    request = make_request(config, policy=policy, model=model, tasks=limit or len(source), samples=attempts, seed=seed)
    if policy is PolicyKind.ENGINE:
        note(evaluation_size(limited_by_tasks(config), request.n_tasks, request.samples))
    note(describe_request(request))
    finished = play_request(request)
    report = _difficulty(finished, choose_tasks(source, request.n_tasks, seed), low, high)
    if json_file != STANDARD_OUTPUT:
        _print_difficulty(report)
    write_report(report.to_plain(), json_file)
    _write_band(report, named.name, model, output)


def _file_words(tasks: str) -> list[str]:
    return [f"environment.tasks={json.dumps(tasks)}", "environment.split=train"]


def _band(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        found = float(low), float(high)
    except ValueError:
        found = (1.0, 0.0)
    if not 0 <= found[0] <= found[1] <= 1:
        raise UsageError("the band of success rates is not valid", got=repr(text), expected="LOW:HIGH, such as 0.1:0.9")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DifficultyReport:
    """Success rates of tasks."""

    finished: FinishedEvaluation
    low: float
    high: float
    rates: Mapping[str, TaskScore]
    """Measured success by task id."""
    tasks: Sequence[Task]
    """All probed tasks."""

    @property
    def inside(self) -> list[Task]:
        """Tasks whose success rate is in the band."""
        rates = ((task, self.rates.get(task.id)) for task in self.tasks)
        return [t for t, rate in rates if rate and rate.success is not None and self.low <= rate.success <= self.high]

    def to_plain(self) -> dict[str, Any]:
        """Return the report in plain JSON types."""
        result = self.finished.result
        return {
            "environment": result.panel.environment,
            "policy": result.panel.policy,
            "model": result.panel.model,
            "attempts": result.panel.samples,
            "panel_hash": result.panel_hash,
            "band": [self.low, self.high],
            "in_band": len(self.inside),
            "tasks": [
                {"id": task.id, "type": task.type, **_rate_document(self.rates.get(task.id))} for task in self.tasks
            ],
        }


def _rate_document(score: TaskScore | None) -> dict[str, Any]:
    return {
        "success_rate": None if score is None else score.success,
        "reward": None if score is None else score.reward,
        "episodes": 0 if score is None else score.episodes,
    }


def _difficulty(finished: FinishedEvaluation, tasks: Sequence[Task], low: float, high: float) -> DifficultyReport:
    """Compute the success rates of the tasks.

    Raises:
        UsageError: the environment does not report success.
        AgentRLError: no episode could be measured.
    """
    scores = evaluation_scores(finished.result.episodes)
    rates = {str(key[0]): score for key, score in scores.items() if isinstance(key, tuple)}
    if not rates:
        example = next((one.trajectory.error for one in finished.result.episodes), None)
        raise AgentRLError("no episode of the probe finished", got=example)
    if all(score.success is None for score in rates.values()):
        raise UsageError(
            f"environment {finished.result.panel.environment} does not report success",
            expected='info["success"] at the end of an episode',
        )
    return DifficultyReport(finished=finished, low=low, high=high, rates=rates, tasks=tasks)


def _print_difficulty(report: DifficultyReport) -> None:
    bins = ["never solved", *(f"{n / BINS:.1f} to {(n + 1) / BINS:.1f}" for n in range(BINS)), "always solved"]
    counts: dict[str, int] = defaultdict(int)
    for score in report.rates.values():
        if score.success is not None:
            inner = bins[1 + min(int(score.success * BINS), BINS - 1)]
            counts[bins[0] if score.success == 0 else bins[-1] if score.success == 1 else inner] += 1
    table = Table("success rate", "tasks", "", box=None, pad_edge=False)
    for name in bins:
        if counts[name]:
            table.add_row(name, f"{counts[name]:,}", "█" * max(1, round(40 * counts[name] / len(report.rates))))
    if missing := len(report.tasks) - len(report.rates):
        table.add_row("not measured", f"{missing:,}", "")
    out.print(table)
    result = report.finished.result
    out.print(f"{len(report.tasks):,} tasks, {result.panel.samples} attempts each, panel {result.panel_hash}")
    inside = len(report.inside)
    out.print(f"{inside:,} of them have success rates between {report.low:g} and {report.high:g}")


def _write_band(report: DifficultyReport, environment: str, model: str | None, output: Path | None) -> None:
    """Write the tasks in the band.

    Raises:
        AgentRLError: there are none.
    """
    inside = report.inside
    if output is None:
        note("no task file was written; add --output FILE to write one")
        return
    if not inside:
        raise AgentRLError(
            "no task is within the band of success rates",
            got=f"{report.low:g}:{report.high:g}",
            hint="use a wider --band, more --attempts, or an easier or harder split",
        )
    write_tasks(inside, output)
    words = shlex.join(["--env", environment, *([] if model is None else ["--model", model]), "--tasks", str(output)])
    note(f"wrote {len(inside):,} tasks to {output}; train on them: agentrl train {words}")
