"""From the few words of a command to the config of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.config import Config, load_config
from agentrl.env_lookup import resolve_environment
from agentrl.env_name import parse_env_name
from agentrl.errors import UsageError
from agentrl.evaluation.policies import PolicyKind
from agentrl.observe.model_folder import find_model
from agentrl.observe.run_directory import RunDirectory

TRAIN = "train"
"""The split that an evaluation does not choose by itself."""


def evaluation_config(
    *,
    env: str | None = None,
    model: str | None = None,
    policy: PolicyKind = PolicyKind.ENGINE,
    engine: str | None = None,
    url: str | None = None,
    temperature: float | None = None,
    concurrency: int | None = None,
    overrides: Sequence[str] = (),
) -> Config:
    """The config of an evaluation.

    With a run's folder, or anything inside it, as the model, the run's own config is where it starts: the agent, the
    sampling of evaluations, and, without `env`, the environment and its evaluation split.

    Args:
        env: ``name`` or ``name/split``; without a split the first one that is not for training.
        model: A model folder or name, a run, a checkpoint; the service's name for the model with `url`.
        policy: Who plays.
        engine: ``local``, ``vllm``, ``sglang``, ``scripted`` or ``openai``.
        url: Base address of an OpenAI-compatible service.
        temperature: Of the sampling; 0 is greedy.
        concurrency: Most episodes at once.
        overrides: ``key=value``, put on top.

    Raises:
        UsageError: not enough is said, or two things contradict each other.
    """
    run = None if model is None or url is not None else run_of(model)
    if env is None and run is None:
        if model is not None and url is None:
            find_model(model)  # says so when it is a path to nothing
        raise UsageError("nothing says where to evaluate", expected="an environment (--env NAME/SPLIT), or a run")
    told = [
        *([] if run is None else _run_words(run)),
        *([] if env is None else [f"environment={_with_split(env)}"]),
        *(_engine_words(model, engine, url) if policy is PolicyKind.ENGINE else []),
        *([] if temperature is None else [f"sampling.temperature={temperature}"]),
        *([] if concurrency is None else [f"rollout.max_concurrent={concurrency}"]),
    ]
    return load_config(None if run is None else run.config_file, [*told, *overrides])


def run_of(path: str) -> RunDirectory | None:
    """The run that a folder is, or lies in; ``None`` for other models."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    folder = folder.resolve()
    for candidate in (folder, *folder.parents[:3]):
        if (candidate / "config.yaml").is_file():
            return RunDirectory.open(candidate)
    return None


def _run_words(run: RunDirectory) -> list[str]:
    """What a run's own config says about its evaluations, as overrides of its training settings."""
    config = load_config(run.config_file)
    sampling = config.evaluation.sampling or config.sampling
    words = [f"sampling.{name}={value}" for name, value in sampling.model_dump().items()]
    splits = resolve_environment(config.environment.name).splits
    split = config.evaluation.split if config.evaluation.split in splits else _held_out(splits)
    return ["environment.tasks=null", f"environment.split={split}", *words]


def _with_split(env: str) -> str:
    named = parse_env_name(env)
    return env if named.split is not None else f"{env}/{_held_out(resolve_environment(named.name).splits)}"


def _held_out(splits: Sequence[str]) -> str:
    return next((split for split in splits if split != TRAIN), splits[0])


def _engine_words(model: str | None, engine: str | None, url: str | None) -> list[str]:
    if model is None:
        raise UsageError(
            "nothing says what to evaluate",
            expected="a model (--model PATH or a run), or --policy expert or random",
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
