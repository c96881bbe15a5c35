"""Pairs of episodes from the trajectories that runs have stored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from agentrl.assembly.same_tokens import check_same_tokens
from agentrl.config.preferences import PreferencesConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.observe.model_folder import find_model
from agentrl.observe.run_directory import RunDirectory
from agentrl.observe.trajectory_store import read_trajectories, step_files
from agentrl.training.preferences.pairs import Pair, make_pairs
from agentrl.trajectory import Trajectory


def check_sources(settings: PreferencesConfig) -> list[Path]:
    """Where the trajectories lie: folders of trajectory stores, or files of them.

    Raises:
        ConfigError: no source is named.
        UsageError: one is not there, or holds no trajectories.
    """
    if not settings.sources:
        raise ConfigError(
            "nothing says which episodes to learn from",
            got="no preferences.sources",
            expected="--from RUN, as often as needed",
        )
    return [_store(Path(source)) for source in settings.sources]


def load_pairs(settings: PreferencesConfig, model_path: str) -> list[Pair]:
    """The pairs of a config's sources.

    Raises:
        ConfigError: a source is of a model with other tokens.
        UsageError: there is no such source, or no pair in all of them.
    """
    for store in check_sources(settings):
        _check_tokens(store, model_path)
    return find_pairs(settings)


def load_trajectories(source: str, model_path: str, environments: Set[str]) -> list[Trajectory]:
    """The stored episodes of some environments.

    Raises:
        ConfigError: they are of a model with other tokens.
        UsageError: there is no such source, or no episode of these environments in it.
    """
    store = _store(Path(source))
    _check_tokens(store, model_path)
    played = list(_trajectories(store))
    found = [trajectory for trajectory in played if trajectory.environment in environments]
    if not found:
        raise UsageError(
            f"nobody has played {' or '.join(sorted(environments))} in {source}",
            got=f"{len(played)} episodes of {', '.join(sorted({t.environment for t in played})) or 'nothing'}",
            expected="episodes of the run's own environment",
        )
    return found


def _check_tokens(store: Path, model_path: str) -> None:
    if (run := _run_of(store)) is not None:
        check_same_tokens(f"the run {run.path}", find_model(str(run.path)), model_path)


def find_pairs(settings: PreferencesConfig) -> list[Pair]:
    """The pairs of a config's sources, whoever played them.

    Raises:
        ConfigError: no source is named.
        UsageError: there is no such source, or no pair in all of them.
    """
    found = itertools.chain.from_iterable(map(_trajectories, check_sources(settings)))
    return make_pairs(found, by=settings.pairs, per_task=settings.pairs_per_task)


def policy_of(settings: PreferencesConfig) -> str:
    """The model of the policy that played the sources' episodes.

    Raises:
        UsageError: a source lies in no run, which would tell.
        ConfigError: models with different tokens played them.
    """
    models = [find_model(str(first_run([store]).path)) for store in check_sources(settings)]
    for model in models[1:]:
        check_same_tokens(f"the model {model} of another source", model, models[0])
    return models[0]


def _store(source: Path) -> Path:
    store = source / "trajectories" if (source / "trajectories").is_dir() else source
    if store.is_file() and store.suffix == ".jsonl":
        return store.resolve()
    if not step_files(store):
        raise UsageError(
            f"there are no trajectories in {source}",
            got="no such file or folder" if not source.exists() else "no step-*.jsonl in it",
            expected="a run, its trajectories folder, or a file step-000012.jsonl of it",
        )
    return store.resolve()


def _run_of(store: Path) -> RunDirectory | None:
    """The run that a store belongs to, if it still lies in one."""
    folder = store.parent.parent if store.is_file() else store.parent
    return RunDirectory(folder) if (folder / "config.yaml").is_file() else None


def _trajectories(store: Path) -> Iterator[Trajectory]:
    return (stored.trajectory for stored in read_trajectories(store))


def first_run(sources: Sequence[Path]) -> RunDirectory:
    """The run of the first source.

    Raises:
        UsageError: it lies in none.
    """
    run = _run_of(_store(sources[0]))
    if run is None:
        raise UsageError(
            "no config is named, and the episodes lie in no run",
            got=str(sources[0]),
            expected="a run's own trajectories, or a config",
            hint="agentrl dpo CONFIG --model MODEL --from FILE",
        )
    return run
