"""The Python interface for programs and notebooks: `train`, `resume`, `evaluate` and `sft`.

Environments, agent loops, tools, reward functions, estimators and losses may be given as objects. The config names an
importable object as ``module:attr``, and any other by a name that only this Python session knows (``python:exact``);
see `resume`. In a thread with a running event loop, as in a notebook, the work runs in a new thread; Ctrl-C or
interrupting the kernel stops it as in a terminal.
"""

from __future__ import annotations

import asyncio
import json
import logging
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, wait
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, TypeAlias, TypeVar

import numpy as np

from agentrl.agent_loop import AgentLoop
from agentrl.builders.checks import check_training
from agentrl.config import Config, load_config
from agentrl.config.derived import per_environment_configs
from agentrl.config.estimate import evaluation_size, run_size
from agentrl.config.overrides import option_words, task_words, warn_ignored, warn_repeated
from agentrl.env import AnyEnv, EnvironmentSpec, Isolation
from agentrl.errors import ConfigError, UsageError, is_bool, shorten
from agentrl.errors.foreign import DaemonThreads
from agentrl.evaluation.diagnosis.finding import finding_lines
from agentrl.evaluation.evaluate import PolicyKind, ignore
from agentrl.evaluation.panel import EvaluatedEpisode
from agentrl.evaluation.result import EvaluationResult
from agentrl.evaluation.session import EvaluationRequest, describe_request, make_request, run_evaluation
from agentrl.evaluation.settings import evaluation_config
from agentrl.observe.console import note
from agentrl.observe.progress import RunWatcher
from agentrl.observe.run_folder import RunDirectory, find_run
from agentrl.observe.terminal import counting, watching
from agentrl.registry import SESSION, Kind, name_of
from agentrl.reward import Scorer
from agentrl.rollout.events import RolloutCounters
from agentrl.rollout.task_source import limited_by_tasks
from agentrl.runs.learning_commands import LEARNING_COMMANDS
from agentrl.runs.rl import train as train_run
from agentrl.runs.sft import check_sft_start, check_warm_start, warm_start
from agentrl.runs.start import RunResult, resume_learning, resume_run, resuming_command, start_run
from agentrl.runs.start_record import start_folder
from agentrl.runs.stop import AFTER_TWO_REQUESTS, StopRequest, run_until_stopped
from agentrl.runs.stored_training import start_check
from agentrl.serving.launch.placement import check_machine
from agentrl.tool import Tool

T = TypeVar("T")
_log = logging.getLogger(__name__)
_THREADS = DaemonThreads("agentrl")
Environment: TypeAlias = str | EnvironmentSpec | Callable[..., AnyEnv]
"""A name, a spec, a class, or a function that makes an environment."""
ToolLike: TypeAlias = Tool | str | Mapping[str, Any]
_Reward: TypeAlias = str | Scorer | Callable[..., Any]
RewardLike: TypeAlias = _Reward | Mapping[str, Any] | tuple[_Reward, float]
"""A name, a function or a scorer, optionally with a weight, or an entry of ``agent.reward``."""
Overrides: TypeAlias = Sequence[str] | Mapping[str, Any]
"""``["trainer.steps=5"]`` or ``{"trainer.steps": 5}``."""


def train(
    config: str | Path | None = None,
    *,
    env: Environment | None = None,
    tasks: str | Path | None = None,
    model: str | None = None,
    engine: str | None = None,
    algorithm: str | Callable[..., Any] | None = None,
    loss: str | Callable[..., Any] | None = None,
    loop: str | type[AgentLoop] | None = None,
    tools: Sequence[ToolLike] = (),
    reward: RewardLike | Sequence[RewardLike] | None = None,
    steps: int | None = None,
    seed: int | None = None,
    overrides: Overrides = (),
    progress: bool = True,
    watcher: RunWatcher | None = None,
) -> RunResult:
    """Train an agent; return when the run has ended.

    Args:
        config: A YAML file or the name of a shipped config; ``None`` uses the defaults.
        env: ``environment``: a registry name, a Gymnasium id or ``module:EnvId``, each optionally followed by
            ``/split``, a class, or a function that makes an environment.
        tasks: A file of tasks; without `env` and `config`, a file of prompts that are answered once.
        model: ``model``: a folder or name, a run, or ``scratch``.
        engine: ``engine``.
        algorithm: ``algorithm``: the advantage estimator, by name or as a function.
        loss: ``algorithm.loss``, by name or as a function.
        loop: ``agent.loop``, by name or as a class.
        tools: ``agent.tools``: tools, registry names, ``module:attr``, or a dictionary with ``name`` and options.
        reward: ``agent.reward``: a function or a list of functions, each optionally as ``(function, weight)``.
        steps: ``trainer.steps``.
        seed: ``run.seed``.
        overrides: Additional config keys, which take precedence.
        progress: True to show the progress on standard error.
        watcher: Receives the progress instead; see `agentrl.observe.progress.RunWatcher`.

    Returns:
        The run's folder, its newest checkpoint, and the metrics of its last step.

    Raises:
        UsageError: the caller must change something.
        TrainingError: training cannot continue.
        KeyboardInterrupt: Ctrl-C stopped the run after a checkpoint, and this thread has no running event loop. With
            one, as in a notebook, the result is returned with `interrupted` set.
    """
    has_environment = env is not None or config is not None
    _check_file("tasks", tasks)
    words_of_tasks = task_words(_text(tasks), has_environment=has_environment)
    words = [
        *([] if has_environment else words_of_tasks),  # before `loop`, which overrides the loop of prompts
        *_object_overrides(env=env, algorithm=algorithm, loss=loss, loop=loop, tools=tools, reward=reward),
        *(words_of_tasks if has_environment else []),
        *option_words("model", model),
        *option_words("engine", engine),
        *option_words("trainer.steps", steps),
        *option_words("run.seed", seed),
        *override_words(overrides),
    ]
    interruption = StopRequest()

    def work() -> RunResult:
        warn_repeated(words)
        warn_ignored(words, reads="trainer")
        resolved = load_config(config, words)
        check_training(resolved)
        check_machine(resolved)
        _check_session(resolved)
        kind = resolved.algorithm.advantage.removeprefix(SESSION).rpartition(":")[2]
        run = start_run(resolved, kind=kind, check=start_check(resolved))
        if progress:
            note(run_size(limited_by_tasks(run.config)))
        with _watcher(progress, watcher) as display:
            return train_run(run, watcher=display, interruption=interruption)

    return _raise_if_interrupted(_run_off_loop(work, interruption))


def resume(
    run: str | Path | RunResult,
    *,
    env: Environment | None = None,
    algorithm: str | Callable[..., Any] | None = None,
    loss: str | Callable[..., Any] | None = None,
    loop: str | type[AgentLoop] | None = None,
    tools: Sequence[ToolLike] = (),
    reward: RewardLike | Sequence[RewardLike] | None = None,
    steps: int | None = None,
    overrides: Overrides = (),
    progress: bool = True,
    watcher: RunWatcher | None = None,
) -> RunResult:
    """Resume a run of `train` or `sft`, or of a command such as ``agentrl dpo``, from its newest checkpoint.

    Objects of another Python session, whose names begin with ``python:``, must be given again under the same names.
    Importable objects and objects given by name are found without.

    Args:
        run: The run's folder, ``runs/latest``, or the result of `train`.
        env: The environment, if it was given as an object.
        algorithm: As in `train`, if it was given as an object, like the next four.
        loss: As in `train`.
        loop: As in `train`.
        tools: As in `train`.
        reward: As in `train`.
        steps: ``trainer.steps``: total steps of the run, including those already done.
        overrides: Keys that a resumed run may change.
        progress: As in `train`.
        watcher: As in `train`.

    Raises:
        UsageError: no run found, an object is missing, or an override changes a key that must stay the same.
        TrainingError: training cannot continue.
        KeyboardInterrupt: As in `train`.
    """
    # Register the objects under their names.
    _object_overrides(env=env, algorithm=algorithm, loss=loss, loop=loop, tools=tools, reward=reward)
    folder = run.folder if isinstance(run, RunResult) else run
    interruption = StopRequest()

    def work() -> RunResult:
        words = [*option_words("trainer.steps", steps), *override_words(overrides)]
        command = resuming_command(RunDirectory.open(folder))
        run = train_run
        if (learning := LEARNING_COMMANDS.get(command)) is not None:
            run = learning.run
            warn_ignored(words, reads=learning.section)
            found = resume_learning(folder, words, command=command)
            learning.check(found.config)
        else:
            warn_ignored(words, reads="trainer")
            found = resume_run(folder, words)
        _warn_elsewhere(found.folder)
        with _watcher(progress, watcher) as display:
            return run(found, watcher=display, interruption=interruption)

    return _raise_if_interrupted(_run_off_loop(work, interruption))


def _warn_elsewhere(run: RunDirectory) -> None:
    """Log a warning if a run was started in another folder than this one."""
    start = start_folder(run)
    if start is not None and not start.samefile(Path.cwd()):
        _log.warning("the run was started in %s, where the relative paths of its config begin", start)


def _raise_if_interrupted(result: RunResult) -> RunResult:
    """Return the result of a run that was not interrupted; a script must not continue with an incomplete run.

    Raises:
        KeyboardInterrupt: the run was interrupted, and this thread has no running event loop, unlike in a notebook.
    """
    if not result.interrupted or _has_event_loop():
        return result
    words = f"stopped after step {result.step}: continue with agentrl.resume({str(result.folder)!r})"
    note(words)
    raise KeyboardInterrupt(words)


def sft(
    config: str | Path | None = None,
    *,
    env: Environment | None = None,
    data: str | Path | None = None,
    model: str | None = None,
    loop: str | type[AgentLoop] | None = None,
    tools: Sequence[ToolLike] = (),
    episodes: int | None = None,
    seed: int | None = None,
    overrides: Overrides = (),
    progress: bool = True,
    watcher: RunWatcher | None = None,
) -> RunResult:
    """Warm-start a model on demonstrations of the environment's expert or on a file of conversations.

    Args:
        config: As in `train`.
        env: As in `train`; its expert plays the demonstrations.
        data: ``sft.data``: a file of conversations to use instead of demonstrations.
        model: As in `train`.
        loop: As in `train`; it must have ``demonstrate()``.
        tools: As in `train`.
        episodes: ``sft.episodes``: number of demonstrations.
        seed: ``run.seed``.
        overrides: Additional config keys, which take precedence.
        progress: As in `train`.
        watcher: As in `train`.

    Raises:
        UsageError: the caller must change something: no expert, no model.
        TrainingError: the loss is not finite.
        KeyboardInterrupt: As in `train`.
    """
    words = [
        *_object_overrides(env=env, loop=loop, tools=tools),
        *option_words("model", model),
        *option_words("sft.data", data),
        *option_words("sft.episodes", episodes),
        *option_words("run.seed", seed),
        *override_words(overrides),
    ]
    interruption = StopRequest()

    def work() -> RunResult:
        warn_repeated(words)
        warn_ignored(words, reads="sft")
        resolved = load_config(config, words)
        check_warm_start(resolved)
        _check_session(resolved)
        run = start_run(resolved, kind="sft", command="sft", check=check_sft_start)
        with _watcher(progress, watcher) as display:
            return warm_start(run, watcher=display, interruption=interruption)

    return _raise_if_interrupted(_run_off_loop(work, interruption))


def evaluate(
    env: Environment | None = None,
    *,
    config: str | Path | None = None,
    prompts: str | Path | None = None,
    model: str | None = None,
    policy: str = PolicyKind.ENGINE,
    engine: str | None = None,
    url: str | None = None,
    loop: str | type[AgentLoop] | None = None,
    tools: Sequence[ToolLike] = (),
    reward: RewardLike | Sequence[RewardLike] | None = None,
    tasks: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    temperature: float | None = None,
    concurrency: int | None = None,
    fresh: bool = False,
    overrides: Overrides = (),
    progress: bool = True,
    on_episode: Callable[[EvaluatedEpisode], None] = ignore,
) -> EvaluationResult:
    """Measure a policy on fixed tasks. Finished episodes are stored on disk, and the same call reuses them.

    Args:
        env: As in `train`; without ``/split``, the first split that is not for training. Without `env`, the run's
            environment.
        config: A YAML file or the name of a shipped config, whose model is measured unless `model` is given.
        prompts: A file of prompts, each answered once, instead of `env`.
        model: A folder or name, a run or its `checkpoint`; with `url`, the name of the model at the service.
        policy: ``engine``, ``expert`` or ``random``.
        engine: ``local``, ``vllm``, ``sglang``, ``scripted`` or ``openai``.
        url: Base URL of an OpenAI-compatible service.
        loop: As in `train`.
        tools: As in `train`.
        reward: As in `train`.
        tasks: Number of tasks of the split; by default ``evaluation.tasks`` of the run or config, otherwise 100, or all
            tasks of a smaller split.
        samples: Number of episodes per task; by default ``evaluation.samples`` of the run or config, otherwise 1.
        seed: Seed of the choice of tasks and of the sampling.
        temperature: Sampling temperature; 0 is greedy.
        concurrency: Maximum number of concurrent episodes.
        fresh: True to play all episodes again, including stored ones.
        overrides: Additional config keys, which take precedence.
        progress: True to show the progress on standard error.
        on_episode: Called after each episode.

    Raises:
        UsageError: the caller must change something.
    """
    chosen, name = _policy(policy), None if env is None else _name(Kind.ENVIRONMENT, env)
    for key, value, lowest in (("tasks", tasks, 1), ("samples", samples, 1), ("seed", seed, 0)):
        _check_whole(key, value, lowest)
    _check_file("prompts", prompts)
    words = [*_object_overrides(loop=loop, tools=tools, reward=reward), *override_words(overrides)]
    interruption = StopRequest()

    def work() -> EvaluationResult:
        if config is None and model is not None and url is None and (run := find_run(model)) is not None:
            _warn_elsewhere(run)
        settings = evaluation_config(
            source=config,
            env=name,
            model=model,
            policy=chosen,
            engine=engine,
            url=url,
            temperature=temperature,
            concurrency=concurrency,
            prompts=None if prompts is None else str(prompts),
            overrides=words,
        )
        _check_session(settings)
        request = make_request(
            settings, policy=chosen, model=model, tasks=tasks, samples=samples, seed=seed, fresh=fresh
        )
        return _measure(request, interruption, progress=progress, on_episode=on_episode)

    return _run_off_loop(work, interruption)


def _measure(
    request: EvaluationRequest,
    interruption: StopRequest,
    *,
    progress: bool,
    on_episode: Callable[[EvaluatedEpisode], None],
) -> EvaluationResult:
    """Run an evaluation until it ends or is interrupted, and print its progress."""
    counters = RolloutCounters()

    async def run(report: Callable[[EvaluatedEpisode], None]) -> EvaluationResult:
        return (await run_evaluation(request, on_episode=report, counters=counters)).result

    if progress and request.policy is PolicyKind.ENGINE:
        note(evaluation_size(limited_by_tasks(request.config), request.n_tasks, request.samples))
        note(describe_request(request))
    with _count_episodes(request.n_tasks * request.samples, counters, progress, on_episode) as report:
        result = run_until_stopped(run(report), interruption)
    if progress:
        _print_problems(result)
    return result


def _print_problems(result: EvaluationResult) -> None:
    """Print the problems of an evaluation and, if its success is unknown, the reason."""
    for line in finding_lines(result.problems):
        note(line)
    if (advice := result.advice_on_success) is not None:
        note(advice)


def _run_off_loop(work: Callable[[], T], interruption: StopRequest) -> T:
    """Do the work in this thread, or in a new one if this thread has a running event loop.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the work before it had a result.
    """
    if not _has_event_loop():
        return work()
    done = _THREADS.submit(work)
    while True:
        try:
            if interruption.count > 1 and not wait([done], timeout=sum(AFTER_TWO_REQUESTS.values())).done:
                raise KeyboardInterrupt  # a daemon thread in which code blocks the event loop is abandoned
            return done.result()
        except KeyboardInterrupt:
            if done.done() or interruption.count > 1:
                raise
            interruption()
        except (CancelledError, asyncio.CancelledError) as error:
            raise KeyboardInterrupt from error


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _watcher(progress: bool, watcher: RunWatcher | None) -> Iterator[RunWatcher | None]:
    if watcher is not None or not progress:
        yield watcher
        return
    with watching() as display:
        yield display


@contextmanager
def _count_episodes(
    total: int, counters: RolloutCounters, progress: bool, on_episode: Callable[[EvaluatedEpisode], None]
) -> Iterator[Callable[[EvaluatedEpisode], None]]:
    if not progress:
        yield on_episode
        return
    with counting(total, counters.progress) as counter:

        def report(episode: EvaluatedEpisode) -> None:
            counter.add(episode.trajectory)
            on_episode(episode)

        yield report


def _check_session(config: Config) -> None:
    """Check that no other process needs objects that exist only in this session.

    Raises:
        UsageError: another process needs such an object.
    """
    algorithm = config.algorithm
    ours = [name for name in (algorithm.advantage, algorithm.loss) if name.startswith(SESSION)]
    why = f"trainer.processes {config.trainer.processes}" if config.trainer.processes > 1 else ""
    for part in per_environment_configs(config) if config.has_environment else ():
        environment = part.config.sole_environment
        if environment.name.startswith(SESSION) and environment.isolation is Isolation.PROCESS:
            ours, why = [environment.name], "environment.isolation process"
    if ours and why:
        raise UsageError(
            f"{why} needs objects that other processes can import",
            got=", ".join(name.removeprefix(SESSION) for name in ours) + ", defined in this session",
            expected="module:attr, or an object that was imported from a module",
            hint="move it to a .py file and import it from there",
        )


def _object_overrides(
    *,
    env: Environment | None = None,
    algorithm: str | Callable[..., Any] | None = None,
    loss: str | Callable[..., Any] | None = None,
    loop: str | type[AgentLoop] | None = None,
    tools: Sequence[ToolLike] = (),
    reward: RewardLike | Sequence[RewardLike] | None = None,
) -> list[str]:
    """Return the overrides that name objects, and register the objects under these names."""
    targets = (
        ("environment", Kind.ENVIRONMENT, env),
        ("algorithm", Kind.ADVANTAGE, algorithm),
        ("algorithm.loss", Kind.LOSS, loss),
        ("agent.loop", Kind.AGENT_LOOP, loop),
    )
    words = [
        word for key, kind, target in targets if target is not None for word in option_words(key, _name(kind, target))
    ]
    return [*words, *tool_overrides(tools), *_reward_overrides(reward)]


def _name(kind: Kind, target: Any) -> str:
    return target if isinstance(target, str) else name_of(kind, target)


def tool_overrides(tools: Iterable[ToolLike]) -> list[str]:
    """Return the override of ``agent.tools`` for tools given as objects or by name, or for one by its name."""
    tools = [tools] if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable) else tools
    entries = [dict(tool) if isinstance(tool, Mapping) else _name(Kind.TOOL, tool) for tool in tools]
    return [f"agent.tools={_to_json('agent.tools', entries)}"] if entries else []


def _reward_overrides(reward: RewardLike | Sequence[RewardLike] | None) -> list[str]:
    """Return the override of ``agent.reward`` for functions given as objects or by name.

    Raises:
        UsageError: two functions have the same name.
    """
    if reward is None:
        return []
    entries = [_reward_entry(one) for one in (reward if isinstance(reward, list) else [reward])]
    names = [entry if isinstance(entry, str) else entry["name"] for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            "two reward functions have the same name", got=", ".join(twice), expected="a different name for each"
        )
    return [f"agent.reward={_to_json('agent.reward', entries)}"]


def _reward_entry(reward: Any) -> str | dict[str, Any]:
    if isinstance(reward, Mapping):
        if "name" not in reward:
            expected = "the key name: {'name': function, 'weight': 0.5}, or a list of pairs (function, weight)"
            raise UsageError("a reward has no name", got=shorten(reward), expected=expected)
        return {**reward, "name": _name(Kind.REWARD, reward["name"])}
    if isinstance(reward, tuple):
        if len(reward) != 2 or callable(reward[1]):
            raise UsageError("a reward is not a pair", got=reward, expected="(function, weight), or a list of rewards")
        return {"name": _name(Kind.REWARD, reward[0]), "weight": reward[1]}
    return _name(Kind.REWARD, reward)


def override_words(overrides: Overrides) -> list[str]:
    """Return overrides as ``key=value``; a text is one override, and ``None`` is none.

    >>> override_words({"trainer.steps": 5, "agent.options": {"format": "plain"}})
    ['trainer.steps=5', 'agent.options={"format": "plain"}']
    """
    if isinstance(overrides, Mapping):
        return [f"{key}={_to_json(key, value)}" for key, value in overrides.items()]
    return [overrides] if isinstance(overrides, str) else list(overrides or ())


def _to_json(key: str, value: object) -> str:
    def plain(inner: object) -> object:
        if isinstance(inner, PurePath):
            return str(inner)
        if isinstance(inner, np.generic):
            return inner.item()
        expected = "text, a number, a bool, None, a list, or a dict of these"
        hint = "pass objects by the arguments env, tools, reward, loop, algorithm and loss" if callable(inner) else None
        got = f"{type(inner).__name__} {shorten(inner)}"
        raise UsageError(f"the override of {key} is not valid", got=got, expected=expected, hint=hint)

    return json.dumps(value, default=plain)


def _check_whole(key: str, value: object, lowest: int) -> None:
    """Raise a `UsageError` for a value that is not a whole number from `lowest` to 2**63 - 1, or ``None``."""
    if value is None:
        return
    number = int(value) if isinstance(value, numbers.Integral) and not is_bool(value) else -1
    if not lowest <= number < 2**63:
        raise UsageError(f"{key} is not valid", got=shorten(value), expected=f"a whole number, {lowest} or more")


def _check_file(key: str, value: object) -> None:
    """Raise a `UsageError` for rows in memory, such as a list or a data set, in place of a file."""
    if not isinstance(value, str | Path | None):
        raise UsageError(
            f"{key} is not a file",
            got=f"{type(value).__name__} {shorten(value)}",
            expected="the path of a file with one JSON object per line, an array of objects, or Parquet",
            hint='write the rows to a file, as lines like {"prompt": "..."}; a data set of Hugging Face has to_parquet',
        )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _policy(name: str) -> PolicyKind:
    try:
        return PolicyKind(name)
    except ValueError as error:
        raise ConfigError("unknown policy", got=repr(name), expected=" or ".join(PolicyKind)) from error
