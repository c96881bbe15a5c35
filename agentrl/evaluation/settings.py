"""From the few words of a command to the config of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentrl.builders.checks import refuse_cluster
from agentrl.builders.models import SCRATCH
from agentrl.config import Config, load_config
from agentrl.config.derived import EnvironmentConfigs, per_environment_configs
from agentrl.config.load import ConfigSource
from agentrl.config.overrides import prompts_environment, prompts_words
from agentrl.env_lookup import parse_env_name, resolve_environment
from agentrl.errors import UsageError
from agentrl.evaluation.evaluate import PolicyKind
from agentrl.observe.model_folder import find_model
from agentrl.observe.run_folder import find_run

TRAIN = "train"
"""The split that an evaluation does not choose by itself."""
HELD_OUT = "valid"
"""The split that a file of prompts is for an evaluation."""


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

    With a run's folder, or anything inside it, as the model, the run's own config is where it starts: the agent, the
    sampling of evaluations, and, without `env`, the environment and its evaluation split. Of a run with several
    environments, `env` names one by its label, and the agent is the one that it has there. A config file or a shipped
    config stands for the run's config in the same way; its model is evaluated where `model` is left out.

    Args:
        source: A config file or a shipped config's name.
        env: ``name`` or ``name/split``; without a split the first one that is not for training.
        model: A model folder or name, a run, a checkpoint; the service's name for the model with `url`.
        policy: Kind of policy.
        engine: ``local``, ``vllm``, ``sglang``, ``scripted`` or ``openai``.
        url: Base address of an OpenAI-compatible service.
        temperature: Sampling temperature; 0 is greedy.
        concurrency: Maximum number of episodes at once.
        prompts: A file of prompts, each answered once, in place of `env`.
        overrides: ``key=value``, put on top.

    Raises:
        UsageError: something is missing, or two arguments contradict each other.
    """
    if prompts is not None and env is not None:
        raise UsageError("two things to evaluate on", got=f"{env} and the prompts of {prompts}", expected="one of them")
    service = url is not None and engine in (None, "openai")
    run = None if model is None or service else find_run(model)
    if policy is not PolicyKind.ENGINE:
        _refuse_unused(
            policy, model=None if run is not None else model, engine=engine, url=url, temperature=temperature
        )
    base = source if source is not None or run is None else run.config_file
    start = None if base is None else load_config(base)
    if env is None and start is None and prompts is None:
        raise _nowhere(None if service else model)
    if model is None and base is not None and (named := load_config(base, overrides).model.path) != SCRATCH:
        model = named
    told = [
        *_environment_words(env, start, prompts),
        *(_engine_words(model, engine, url) if policy is PolicyKind.ENGINE else []),
        *([] if temperature is None else [f"sampling.temperature={temperature}"]),
        *([] if concurrency is None else [f"rollout.max_concurrent={concurrency}"]),
    ]
    own = [] if base is None else ["cluster=null"]
    config = load_config(base, [*told, *own, *overrides])
    refuse_cluster(config, "an evaluation")
    return config


def _nowhere(model: str | None) -> UsageError:
    if model is not None:
        find_model(model)  # says so when it is a path to nothing
    return UsageError(
        "nothing says where to evaluate",
        expected="an environment (--env NAME/SPLIT), a run or a config",
        hint="for example: agentrl eval runs/latest",
    )


def _refuse_unused(policy: PolicyKind, **options: object) -> None:
    """Refuse options that only a model's policy has."""
    given = [f"--{name} {value}" for name, value in options.items() if value is not None]
    if given:
        raise UsageError(
            f"the {policy} policy has no model", got=", ".join(given), expected=f"--policy {policy} without it"
        )


def _environment_words(env: str | None, run: Config | None, prompts: str | None) -> list[str]:
    """Return where to evaluate, and a run's own evaluation settings, as overrides of its config."""
    if run is None and prompts is not None:
        return prompts_words(prompts, HELD_OUT)
    if run is None:
        return [] if env is None else [f"environment={_with_split(env)}"]
    words = [f"sampling={run.evaluation_sampling.model_dump_json()}"]
    if prompts is not None:
        return [prompts_environment(prompts, HELD_OUT), *words]
    part = _part(env, run)
    if part is not None and part.label:
        return [*_part_words(part), *_split_words(part, env), *words]
    if part is not None:
        words = [*_split_words(part, None), *words]
    return words if env is None else [*words, f"environment={_with_split(env)}"]


def _split_words(part: EnvironmentConfigs, env: str | None) -> list[str]:
    """Return the split that `env` names, or else that of the run's evaluations."""
    splits = resolve_environment(part.config.sole_environment.name).splits
    asked = None if env is None else parse_env_name(env).split
    own = part.config.evaluation.split
    return ["environment.tasks=null", f"environment.split={asked or (own if own in splits else _held_out(splits))}"]


def _part(env: str | None, run: Config) -> EnvironmentConfigs | None:
    """Return the environment of a run to evaluate: its only one, the one with this label, or else of this name."""
    if not run.has_environment:
        return None
    parts = per_environment_configs(run)
    if not run.environments:
        return parts[0]
    if env is None:
        raise UsageError(
            "the run has several environments",
            got="no --env",
            expected=f"--env {' or --env '.join(run.environments)}",
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
            "nothing says what to evaluate",
            expected="a model (--model PATH or a run, or model.path=PATH), or --policy expert or random",
            hint=f"a config with model.path={SCRATCH} has no trained model: add --model runs/latest",
        )
    if url is None:
        return [f"model.path={model}", *([] if engine is None else [f"engine={engine}"])]
    if engine in ("vllm", "sglang"):
        return [f"model.path={model}", f"engine={engine}", f"engine.servers=[{url}]"]
    if engine not in (None, "openai"):
        raise UsageError(
            f"engine {engine} has no address", got=f"--url {url}", expected="--engine openai, vllm or sglang"
        )
    return ["engine=openai", f"engine.url={url}", f"engine.model={model}"]
