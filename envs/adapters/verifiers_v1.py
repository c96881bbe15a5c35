"""Tasksets of `verifiers.v1` (verifiers 0.4), played by their harnesses.

The library plays whole episodes: it starts the harness in a runtime, and its rewards judge the trace. `play` is a
function for the agent loop `external`, whose gateway stands in for the harness's model, so tokens are recorded as they
were sampled, with native tool calls. The environment itself only lists and shows the tasks.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentrl.env import AsyncEnv, EnvironmentSpec, Isolation
from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.task import Task

from .verifiers_data import EVERY, EXTRA, TEST, TRAIN

NAME = "verifiers_v1"
FUNCTION = f"{__name__}:play"
HOW = f"agent.loop=external agent.options.function={FUNCTION}"
RUNTIME = "docker"
"""Default runtime: the library's default is a hosted one, and `subprocess` gives the policy a shell on this machine."""
SOLVED_AT = 0.5
FAULTS_OF_OTHERS = {"TaskError", "SandboxError", "ToolsetError", "EnvError", "InterceptionError", "TunnelError"}
"""Errors of the library that neither the policy nor the engine causes."""
UNSCORED = {"setup_timeout", "finalize_timeout", "scoring_timeout"}
_numbers = itertools.count()


class GatewayTask(Protocol):
    """Fields of the loop `external`'s task that `play` reads."""

    openai_url: str
    api_key: str
    options: Mapping[str, Any]


class TasksetTasks:
    """The tasks of a split: the test split has every tenth task, the training split the others.

    Args:
        split: ``train`` or ``test``.
        options: See `TasksetEnv`.
    """

    def __init__(self, split: str, **options: Any) -> None:
        self._split, self._options = split, options
        self._rows = _rows_of(load_tasks(options), split)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self._rows):
            raise IndexError(index)
        options = {**self._options, "row": self._rows[index]}
        return Task(id=f"{self._split}-{index}", environment=NAME, seed=index, options=options)


class TasksetEnv(AsyncEnv):
    """The tasks of a taskset; their episodes are played by `play`.

    Args:
        taskset: Name of an installed taskset, or of a module that exports one in ``__all__``.
        harness: Name of a harness, or its configuration as a dictionary with ``id``; default: the taskset's own, or
            else ``bash``.
        runtime: ``docker``, ``podman`` or ``subprocess`` (on this machine, with your rights), or the configuration as a
            dictionary with ``type``.
        limit: Number of tasks to read; required if the taskset is infinite.
        options: Fields of the taskset's configuration.

    Raises:
        UsageError: the package, the taskset or the harness is not installed, a field is not valid, or the episodes need
            several agents.
    """

    action_hint = f"none: a harness plays ({HOW})"

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._tasks = load_tasks(options)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Show the prompt of a task: the row in the options, or else a row of the training split."""
        rows = _rows_of(self._tasks, TRAIN)
        row = (options or {}).get("row", rows[(seed or 0) % len(rows)])
        if not isinstance(row, int) or not 0 <= row < len(self._tasks):
            raise UsageError(f"{NAME} has no such row", got=repr(row), expected=f"0 to {len(self._tasks) - 1}")
        return self._tasks[row].data.prompt_text, {"task_type": self._options["taskset"]}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Reject the action, because harnesses play the tasks, not loops of agentrl.

        Raises:
            UsageError: always.
        """
        raise UsageError("tasksets of verifiers are played by their harnesses", got="an action", expected=HOW)


async def play(task: GatewayTask) -> dict[str, Any]:
    """Play a task by its harness, with the policy as its model; the function for the loop `external`.

    Returns:
        The reward of the trace, and its success.

    Raises:
        EnvironmentFailure: the taskset, its tools or the runtime failed.
        RuntimeError: the harness failed.
    """
    options = dict(task.options)
    row = load_tasks({name: value for name, value in options.items() if name != "row"})[options["row"]]
    vf = EXTRA.load("verifiers.v1")
    environment = vf.load_environment(_config(options))
    # The library reads keys from variables; programs on this machine inherit none with API_KEY in its name.
    variable = f"AGENTRL_GATEWAY_API_KEY_{next(_numbers)}"
    os.environ[variable] = task.api_key
    client = EXTRA.load("verifiers.v1.clients").EvalClientConfig(base_url=task.openai_url, api_key_var=variable)
    try:
        async with environment.serving():
            context = EXTRA.load("verifiers.v1.clients").ModelContext(model="policy", client=client)
            episode = await environment.run_episode(row, context)
    finally:
        del os.environ[variable]
    return read_reward(episode)


def read_reward(episode: Any) -> dict[str, Any]:
    """Return the reward and the success of an episode of the library.

    Raises:
        EnvironmentFailure: it was not scored, because of the taskset, its tools or the runtime.
        RuntimeError: the harness or its requests failed.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok and errors:
        last = errors[-1]
        problem = f"{last.type}: {last.message}"
        if last.type in FAULTS_OF_OTHERS:
            raise EnvironmentFailure("an episode of verifiers failed", got=problem)
        raise RuntimeError(problem)
    (trace,) = episode.traces
    if trace.stop_condition in UNSCORED:
        raise EnvironmentFailure("an episode of verifiers was not scored", got=trace.stop_condition)
    return {"reward": trace.reward, "success": trace.reward >= SOLVED_AT}


def load_tasks(options: Mapping[str, Any]) -> Sequence[Any]:
    """Return the tasks of a taskset; equal options return the same objects.

    Raises:
        UsageError: see `TasksetEnv`.
    """
    if not isinstance(options.get("taskset"), str) or not options["taskset"]:
        raise UsageError(f"the option taskset of {NAME} is not set", expected="taskset=NAME of an installed taskset")
    return _load_tasks(json.dumps(options, sort_keys=True))


@functools.lru_cache(maxsize=8)
def _load_tasks(options: str) -> tuple[Any, ...]:
    given = json.loads(options)
    taskset = EXTRA.load("verifiers.v1").load_environment(_config(given)).taskset
    limit = given.get("limit")
    if limit is None and not taskset.bounded:
        raise UsageError(f"the taskset {given['taskset']} is infinite", expected="limit=NUMBER of tasks to read")
    tasks = tuple(taskset if limit is None else taskset.take(limit))
    if len(tasks) < 2:
        raise UsageError(
            f"the taskset {given['taskset']} cannot be split", got=f"{len(tasks)} tasks", expected="at least 2"
        )
    return tasks


def _config(options: Mapping[str, Any]) -> Any:
    """Return the library's configuration of an environment with one agent."""
    fields = {name: value for name, value in options.items() if name not in ("harness", "runtime", "limit", "row")}
    name, harness, runtime = fields.pop("taskset"), options.get("harness"), options.get("runtime", RUNTIME)
    agent = {"runtime": {"type": runtime} if isinstance(runtime, str) else runtime}
    if harness is not None:
        agent["harness"] = {"id": harness} if isinstance(harness, str) else harness
    loaders = EXTRA.load("verifiers.v1.utils.loaders")
    try:
        config = loaders.resolve_env_config({"taskset": {"id": name, **fields}, "agent": agent})
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"the taskset {name} of verifiers cannot be created", got=error) from error
    agents = EXTRA.load("verifiers.v1.configs.agent").agent_config_fields(config)
    if set(agents) != {"agent"}:
        raise UsageError(
            f"the taskset {name} of verifiers needs several agents", got=", ".join(agents), expected="one, named agent"
        )
    return config


def _rows_of(tasks: Sequence[Any], split: str) -> list[int]:
    if split not in (TRAIN, TEST):
        raise UsageError(f"{NAME} has no split of this name", got=split, expected=f"{TRAIN} or {TEST}")
    every = min(EVERY, len(tasks))
    return [row for row in range(len(tasks)) if (row % every == every - 1) == (split == TEST)]


SPEC = EnvironmentSpec(
    name=NAME,
    make=TasksetEnv,
    tasks=TasksetTasks,
    splits=(TRAIN, TEST),
    description=(
        "Tasksets of verifiers.v1, played by their harnesses in the library's runtimes, with native tool calls, and"
        f" judged by their rewards. The loop is {HOW}. Options: taskset, harness, runtime, limit; others are fields of"
        " the taskset's configuration."
    ),
    isolation=Isolation.INLINE,
    extra=EXTRA,
)
