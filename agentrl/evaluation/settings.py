"""Config of an evaluation, made from a command's arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentrl.builders.cluster import refuse_cluster
from agentrl.config import Config, load_config
from agentrl.config.config import SCRATCH
from agentrl.config.derived import EnvironmentConfigs, per_environment_configs
from agentrl.config.load import ConfigSource
from agentrl.config.overrides import expand, parse_override, prompts_environment, prompts_words, text_override
from agentrl.env.lookup import parse_env_name, resolve_environment
from agentrl.errors import UsageError
from agentrl.evaluation.evaluate import PolicyKind
from agentrl.observe.model_folder import find_model
from agentrl.observe.run_folder import find_run

TRAIN = "train"
"""Split that an evaluation uses only on request."""
HELD_OUT = "valid"
"""Split of a file of prompts in an evaluation."""
DEFAULT_TASKS = 100
"""Default number of tasks, if ``evaluation.tasks`` is not set for them; all tasks of a smaller split."""


def evaluation_config(
    *,
    source: ConfigSource = None,
    env: str | None = None,
    model: str | None = None,
    policy: PolicyKind = PolicyKind.ENGINE,
    engine: str | None = None,
    url: str | None = None,
    temperature: float | None = None,
    concurrency: int | None = None,
    prompts: str | None = None,
    overrides: Sequence[str] = (),
) -> Config:
    """Make the config of an evaluation.

    If the model is a run's folder or a path inside it, the run's config is the base: its agent, its ``evaluation``
    section (split, tasks, samples, sampling) and, without `env`, its environment. In another environment, the section's
    split and numbers of tasks and samples do not apply. If the run has several environments, `env` names one by its
    label, and that environment's agent is used. A config file or a shipped config as `source`
    replaces the run's config; without `model`, the model of that config is evaluated.

    Args:
        source: Config file or name of a shipped config.
        env: Environment as ``name`` or ``name/split``; by default the first split that is not for training.
        model: Folder or name of a model, run or checkpoint; with `url` the service's name for the model.
        policy: Kind of policy.
        engine: ``local``, ``vllm``, ``sglang``, ``scripted`` or ``openai``.
        url: Base address of an OpenAI-compatible service.
        temperature: Sampling temperature; 0 is greedy.
        concurrency: Maximum number of episodes at a time.
        prompts: File of prompts in place of `env`; each is answered once.
        overrides: Config overrides ``key=value``, which take precedence.

    Raises:
        UsageError: an argument is missing, or two arguments contradict each other.
    """
    if prompts is not None and env is not None:
        raise UsageError("two sources of tasks", got=f"{env} and the prompts of {prompts}", expected="only one of them")
    service = url is not None and engine in (None, "openai")
    run = None if model is None or service else find_run(model)
    if policy is not PolicyKind.ENGINE:
        _refuse_unused(
            policy, model=None if run is not None else model, engine=engine, url=url, temperature=temperature
        )
    base = source if source is not None or run is None else run.config_file
    of_section = [word for word in overrides if word.startswith(("evaluation.", "evaluation="))]
    start = None if base is None else load_config(base, of_section)
    if env is None and start is None and prompts is None:
        raise _nowhere(None if service else model)
    if model is None and base is not None and (named := load_config(base, overrides).model.path) != SCRATCH:
        model = named
    words = [
        *_environment_words(env, start, prompts, has_file=any(map(_names_task_file, overrides))),
        *(_engine_words(model, engine, url) if policy is PolicyKind.ENGINE else []),
        *([] if temperature is None else [f"sampling.temperature={temperature}"]),
        *([] if concurrency is None else [f"rollout.max_concurrent={concurrency}"]),
    ]
    own = [] if base is None else ["cluster=null"]
    words = [*words, *own, *overrides]
    config = load_config(base, words)
    if (env is None or parse_env_name(env).split is None) and not any(map(_names_split, overrides)):
        config = load_config(base, [*words, *_existing_split_words(config)])
    if start is not None and not _plays_own_tasks(env, start, prompts):
        environment = f"environment={config.sole_environment.model_dump_json()}"
        config = config.model_copy(update={"evaluation": load_config(None, [environment, *of_section]).evaluation})
    refuse_cluster(config, "an evaluation")
    return config


def _names_split(override: str) -> bool:
    found = parse_override(override)
    value = expand(found.path[0], found.value)
    return found.path == ("environment", "split") or (
        found.path == ("environment",) and isinstance(value, dict) and "split" in value
    )


def _existing_split_words(config: Config) -> list[str]:
    """Return the override of a default split that does not exist under the environment's options."""
    environment = config.sole_environment
    splits = resolve_environment(environment.name).splits_under(environment.options)
    exists = environment.tasks is not None or environment.split in splits
    return [] if exists else [f"environment.split={_held_out(splits)}"]


def _nowhere(model: str | None) -> UsageError:
    if model is not None:
        find_model(model)  # raises if the path does not exist
    return UsageError(
        "the evaluation has no environment",
        expected="an environment (--env NAME/SPLIT), a run or a config",
        hint="for example: agentrl eval runs/latest",
    )


def _refuse_unused(policy: PolicyKind, **options: object) -> None:
    """Refuse options that apply only to models."""
    given = [f"--{name} {value}" for name, value in options.items() if value is not None]
    if given:
        raise UsageError(
            f"the {policy} policy has no model", got=", ".join(given), expected=f"--policy {policy} without it"
        )


def _names_task_file(override: str) -> bool:
    given = parse_override(override)
    if given.path == ("environment",) and isinstance(given.value, dict):
        return bool(given.value.get("tasks"))
    return given.path == ("environment", "tasks") and bool(given.value)


def _environment_words(env: str | None, run: Config | None, prompts: str | None, *, has_file: bool) -> list[str]:
    """Return overrides with the environment, and the evaluation settings of a run.

    Args:
        env: Environment, with a split or without.
        run: Config of a run.
        prompts: File of prompts in place of an environment.
        has_file: Another override names a file of tasks, which takes the place of the default split.
    """
    if run is None and prompts is not None:
        return prompts_words(prompts, HELD_OUT)
    if run is None:
        return [] if env is None else [text_override("environment", env if has_file else _with_split(env))]
    words = [f"sampling={run.evaluation_sampling.model_dump_json()}"]
    if prompts is not None:
        return [prompts_environment(prompts, HELD_OUT), *words]
    part = _part(env, run)
    if part is not None and part.label:
        return [*_part_words(part), *([] if has_file else _split_words(part, env)), *words]
    if has_file:
        words = ["environment.split=train", *words]
    elif part is not None:
        words = [*_split_words(part, None), *words]
    return words if env is None else [*words, text_override("environment", env if has_file else _with_split(env))]


def _plays_own_tasks(env: str | None, run: Config, prompts: str | None) -> bool:
    """Return True if the ``evaluation`` section of a run or config was written for the tasks of this evaluation."""
    if prompts is not None:
        return False
    if env is None or not run.has_environment:
        return True
    part = _part(env, run)
    return part is not None and parse_env_name(env).name in (part.label, part.config.sole_environment.name)


def _split_words(part: EnvironmentConfigs, env: str | None) -> list[str]:
    """Return overrides with the split in `env`, or else the split of the run's evaluations."""
    environment = part.config.sole_environment
    splits = resolve_environment(environment.name).splits_under(environment.options)
    requested = None if env is None else parse_env_name(env).split
    own = part.config.evaluation.split
    return ["environment.tasks=null", f"environment.split={requested or (own if own in splits else _held_out(splits))}"]


def _part(env: str | None, run: Config) -> EnvironmentConfigs | None:
    """Return the run's environment to evaluate: its only one, or the first with this label, or else with this name."""
    if not run.has_environment:
        return None
    parts = per_environment_configs(run)
    if not run.environments:
        return parts[0]
    if env is None:
        raise UsageError(
            "the run has several environments", got="no --env", expected=f"--env {' or --env '.join(run.environments)}"
        )
    name = parse_env_name(env).name
    called = [part for part in parts if part.label == name]
    same = [part for part in parts if part.config.sole_environment.name == name]
    return next(iter(called or same), None)


def _part_words(part: EnvironmentConfigs) -> list[str]:
    environment, agent = (
        json.dumps(section.model_dump(mode="json")) for section in (part.config.sole_environment, part.config.agent)
    )
    return [f"environment={environment}", f"agent={agent}"]


def _with_split(env: str) -> str:
    named = parse_env_name(env)
    return env if named.split is not None else f"{env}/{_held_out(resolve_environment(named.name).splits)}"


def _held_out(splits: Sequence[str]) -> str:
    return next((split for split in splits if split != TRAIN), splits[0])


def _engine_words(model: str | None, engine: str | None, url: str | None) -> list[str]:
    if model is None:
        raise UsageError(
            "the evaluation has no policy",
            expected="a model (--model PATH or a run, or model.path=PATH), or --policy expert or random",
            hint=f"a config with model.path={SCRATCH} has no trained model: add --model runs/latest",
        )
    if url is None:
        return [text_override("model.path", model), *([] if engine is None else [f"engine={engine}"])]
    if engine in ("vllm", "sglang"):
        return [text_override("model.path", model), f"engine={engine}", f"engine.servers=[{url}]"]
    if engine not in (None, "openai"):
        raise UsageError(
            f"engine {engine} has no address", got=f"--url {url}", expected="--engine openai, vllm or sglang"
        )
    return ["engine=openai", f"engine.url={url}", text_override("engine.model", model)]
