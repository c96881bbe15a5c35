"""Start, resume and result of a run: its checks and its folder."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentrl.builders.checks import check_agents, check_training
from agentrl.builders.episodes import build_loop
from agentrl.builders.group_extras import check_extra_rollouts
from agentrl.builders.models import check_tokens, resolve_model, start_renderer
from agentrl.builders.rewards import check_rewards
from agentrl.builders.tools import check_tools
from agentrl.config.config import SCRATCH, Config
from agentrl.config.derived import per_environment_configs
from agentrl.config.load import dump_config, load_config
from agentrl.config.resume_rules import RULES, Change, ResumeRule, changes, check_same_run, learning_rules
from agentrl.config.step_settings import environment_stages
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError, UsageError
from agentrl.evaluation.diagnosis.finding import Finding, finding_lines, top
from agentrl.evaluation.diagnosis.watch import read_findings
from agentrl.evaluation.periodic import check_panels
from agentrl.models.identity import NOT_CACHED, weights
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.console import html_table
from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import RunStatus, RunWatcher
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.run_status import RunEnd, read_status
from agentrl.observe.trackers import check_trackers
from agentrl.render.tokenizers import load_tokenizer
from agentrl.rollout.curriculum import check_curriculum
from agentrl.rollout.environment_probe import check_environments
from agentrl.rollout.loop_choice import check_rendering, select_default_loop
from agentrl.rollout.task_source import task_source
from agentrl.runs.prometheus import check_prometheus
from agentrl.runs.start_record import read_start_record, write_start_record
from agentrl.serving.launch.placement import check_machine
from agentrl.training.chat_file import ENVIRONMENT

_log = logging.getLogger(__name__)

_TEXTS = (".json", ".jinja", ".txt")
"""Suffixes of files of a model that are not weights."""
MIXED = "mixed"
"""Environment part of the generated name of a run with several environments."""


@dataclass(frozen=True, slots=True)
class Run:
    """Folder and config of a run."""

    folder: RunDirectory
    config: Config
    changes: tuple[Change, ...] = ()
    """Differences from the config in the folder, which is replaced once the run has started."""


class StartCheck(Protocol):
    """Check for errors that would otherwise end a run after its start, before its folder is created."""

    def __call__(self, config: Config, *, fetch: bool = True, say: Callable[[str], None] = ...) -> None:
        """Check the config.

        Args:
            config: Config of the run, with its agent loop.
            fetch: Download a model that is not on this machine; otherwise its template is not checked.
            say: Called with messages for the user before the run starts.

        Raises:
            UsageError: a role, a tool, a model or a file is invalid.
            TemplateError: the chat template does not support the agent loop or the conversations.
        """


def check_rollouts(config: Config, *, fetch: bool = True, say: Callable[[str], None] = lambda _: None) -> None:
    """Check agents, extra rollouts and the chat template of a run with rollouts; see `StartCheck`."""
    check_agents(config)
    check_extra_rollouts(config)
    renderer = start_renderer(config, fetch=fetch)
    if renderer is None:
        return
    check_rendering(config, renderer, say=say)
    if fetch:
        check_tokens(config, config.model.path)


def start_run(config: Config, *, kind: str, command: str = "train", check: StartCheck | None = check_rollouts) -> Run:
    """Create the folder of a new run and save the resolved config in it.

    Args:
        config: Config of the run. Its environments, tasks and model must exist.
        kind: Kind of run for its generated name, such as ``grpo`` or ``sft``.
        command: Command that resumes the run.
        check: Check of this kind of run.

    Raises:
        UsageError: something that the config names does not exist, or the folder already contains a run.
        ConfigError: the agent loop or a tool does not accept an option, or a split has too few tasks for evaluations.
        TemplateError: the model's chat template does not support the agent loop.
    """
    name = check_tasks(config) if config.has_environment else ENVIRONMENT
    check_observers(config)
    resolved = select_default_loop(resolve_model(config), say=_log.warning)
    if resolved.model.path != SCRATCH:
        load_tokenizer(resolved.model.path)
    if config.has_environment:
        check_environments(config)
        for stage in environment_stages(config):
            check_environments(stage.config)
    if check is not None:
        check(resolved)
    folder = RunDirectory.create(Path(config.run.directory), config.run.name, prefix=f"{name}-{kind}")
    try:
        folder.save_config(dump_config(resolved))
        write_start_record(folder, resumed_by=command, base=_base_weights(resolved))
    except UsageError:
        folder.undo_start()
        raise
    return Run(folder, resolved)


def check_observers(config: Config) -> None:
    """Check that the run's trackers can be created and that Prometheus can read it.

    Raises:
        UsageError: a package is missing, or a tracker is unknown.
    """
    check_trackers(config.trackers)
    check_prometheus(config.observe.prometheus_port)


def check_tasks(config: Config) -> str:
    """Check tasks, loops, tools, rewards and evaluations, and return the environment part of the generated name.

    Raises:
        UsageError: an unknown name or option, or too few tasks.
    """
    for part in (*per_environment_configs(config), *environment_stages(config)):
        spec = resolve_environment(part.config.sole_environment.name)
        task_source(spec, part.config.sole_environment)
        build_loop(part.config.agent)
    check_tools(config)
    check_rewards(config)
    check_panels(config)
    check_curriculum(config)
    return MIXED if config.environments else spec.name


def resume_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Open an existing training run to resume it. Its folder does not change until the run has started.

    Args:
        path: Folder of the run, or ``runs/latest``.
        overrides: Changes of the config, such as ``trainer.steps=200``.

    Raises:
        UsageError: the folder contains no run.
        ConfigError: an override is invalid or not allowed on resume, or the run has no step left.
    """
    run = _reopen(path, overrides, "train", RULES)
    _check_steps_left(run)
    check_training(run.config)
    check_machine(run.config)
    check_panels(run.config)
    check_curriculum(run.config)
    return run


def resume_learning(path: str | Path, overrides: Sequence[str] = (), *, command: str) -> Run:
    """Open an existing run of the `command` ``sft``, ``dpo`` or ``reward-model`` to resume it, like `resume_run`."""
    run = _reopen(path, overrides, command, learning_rules("sft" if command == "sft" else "preferences"))
    status = read_status(run.folder.path)
    if run.changes and status is not None and status.end is RunEnd.FINISHED:
        raise ConfigError(
            "the change has no effect: the training has ended",
            got=", ".join(map(str, run.changes)),
            expected="a run that was stopped or killed",
            hint="to train further, start a new run from its model: "
            f"agentrl {command} … model.path={shlex.quote(str(run.folder.path))}",
        )
    return run


def _reopen(path: str | Path, overrides: Sequence[str], command: str, rules: Mapping[str, ResumeRule]) -> Run:
    """Open a run with changes of its config that the rules allow, and check what every kind of run needs."""
    folder = _open_run(path, command)
    config = load_config(folder.config_file, overrides)
    found = changes(load_config(folder.config_file), config, rules)
    check_same_run(found, command)
    check_observers(config)
    warn_changed_base(folder, config)
    return Run(folder, config, found)


def warn_changed_base(run: RunDirectory, config: Config) -> None:
    """Log a warning if the weights below a run's adapters have changed since its start."""
    if (base := _base_weights(config)) and base != read_start_record(run).get("base", base):
        _log.warning(
            "the files of %s have changed since the run was started, whose adapters belong to the earlier weights: "
            "restore them, unless only their times of modification differ",
            config.model.path,
        )


def resuming_command(run: RunDirectory) -> str:
    """Return the command that resumes a run; empty if neither its status nor the record of its start can be read."""
    if run.rollout_file.is_file():
        return "rollout"
    status = read_status(run.path)
    return str(read_start_record(run).get("resumed_by", "")) if status is None else status.resumed_by


def _open_run(path: str | Path, command: str) -> RunDirectory:
    """Open a run's folder, and check that this command resumes the run."""
    folder = RunDirectory.open(path)
    other, quoted = resuming_command(folder), shlex.quote(str(folder.path))
    if other in ("", command):
        return folder
    use = f"train on its episodes: agentrl train CONFIG --episodes {quoted}"
    if other != "rollout":
        use = f"start a new run from its model: agentrl {command} … model.path={quoted}"
    raise UsageError(
        f"{folder.path} is not a run of agentrl {command}",
        got=f"a run of agentrl {other}",
        hint=f"resume it with: agentrl {other} --resume {quoted}, or {use}",
    )


def _base_weights(config: Config) -> list[str]:
    """Return the identity of the weights below the adapters of a run; empty for other runs."""
    if config.model.lora is None or config.model.path == SCRATCH:
        return []
    found = weights(config.model.path, config)
    return [] if NOT_CACHED in found else [line for line in found if not line.partition(" ")[0].endswith(_TEXTS)]


def _check_steps_left(run: Run) -> None:
    """Raise `ConfigError` if the config changes and no step is left."""
    newest = Checkpoints(run.folder.checkpoints, keep=1).newest() if run.changes else None
    if newest is not None and newest.step >= run.config.trainer.steps:
        raise ConfigError(
            "the change has no effect: the run has no steps left",
            got=f"{', '.join(map(str, run.changes))}; {newest.step} steps are done",
            expected=f"trainer.steps above {newest.step}",
            hint=f"add trainer.steps={2 * newest.step}",
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunResult:
    """Result of a run."""

    folder: Path
    step: int
    """Number of training steps since the start of the run, or of updates in SFT, DPO and reward model training."""
    checkpoint: str
    """Newest checkpoint: a model path for evaluation."""
    metrics: Mapping[str, float]
    """Metrics of the last step."""
    interrupted: bool
    """True if the run was stopped before its last step; `resume` continues it."""
    problems: tuple[Finding, ...] = ()
    """The worst problems of the run, at most three."""

    def __repr__(self) -> str:
        """Return one line with the folder, the last step and its results."""
        words = [f"{'stopped' if self.interrupted else 'done'} after step {self.step}", *self._results()]
        return f"RunResult({str(self.folder)!r}, {', '.join(words)})"

    def _repr_html_(self) -> str:
        """Return a small table for notebooks."""
        rows = {
            "run": str(self.folder),
            "steps": f"{self.step}{', stopped' if self.interrupted else ''}",
            "checkpoint": self.checkpoint or "none",
        }
        return html_table({**rows, **dict(word.split(" ", 1) for word in self._results())})

    def _results(self) -> list[str]:
        shown = {"success": "success/mean", "reward": "reward/mean", "loss": "sft/loss"}
        return [f"{word} {self.metrics[name]:.3f}" for word, name in shown.items() if name in self.metrics]


def finished_result(run: Run, watcher: RunWatcher) -> RunResult | None:
    """Return the result of a run that has ended after its last step, and say so; ``None`` for any other run.

    No model and no engine is started. The folder of a warm start is not such a run, although it has checkpoints. A run
    that was killed after its last step is not finished: it may have to complete its metrics or an evaluation.
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
    return RunResult(
        folder=run.folder.path,
        step=newest.step,
        checkpoint=str(newest.path),
        metrics=newest_metrics(run.folder),
        interrupted=False,
        problems=problems,
    )


def newest_metrics(folder: RunDirectory) -> dict[str, float]:
    """Read the finite metrics of a run's last step or update; empty if there is none."""
    lines = read_metrics(folder.metrics_file)
    return {name: value for name, value in (lines[-1] if lines else {}).items() if name != "step" and value is not None}
