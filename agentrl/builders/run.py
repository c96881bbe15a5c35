"""Start, resume and end of a run: folder, stop signals and result.

The first Ctrl-C or SIGTERM asks the run to stop; the second one ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from agentrl.builders.chat_file import ENVIRONMENT
from agentrl.builders.checks import check_curriculum, check_training
from agentrl.builders.default_loop import select_default_loop
from agentrl.builders.environment_probe import probe_environment
from agentrl.builders.environments import task_source
from agentrl.builders.episodes import build_loop
from agentrl.builders.machine import check_machine
from agentrl.builders.models import SCRATCH, load_tokenizer, resolve_model
from agentrl.builders.resume_rules import Change, changes, check_same_run
from agentrl.builders.rewards import check_columns, check_rewards
from agentrl.builders.start_checks import check_start
from agentrl.builders.tools import check_tools
from agentrl.config.config import Config
from agentrl.config.derived import per_environment_configs
from agentrl.config.load import dump_config, load_config
from agentrl.env import Isolation
from agentrl.env.lookup import resolve_environment
from agentrl.errors import AgentRLError, ConfigError, UsageError
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.console import html_table
from agentrl.observe.metrics import check_trackers
from agentrl.observe.problems import Problem
from agentrl.observe.run_folder import RunDirectory

_log = logging.getLogger(__name__)

MIXED = "mixed"
"""Environment part of the generated name of a run with several environments."""


@dataclass(frozen=True, slots=True)
class Run:
    """Folder and config of a run."""

    folder: RunDirectory
    config: Config
    changes: tuple[Change, ...] = ()
    """Differences from the config in the folder, which is replaced once the run has started."""


def start_run(config: Config, *, kind: str) -> Run:
    """Create the folder of a new run and save the resolved config in it.

    Args:
        config: Config of the run. Its environments, tasks and model must exist.
        kind: Kind of run for its generated name, such as ``grpo`` or ``sft``.

    Raises:
        UsageError: something that the config names does not exist, or the folder already contains a run.
        ConfigError: the agent loop or a tool does not accept an option, or a split has too few tasks for evaluations.
        TemplateError: the model's chat template does not support the agent loop.
    """
    name = check_tasks(config) if config.has_environment else ENVIRONMENT
    check_trackers(config.trackers)
    resolved = select_default_loop(resolve_model(config), say=_log.warning)
    if resolved.model.path != SCRATCH:
        load_tokenizer(resolved.model.path)
    if config.has_environment:
        check_environments(config)
    check_start(resolved, kind=kind)
    folder = RunDirectory.create(Path(config.run.directory), config.run.name, prefix=f"{name}-{kind}")
    try:
        folder.save_config(dump_config(resolved))
    except UsageError:
        folder.undo_start()
        raise
    return Run(folder, resolved)


def check_tasks(config: Config) -> str:
    """Check tasks, loops, tools, rewards and evaluations, and return the environment part of the generated name.

    Raises:
        UsageError: an unknown name or option, or too few tasks.
    """
    for part in per_environment_configs(config):
        spec = resolve_environment(part.config.sole_environment.name)
        task_source(spec, part.config.sole_environment)
        build_loop(part.config.agent)
    check_tools(config)
    check_rewards(config)
    _check_panels(config)
    check_curriculum(config)
    return MIXED if config.environments else spec.name


def check_environments(config: Config) -> None:
    """Create and close each environment once, to report failures before the run starts.

    Environments in separate processes are skipped: a process takes seconds to start, and their first episode reports
    the same failure.

    Raises:
        UsageError: an environment cannot be created.
    """
    for part in per_environment_configs(config):
        spec, environment = resolve_environment(part.config.sole_environment.name), part.config.sole_environment
        isolation = environment.isolation or spec.isolation_under(environment.options)
        if isolation is Isolation.PROCESS:
            continue
        try:
            probe_environment(
                spec,
                environment.options,
                lambda _: None,
                isolation=isolation,
                deadline_s=environment.reset_timeout_s,
            )
        except AgentRLError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"environment {spec.name} cannot be created",
                got=error.got,
                expected="a constructor that accepts environment.options",
                hint=f"try: agentrl env check {shlex.quote(spec.name)}",
            ) from error


def _check_panels(config: Config) -> None:
    if config.evaluation.every:
        for part in per_environment_configs(config):
            _check_panel(part.config)


def _check_panel(config: Config) -> None:
    spec = resolve_environment(config.sole_environment.name)
    split, requested = config.evaluation.split, config.evaluation.tasks
    source = task_source(spec, config.sole_environment, split=split)
    check_columns(config.agent, lambda: source)
    available = len(source)
    if requested > available:
        raise ConfigError(
            "evaluation.tasks exceeds the split of evaluations",
            got=f"{requested:,} tasks of {spec.name}/{split}",
            expected=f"at most {available:,}",
            hint=f"set evaluation.tasks={available} and more evaluation.samples, or another evaluation.split",
        )


def resume_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Open an existing run to resume it. Its folder does not change until the run has started.

    Args:
        path: Folder of the run, or ``runs/latest``.
        overrides: Changes of the config, such as ``trainer.steps=200``.

    Raises:
        UsageError: the folder contains no run.
        ConfigError: an override is invalid or not allowed on resume, or the run has no step left.
    """
    folder = RunDirectory.open(path)
    config = load_config(folder.config_file, overrides)
    found = changes(load_config(folder.config_file), config)
    check_same_run(found)
    _check_steps_left(folder, config, found)
    check_training(config)
    check_machine(config)
    check_trackers(config.trackers)
    _check_panels(config)
    check_curriculum(config)
    return Run(folder, config, found)


def _check_steps_left(folder: RunDirectory, config: Config, found: Sequence[Change]) -> None:
    """Raise `ConfigError` if the config changes and no step is left."""
    newest = Checkpoints(folder.checkpoints, keep=1).newest() if found else None
    if newest is not None and newest.step >= config.trainer.steps:
        raise ConfigError(
            "the change has no effect, as the run has no step left",
            got=f"{', '.join(map(str, found))}; {newest.step} steps are done",
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
    """True if the run was asked to stop before its last step; `resume` continues it."""
    problems: tuple[Problem, ...] = ()
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


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first stop signal inside the block; the second one is handled as before the block.

    The second signal also works while code blocks the event loop and `stop` cannot run. Only the main thread receives
    signals; in other threads, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def first(number: int, frame: FrameType | None) -> None:
        put_back()  # at once, so that the second signal can end code that blocks the event loop
        loop.call_soon_threadsafe(stop)

    for number in _SIGNALS:
        signal.signal(number, first)
    try:
        yield
    finally:
        put_back()


class StopRequest:
    """Ctrl-C handler for work in another thread's event loop: the first call asks it to stop, the second cancels it."""

    def __init__(self) -> None:
        self.count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[], object] = lambda: None
        self._cancel: Callable[[], object] = lambda: None

    @contextmanager
    def stops(self, stop: Callable[[], object] | None = None) -> Iterator[None]:
        """Make the running task the target of interruptions inside the block.

        Args:
            stop: Function that asks the work to stop; by default the first call cancels it.
        """
        task = asyncio.current_task()
        assert task is not None
        self._loop, self._cancel, self._stop = asyncio.get_running_loop(), task.cancel, stop or task.cancel
        try:
            if self.count:
                self._stop()
            yield
        finally:
            self._loop = None

    def __call__(self) -> None:
        """Interrupt the work; may be called from any thread."""
        self.count += 1
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(self._stop if self.count == 1 else self._cancel)
