"""Complete evaluation, from a config to a result on disk, which the same command reuses.

A result is reused only if the config, the code, the data files, the weights and the models of services are the same.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agentrl.builders.checks import check_agents
from agentrl.builders.episodes import build_env_pool, build_runner
from agentrl.builders.models import check_model, resolve_model
from agentrl.builders.rewards import check_rewards
from agentrl.builders.tools import check_tools
from agentrl.config.config import SCRATCH, Config
from agentrl.config.engines import OpenAIEngineConfig
from agentrl.env import EnvironmentSpec
from agentrl.env.lookup import check_split, resolve_environment
from agentrl.evaluation.evaluate import PolicyKind, evaluate_panel, ignore, open_policy
from agentrl.evaluation.identity import code_identity, model_identity, reward_model_identity, served_models
from agentrl.evaluation.panel import EPISODES_FILE, FOLDER, RESULT_FILE, EpisodeStore, EvaluatedEpisode, Panel
from agentrl.evaluation.result import EvaluationResult
from agentrl.evaluation.settings import DEFAULT_TASKS
from agentrl.observe.files import replace_file, writing
from agentrl.observe.run_folder import find_run, lock_folder
from agentrl.render.tokens import read_chat_template
from agentrl.rollout.environment_probe import check_environments
from agentrl.rollout.judges import build_judge
from agentrl.rollout.loop_choice import select_default_loop
from agentrl.rollout.task_source import task_source
from agentrl.rollout.waits import RolloutCounters, settled_heap

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """Request of an evaluation."""

    config: Config
    """Config with environment and split, agent, sampling, engine and model; ``rollout.max_concurrent`` limits the
    episodes at a time."""
    policy: PolicyKind
    n_tasks: int
    samples: int
    seed: int
    folder: Path
    """Folder of evaluations; each one has a subfolder named by its settings."""
    fresh: bool = False
    """True to play all episodes, including those that an earlier run of the same evaluation has played."""
    config_keys: tuple[str, ...] = ()
    """Keys of the ``evaluation`` section that gave numbers of this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEvaluation:
    """Result of an evaluation and its folder."""

    result: EvaluationResult
    folder: Path
    model_path: str | None
    """Path of the tokenizer, for reports; ``None`` if the episodes have no tokens."""


async def run_evaluation(
    request: EvaluationRequest,
    *,
    on_episode: Callable[[EvaluatedEpisode], None] = ignore,
    on_stall: Callable[[str], None] = _log.warning,
    counters: RolloutCounters | None = None,
) -> FinishedEvaluation:
    """Play the unfinished episodes of an evaluation, and write the result next to the episodes.

    Args:
        request: Evaluation to run.
        on_episode: Called after each episode, including reused ones.
        counters: Counts of the rollout, to read the progress at any time.
        on_stall: Called with a table of waits after ``rollout.stall_report_s`` seconds without progress.

    Raises:
        UsageError: an environment, model or service does not exist, or the disk is full.
    """
    several = bool(request.config.named_adapters)
    config = request.config
    if _uses_model(request):
        config = select_default_loop(resolve_model(config, several=several), say=_log.warning)
    spec = resolve_environment(config.sole_environment.name)
    check_split(spec, config.sole_environment.split)
    check_tools(config)
    check_rewards(config)
    check_environments(config)
    check_agents(config)
    if _uses_model(request):
        check_model(config)
    served = await served_models(config, has_model=request.policy is PolicyKind.ENGINE)
    panel = describe(request, config, served=served)
    folder = request.folder / f"{panel.policy}-{panel.key()}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, "evaluation"):
        return await _play(
            request, config, spec, panel, folder, on_episode=on_episode, on_stall=on_stall, counters=counters
        )


def _uses_model(request: EvaluationRequest) -> bool:
    return request.policy is PolicyKind.ENGINE and not isinstance(request.config.engine, OpenAIEngineConfig)


async def _play(
    request: EvaluationRequest,
    config: Config,
    spec: EnvironmentSpec,
    panel: Panel,
    folder: Path,
    *,
    on_episode: Callable[[EvaluatedEpisode], None],
    on_stall: Callable[[str], None],
    counters: RolloutCounters | None,
) -> FinishedEvaluation:
    """Play the unfinished episodes in the evaluation's folder."""
    uses_model = _uses_model(request)
    pool = build_env_pool(config, spec=spec)
    store = EpisodeStore(folder / EPISODES_FILE, fresh=request.fresh)
    try:
        async with open_policy(config, request.policy, folder) as policy:
            runner = build_runner(
                config, pool, policy, judge=build_judge(config.agent, folder=folder), counters=counters
            )
            with pool.waits.report_stalls(config.rollout.stall_report_s, on_stall), settled_heap():
                result = await evaluate_panel(
                    runner,
                    task_source(spec, config.sole_environment),
                    panel,
                    concurrency=episodes_at_once(config, request.policy),
                    store=store,
                    on_episode=on_episode,
                )
    finally:
        store.close()
        await pool.close()
    replace_file(folder / RESULT_FILE, orjson.dumps(result.to_json(), option=orjson.OPT_INDENT_2))
    model_path = (str(folder / "model") if config.model.path == SCRATCH else config.model.path) if uses_model else None
    return FinishedEvaluation(result=result, folder=folder, model_path=model_path)


def make_request(
    config: Config,
    *,
    policy: PolicyKind,
    model: str | None,
    tasks: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    fresh: bool = False,
) -> EvaluationRequest:
    """Make the request of an evaluation; numbers that are not given are those of the ``evaluation`` section.

    Args:
        config: Config of the evaluation, see `evaluation_config`.
        policy: Kind of policy.
        model: Model, run or checkpoint, in whose run the results are kept.
        tasks: Number of tasks; by default ``evaluation.tasks`` if it is set, otherwise `DEFAULT_TASKS`, but at most
            all tasks of the split.
        samples: Episodes per task; ``evaluation.samples`` by default.
        seed: Seed of the choice of tasks and of the sampling.
        fresh: True to play all episodes again.
    """
    section, environment = config.evaluation, config.sole_environment
    given = {"tasks": tasks, "samples": samples}
    keys = tuple(key for key, number in given.items() if number is None and key in section.model_fields_set)
    if tasks is None:
        most = section.tasks if "tasks" in keys else DEFAULT_TASKS
        tasks = min(most, len(task_source(resolve_environment(environment.name), environment)))
    return EvaluationRequest(
        config=config,
        policy=policy,
        n_tasks=tasks,
        samples=section.samples if samples is None else samples,
        seed=seed,
        folder=evaluations_folder(config, model),
        fresh=fresh,
        config_keys=keys,
    )


def describe_request(request: EvaluationRequest) -> str:
    """Describe the settings of a request in one line, with the config keys that gave the numbers."""
    config, keys = request.config, request.config_keys
    environment = config.sole_environment
    numbers = [
        f"{key} {number:,}{f' (evaluation.{key})' if key in keys else ''}"
        for key, number in (("tasks", request.n_tasks), ("samples", request.samples))
    ]
    sampling = [f"temperature {config.sampling.temperature:g}"] if request.policy is PolicyKind.ENGINE else []
    words = [f"{environment.name}/{environment.split}", *numbers, f"seed {request.seed}", *sampling]
    return f"settings: {', '.join(words)}"


def episodes_at_once(config: Config, policy: PolicyKind) -> int:
    """Return the maximum number of episodes at a time, at most that of a service's requests.

    An episode that waited for a free request slot would use up its deadline for an answer.
    """
    most = config.rollout.max_concurrent
    if policy is PolicyKind.ENGINE and isinstance(config.engine, OpenAIEngineConfig):
        return min(most, config.engine.max_concurrent)
    return most


def evaluations_folder(config: Config, model: str | None) -> Path:
    """Return the folder of evaluations: in the run that the model comes from, or else next to the runs."""
    run = None if model is None else find_run(model)
    return (Path(config.run.directory) if run is None else run.path) / FOLDER


def describe(request: EvaluationRequest, config: Config, *, served: Mapping[str, Any] | None = None) -> Panel:
    """Make the panel of a request; its key contains everything that affects an episode.

    Args:
        request: Evaluation to describe.
        config: Config of the request with resolved paths.
        served: Models that services report.
    """
    environment = config.sole_environment
    settings: dict[str, Any] = {
        "options": environment.options,
        "tasks": environment.tasks,
        "agent": config.agent.model_dump(mode="json"),
        "version": importlib.metadata.version("agentrl"),
        "code": code_identity(config, request.folder),
    }
    if served:
        settings["served"] = dict(served)
    if reader := reward_model_identity(config):
        settings["reward_model"] = reader
    model = None
    if request.policy is PolicyKind.ENGINE:
        settings |= {
            "sampling": config.sampling.model_dump(mode="json"),
            "engine": config.engine.model_dump(mode="json"),
        }
        if isinstance(config.engine, OpenAIEngineConfig):
            model = config.engine.model
        else:
            model = config.model.path
            settings["model"] = config.model.model_dump(mode="json", exclude={"path"})
            settings["weights"] = model_identity(config)
            if config.named_adapters:
                settings["adapters"] = {
                    name: section.model_dump(mode="json") for name, section in config.named_adapters.items()
                }
            if config.model.chat_template is not None:
                settings["chat_template"] = read_chat_template(config.model.chat_template)
    return Panel(
        environment=f"{environment.name}/{environment.split}",
        policy=request.policy.value,
        model=model,
        n_tasks=request.n_tasks,
        samples=request.samples,
        seed=request.seed,
        settings=settings,
    )
