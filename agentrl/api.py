"""What a program calls: `agentrl.train` and `agentrl.evaluate`, with keyword shortcuts onto the config."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.assembly.checks import check_training
from agentrl.assembly.machine import check_machine
from agentrl.assembly.run_result import RunResult
from agentrl.assembly.runs import start_run
from agentrl.config import load_config
from agentrl.errors import ConfigError, UsageError
from agentrl.evaluation.episode import EvaluatedEpisode
from agentrl.evaluation.evaluate import unwatched
from agentrl.evaluation.policies import PolicyKind
from agentrl.evaluation.result import EvaluationResult
from agentrl.evaluation.session import EvaluationRequest, default_tasks, evaluations_folder, run_evaluation
from agentrl.evaluation.settings import evaluation_config
from agentrl.observe.progress import RunWatcher
from agentrl.orchestrator import train as train_run
from agentrl.registry import Kind, register
from agentrl.tool import Tool


def train(
    config: str | Path | None = None,
    *,
    env: str | None = None,
    model: str | None = None,
    engine: str | None = None,
    algorithm: str | None = None,
    tools: Sequence[Tool | str | Mapping[str, Any]] = (),
    steps: int | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    watcher: RunWatcher | None = None,
) -> RunResult:
    """Train an agent; returns when the run has ended.

    Args:
        config: A YAML file or a shipped config's name; the defaults when left out.
        env: ``environment``: a registry name, a Gymnasium id, ``module:EnvId``; ``/split`` may follow.
        model: ``model``: a folder or name, a run, or ``scratch``.
        engine: ``engine``.
        algorithm: ``algorithm``: name of the advantage estimator.
        tools: ``agent.tools``: tools, registry names, ``module:attr``, or a dictionary with ``name`` and options.
        steps: ``trainer.steps``.
        seed: ``run.seed``.
        overrides: Further ``key=value``, put on top.
        watcher: Is told how the run goes; silent when left out.

    Returns:
        The run's folder, its newest checkpoint, the metrics of its last step.

    Raises:
        UsageError: something that the caller must change.
        TrainingError: training cannot go on.
    """
    _check_no_event_loop("train")
    resolved = load_config(
        config,
        [
            *_override("environment", env),
            *_override("model", model),
            *_override("engine", engine),
            *_override("algorithm", algorithm),
            *tool_overrides(tools),
            *_override("trainer.steps", steps),
            *_override("run.seed", seed),
            *overrides,
        ],
    )
    check_training(resolved)
    check_machine(resolved)
    return train_run(start_run(resolved, kind=resolved.algorithm.advantage), watcher=watcher)


def evaluate(
    env: str | None = None,
    *,
    model: str | None = None,
    policy: str = PolicyKind.ENGINE,
    engine: str | None = None,
    url: str | None = None,
    tools: Sequence[Tool | str | Mapping[str, Any]] = (),
    tasks: int | None = None,
    samples: int = 1,
    seed: int = 0,
    temperature: float | None = None,
    concurrency: int | None = None,
    overrides: Sequence[str] = (),
    on_episode: Callable[[EvaluatedEpisode], None] = unwatched,
) -> EvaluationResult:
    """Measure a policy on fixed tasks. Finished episodes are kept on disk, and found by the same call.

    Args:
        env: ``name/split``; without a split the first one that is not for training; without `env` the run's own.
        model: A folder or name, a run or its `checkpoint`; the service's name for the model with `url`.
        policy: ``engine``, ``expert`` or ``random``.
        engine: ``local``, ``vllm``, ``sglang``, ``scripted`` or ``openai``.
        url: Base address of an OpenAI-compatible service.
        tools: As in `train`.
        tasks: How many tasks of the split; 100, or all of a smaller split, when left out.
        samples: Episodes per task.
        seed: Chooses the tasks, and seeds the sampling.
        temperature: Of the sampling; 0 is greedy.
        concurrency: Most episodes at once.
        overrides: Further ``key=value``, put on top.
        on_episode: Called after each episode.

    Raises:
        UsageError: something that the caller must change.
    """
    _check_no_event_loop("evaluate")
    config = evaluation_config(
        env=env,
        model=model,
        policy=_policy(policy),
        engine=engine,
        url=url,
        temperature=temperature,
        concurrency=concurrency,
        overrides=[*tool_overrides(tools), *overrides],
    )
    request = EvaluationRequest(
        config=config,
        policy=_policy(policy),
        n_tasks=default_tasks(config) if tasks is None else tasks,
        samples=samples,
        seed=seed,
        folder=evaluations_folder(config, model),
    )
    return asyncio.run(run_evaluation(request, on_episode=on_episode)).result


def _check_no_event_loop(function: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(
        f"agentrl.{function} runs an event loop of its own",
        got="a running event loop, as in a notebook",
        expected="a call from a program without one, or from a thread",
        hint=f"call it in a thread: await asyncio.to_thread(agentrl.{function}, …)",
    )


def tool_overrides(tools: Iterable[Tool | str | Mapping[str, Any]]) -> list[str]:
    """``agent.tools`` for tools given as objects, which are registered under their names, or by name."""
    entries = [_entry(tool) for tool in tools]
    return [f"agent.tools={json.dumps(entries)}"] if entries else []


def _entry(tool: Tool | str | Mapping[str, Any]) -> str | dict[str, Any]:
    if isinstance(tool, str):
        return tool
    if isinstance(tool, Mapping):
        return dict(tool)
    register(Kind.TOOL, tool.name, tool)
    return tool.name


def _override(key: str, value: object) -> list[str]:
    return [] if value is None else [f"{key}={value}"]


def _policy(name: str) -> PolicyKind:
    try:
        return PolicyKind(name)
    except ValueError as error:
        raise ConfigError("unknown policy", got=repr(name), expected=" or ".join(PolicyKind)) from error
