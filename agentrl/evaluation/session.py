"""Complete evaluation, from a config to a result on disk, which the same command reuses.

A result is reused only if everything that affects it is identical: the config, the code, the data files, the weights
and the models of services.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import gymnasium
import orjson

from agentrl.builders.checks import check_agents
from agentrl.builders.episodes import build_env_pool, build_runner
from agentrl.builders.models import check_model, resolve_model
from agentrl.builders.rewards import check_rewards
from agentrl.builders.tools import agents_of, check_tools
from agentrl.config.config import SCRATCH, Config
from agentrl.config.engines import OpenAIEngineConfig
from agentrl.config.environment import AgentConfig
from agentrl.config.section import Section
from agentrl.env import EnvironmentSpec
from agentrl.env.lookup import ADDRESS, GYMNASIUM_ID, check_split, resolve_environment
from agentrl.errors.foreign import run_in_own_thread
from agentrl.evaluation.evaluate import PolicyKind, evaluate_panel, ignore, open_policy
from agentrl.evaluation.panel import EPISODES_FILE, FOLDER, RESULT_FILE, EpisodeStore, EvaluatedEpisode, Panel
from agentrl.evaluation.result import EvaluationResult
from agentrl.evaluation.settings import DEFAULT_TASKS
from agentrl.message.data_source import data_files, is_on_hub
from agentrl.models.identity import model_files, weights
from agentrl.observe.code_identity import CodeIdentity, is_own_module
from agentrl.observe.files import replace_file, writing
from agentrl.observe.model_folder import find_model
from agentrl.observe.run_folder import find_run, lock_folder
from agentrl.observe.source_names import split_command
from agentrl.registry import SOURCE_SUFFIX, Kind, lookup
from agentrl.remote.chat import service_session
from agentrl.render.chat_template import read_chat_template
from agentrl.rollout.environment_probe import check_environments
from agentrl.rollout.events import RolloutCounters
from agentrl.rollout.heap import settled_heap
from agentrl.rollout.judges import build_judge
from agentrl.rollout.loop_choice import select_default_loop
from agentrl.rollout.task_source import task_source

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

    `on_episode` is called for reused episodes, too; `on_stall` is called with a table of waits after
    ``rollout.stall_report_s`` seconds without progress.

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
            with pool.waits.report_stalls(config.rollout.stall_report_s, on_stall), settled_heap(pool.waits):
                result = await evaluate_panel(
                    runner,
                    task_source(spec, config.sole_environment),
                    panel,
                    concurrency=episodes_at_once(config, request.policy),
                    store=store,
                    on_episode=on_episode,
                    config=config,
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
    folder = Path(config.run.directory) if run is None else run.path
    return folder.absolute() / FOLDER  # code of users may change the working folder


def describe(request: EvaluationRequest, config: Config, *, served: Mapping[str, Any] | None = None) -> Panel:
    """Make the panel of a request; its key contains everything that affects an episode."""
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


REFERENCE = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_][\w.]*")
"""Pattern of a reference to an object, ``module:attr``."""
REQUEST_S = 5.0
"""Deadline in seconds of a request to a service about its model."""
CARD = ("id", "root", "parent", "created", "digest", "revision", "weight_version", "max_model_len", "meta")
"""Fields of a model's entry in ``/v1/models`` that are part of its identity; others may differ with each request."""
RECENT_S = 60.0
"""Maximum age in seconds of a creation time that is ignored: vLLM reports the time of the request instead."""
SERVED = ("model_path", "tokenizer_path", "weight_version", "revision", "quantization", "dtype")
"""Fields of SGLang's ``/model_info`` that are part of the model's identity."""


def code_identity(config: Config, outputs: Path) -> dict[str, str]:
    """Return digests by name of the code that plays and scores an episode, and of the data that it reads.

    Raises:
        UnknownNameError: the config has a name that does not exist.
        UsageError: a module cannot be imported.
    """
    environment, agent = config.sole_environment, config.agent
    found = {f"environment {environment.name}": _environment(environment.name, outputs)}
    named = [(Kind.AGENT_LOOP, agent.loop)]
    named += [(Kind.REWARD, name) for name in _names(agent.reward) if name not in AgentConfig().reward]
    named += [(Kind.TOOL, name) for one in agents_of(agent) for name in _names(one.tools)]
    for kind, name in named:
        code = CodeIdentity(outputs)
        code.add(lookup(kind, name))
        _add_module_of(code, name)
        found[f"{kind.replace('_', ' ')} {name}"] = code.digest()
    words = CodeIdentity(outputs)
    settings, options = _agent_words(agent)
    options += [environment.options, environment.tasks]
    settings += [engine.model_dump(mode="json") for engine in _engines(config)]
    for text in _texts(options):
        _add_word(words, text)
    for text in _texts(settings):
        if "/" in text or Path(text).is_file():  # words such as "local" are not folders
            _add_word(words, text)
    for command in _lists([options, settings]):
        words.add_command(command)
    for text in _texts(environment.options):
        if text.replace("-", "_").isidentifier() and is_own_module(text.replace("-", "_")):
            words.add_module(text.replace("-", "_"))
    return {**found, "files and modules of the config": words.digest()}


def environment_identity(name: str, options: Mapping[str, Any], outputs: Path) -> str:
    """Return a digest of an environment's code, and of the data that its options name."""
    words = CodeIdentity(outputs)
    for text in _texts(options):
        _add_word(words, text)
    return f"{_environment(name, outputs)} {words.digest()}"


def _environment(name: str, outputs: Path) -> str:
    spec = resolve_environment(name)
    if ADDRESS.fullmatch(name):
        return str(getattr(getattr(spec.make, "served", None), "fingerprint", name))
    code = CodeIdentity(outputs)
    code.add(spec)
    _add_module_of(code, name)
    env_id = name.rpartition(":")[2]
    registered = gymnasium.registry.get(env_id) if GYMNASIUM_ID.fullmatch(env_id) else None
    if registered is not None:
        code.add_value(env_id, [registered.kwargs, registered.max_episode_steps, registered.reward_threshold])
        entry = registered.entry_point
        code.add_value(f"{env_id} entry point", entry)
        if isinstance(entry, str):
            code.add_module(entry.partition(":")[0])
    return code.digest()


def _add_module_of(code: CodeIdentity, name: str) -> None:
    """Add the module or the file of ``module:attr``, which may make the object from others."""
    module = name.partition(":")[0]
    if module.endswith(SOURCE_SUFFIX):
        code.add_file(Path(module).expanduser().resolve())
    elif REFERENCE.fullmatch(name):
        code.add_module(module)


def _names(entries: list[str | dict[str, Any]]) -> list[str]:
    return [entry if isinstance(entry, str) else str(entry["name"]) for entry in entries]


def _agent_words(agent: AgentConfig) -> tuple[list[Any], list[Any]]:
    """Return the agent's settings, which may be keywords (``auto``), and its free options.

    `weights` identifies a reward model, and `_engines` lists engines.
    """
    settings = agent.model_dump(mode="json", exclude={"system_prompt", "reward_model"})
    options = [settings.pop(name) for name in ("options", "sandbox")]
    judge, roles = settings.get("judge") or {}, settings.get("roles") or {}
    for section in (judge, *roles.values()):
        section.pop("engine", None)
    for section in (settings, *roles.values()):
        entries = [*(section.pop("tools", None) or []), *(section.pop("reward", None) or [])]
        options += [entry for entry in entries if not isinstance(entry, str)]
        settings.setdefault("names", []).extend(entry for entry in entries if isinstance(entry, str))
    return [settings], [*options, judge]


def _engines(config: Config) -> list[Section]:
    """Return the engines of the config: the policy's, the judge's and those of the roles."""
    agent = config.agent
    judge = [] if agent.judge is None else [agent.judge.engine]
    return [config.engine, *judge, *(role.engine for role in (agent.roles or {}).values() if role.engine is not None)]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _lists(value: object) -> Iterator[list[str]]:
    """Yield the lists of texts in a value; each may be a command."""
    if isinstance(value, list | tuple) and value and all(isinstance(word, str) for word in value):
        yield list(value)
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _lists(inner)


def _add_word(code: CodeIdentity, text: str) -> None:
    """Add the code, file, folder or command files that a text of the config refers to."""
    if "\n" in text or len(text) > 4096 or not text.strip("./ "):
        return
    if is_on_hub(text):
        for file in data_files(text):
            code.add_data(str(file))
        return
    if REFERENCE.fullmatch(text):
        if is_own_module(text.partition(":")[0]):
            code.add_module(text.partition(":")[0])
        return
    if text.endswith(".py") and Path(text).is_file():
        code.add_file(Path(text).resolve())
    elif not code.add_data(text) and " " in text:
        words = split_command(text)
        code.add_command(words)
        for word in words:
            if " " not in word:
                _add_word(code, word)


def model_identity(config: Config) -> list[str]:
    """Return the identity of the config's model and its adapters: digests of their files, or their revisions."""
    adapters = [section.path for section in config.named_adapters.values() if section.path is not None]
    return [line for path in (config.model.path, *adapters) for line in weights(path, config)]


def reward_model_identity(config: Config) -> list[str]:
    """Return the identity of the reward model, like `model_identity`; empty without a reward model."""
    reader = config.agent.reward_model
    return [] if reader is None else weights(find_model(reader.path), config)


async def served_models(config: Config, *, has_model: bool) -> dict[str, Any]:
    """Query the models that the services of an evaluation serve: those of the engine, the judge and the roles.

    Without `has_model`, a scripted policy plays.
    """
    agent = config.agent
    used = [config.engine] if has_model and isinstance(config.engine, OpenAIEngineConfig) else []
    used += [role.engine for role in (agent.roles or {}).values() if role.engine is not None]
    used += [] if agent.judge is None else [agent.judge.engine]
    cards = await asyncio.gather(*map(served_model, used))
    return {f"{one.model} at {one.url}": card for one, card in zip(used, cards, strict=True)}


async def served_model(config: OpenAIEngineConfig) -> dict[str, Any]:
    """Query the model that a service serves; the result lacks what the service does not report.

    vLLM and most others answer ``/v1/models``, SGLang also ``/model_info``, Ollama ``/api/tags``.
    """
    base = config.url.rstrip("/")
    root = base.removesuffix("/v1")
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with service_session(config.url, config.api_key_variable, timeout) as session:
        card = _card(await _get_object(session, f"{base}/models"), config.model)
        for address in (f"{root}/model_info", f"{root}/get_model_info"):
            if info := await _get_object(session, address):
                card |= {name: info[name] for name in SERVED if name in info}
                break
        listed = (await _get_object(session, f"{root}/api/tags")).get("models")
        for entry in listed if isinstance(listed, list) else []:
            if isinstance(entry, dict) and config.model in (entry.get("name"), entry.get("model")):
                card["digest"] = entry.get("digest")
    served_from = [str(card[name]) for name in ("root", "model_path") if name in card]
    if files := await run_in_own_thread(lambda: [line for folder in served_from for line in model_files(folder)]):
        card["weights"] = files
    return card


async def _get_object(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return the JSON object at an address; an empty object for any other answer."""
    try:
        async with session.get(url) as response:
            answer = await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _card(listed: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the entry of a model in ``/v1/models``, without the fields that change with each request."""
    entries = listed.get("data")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("id") == model:
            card = {name: entry[name] for name in CARD if entry.get(name) is not None}
            created = card.get("created")
            if isinstance(created, int | float) and time.time() - created < RECENT_S:
                del card["created"]
            return card
    return {}
