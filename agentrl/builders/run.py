"""The start, resumption and end of a run: its folder, the signals that stop it, and its result.

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
from agentrl.env_lookup import resolve_environment
from agentrl.errors import AgentRLError, ConfigError, UsageError
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.console import html_table
from agentrl.observe.metrics import check_trackers
from agentrl.observe.problems import Problem
from agentrl.observe.run_folder import RunDirectory

_log = logging.getLogger(__name__)

MIXED = "mixed"
"""Stands for the environment in the made-up name of a run that has several."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder and its config."""

    folder: RunDirectory
    config: Config
    changes: tuple[Change, ...] = ()
    """What is different from the config in the folder, which takes it over once the run has begun."""


def start_run(config: Config, *, kind: str) -> Run:
    """Make the folder of a new run and save the resolved config in it.

    Args:
        config: The run; its environment, its tasks, those of its evaluations, and its model must be there.
        kind: What the run does, for its made-up name: ``grpo``, ``sft``.

    Raises:
        UsageError: something that the config names is not there, or the folder holds a run already.
        ConfigError: options that the agent loop or a tool does not take, or evaluations of more tasks than their split
            holds.
        TemplateError: the model's chat template does not fit the agent loop.
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
    """Check tasks, loops, tools, rewards and evaluations of a run that plays, and return its part of the made-up name.

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
    """Make each environment once and close it, so that one that cannot be made is found before the run begins.

    Environments that live in processes of their own are not tried: a process takes seconds to start, and their first
    episode tells the same.

    Raises:
        UsageError: an environment cannot be made.
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
                f"environment {spec.name} cannot be made",
                got=error.got,
                expected="a constructor that takes environment.options",
                hint=f"try: agentrl env check {shlex.quote(spec.name)}",
            ) from error


def _check_panels(config: Config) -> None:
    if config.evaluation.every:
        for part in per_environment_configs(config):
            _check_panel(part.config)


def _check_panel(config: Config) -> None:
    spec = resolve_environment(config.sole_environment.name)
    split, asked = config.evaluation.split, config.evaluation.tasks
    source = task_source(spec, config.sole_environment, split=split)
    check_columns(config.agent, lambda: source)
    held = len(source)
    if asked > held:
        raise ConfigError(
            "evaluation.tasks exceeds the split of evaluations",
            got=f"{asked:,} tasks of {spec.name}/{split}",
            expected=f"at most {held:,}",
            hint=f"set evaluation.tasks={held} and more evaluation.samples, or another evaluation.split",
        )


def resume_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """An existing run, to go on with. Its folder is left as it is until the run has begun.

    Args:
        path: Its folder, or ``runs/latest``.
        overrides: Changes of the config, such as ``trainer.steps=200``.

    Raises:
        UsageError: no run lies there.
        ConfigError: a wrong override, one that would make it another run, or changes of a run that has no step left.
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
    """Refuse changes that no step would ever see."""
    newest = Checkpoints(folder.checkpoints, keep=1).newest() if found else None
    if newest is not None and newest.step >= config.trainer.steps:
        raise ConfigError(
            "the run has no step left that the change could act on",
            got=f"{', '.join(map(str, found))}; {newest.step} steps are done",
            expected=f"trainer.steps above {newest.step}",
            hint=f"add trainer.steps={2 * newest.step}",
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunResult:
    """Result of a run."""

    folder: Path
    step: int
    """Training steps done, over the whole life of the run; updates, of a run that only learns."""
    checkpoint: str
    """Its newest checkpoint: a model path for evaluation."""
    metrics: Mapping[str, float]
    """Of the last step."""
    interrupted: bool
    """It was asked to stop before its last step; `resume` continues it."""
    problems: tuple[Problem, ...] = ()
    """The worst problems of the run, at most three."""

    def __repr__(self) -> str:
        """Return one line: where the run is, how far it came, and its last results."""
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
    """Call `stop` on the first signal inside the block; after it, signals mean what they meant before.

    The second one counts also while code blocks the event loop, and `stop` cannot be called.

    Only the main thread receives signals; in others nothing changes.
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
        put_back()  # at once: code that blocks the event loop can still be ended by the second signal
        loop.call_soon_threadsafe(stop)

    for number in _SIGNALS:
        signal.signal(number, first)
    try:
        yield
    finally:
        put_back()


class StopRequest:
    """Ctrl-C for work whose event loop runs in another thread: the first asks it to stop, the second cancels it."""

    def __init__(self) -> None:
        self.count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[], object] = lambda: None
        self._cancel: Callable[[], object] = lambda: None

    @contextmanager
    def stops(self, stop: Callable[[], object] | None = None) -> Iterator[None]:
        """Inside the block, the running task is what is interrupted.

        Args:
            stop: Asks the work to stop; it is cancelled at once when left out.
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
        """Interrupt, from any thread."""
        self.count += 1
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(self._stop if self.count == 1 else self._cancel)
