"""The config of an evaluation, made from a run's config and from options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.config.engines import ServerEngineConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.evaluation.evaluate import PolicyKind
from agentrl.evaluation.session import EvaluationRequest, describe_request, episodes_at_once, make_request
from agentrl.evaluation.settings import _part, evaluation_config


def test_a_run_on_a_task_file_is_measured_on_its_evaluation_split(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "environment: {name: guess_number, tasks: mine.jsonl}\nevaluation: {split: test}\n"
    )
    environment = evaluation_config(model=str(tmp_path)).environment
    assert (environment.tasks, environment.split) == (None, "test")


@pytest.mark.parametrize("override", ["environment.tasks=mine.jsonl", "environment={tasks: mine.jsonl}"])
def test_a_file_of_tasks_takes_the_place_of_the_default_split(tmp_path: Path, override: str) -> None:
    (tmp_path / "config.yaml").write_text("environment: guess_number\nevaluation: {split: test}\n")
    for given in ({"env": "guess_number"}, {"model": str(tmp_path)}, {"model": str(tmp_path), "env": "guess_number"}):
        environment = evaluation_config(
            **given,
            policy=PolicyKind.RANDOM if "model" not in given else PolicyKind.ENGINE,
            overrides=[override],
        ).environment
        assert (environment.name, environment.tasks) == ("guess_number", "mine.jsonl")
    with pytest.raises(ConfigError, match=r"environment.split is ignored with environment.tasks"):
        evaluation_config(env="guess_number/test", policy=PolicyKind.RANDOM, overrides=[override])


def test_a_config_with_an_untrained_model_takes_one_as_an_override() -> None:
    with pytest.raises(UsageError, match=r"the evaluation has no policy.*model.path=PATH"):
        evaluation_config(source="quickstart")
    found = evaluation_config(source="quickstart", overrides=["model.path=mine/model"])
    assert found.model.path == "mine/model"


def test_no_episode_waits_for_a_place_at_a_service() -> None:
    config = evaluation_config(
        env="guess_number", model="m", url="http://localhost/v1", concurrency=100, overrides=["engine.max_concurrent=8"]
    )
    assert episodes_at_once(config, PolicyKind.ENGINE) == 8
    assert episodes_at_once(config, PolicyKind.EXPERT) == 100


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_address_attaches_to_a_server(engine: str) -> None:
    found = evaluation_config(env="guess_number", model="m", engine=engine, url="http://localhost:1")
    assert isinstance(found.engine, ServerEngineConfig)
    assert (found.engine.type, found.engine.servers, found.model.path) == (engine, ["http://localhost:1"], "m")


def test_a_run_on_running_servers_keeps_its_own_environment(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("environment: guess_number\n")
    found = evaluation_config(model=str(tmp_path), engine="vllm", url="http://localhost:1")
    assert found.sole_environment.name == "guess_number"
    assert isinstance(found.engine, ServerEngineConfig)
    assert found.engine.servers == ["http://localhost:1"]


def test_the_first_split_that_is_not_for_training_is_measured() -> None:
    found = evaluation_config(env="bandit", policy=PolicyKind.EXPERT)
    assert found.sole_environment.split == "valid"
    assert evaluation_config(env="bandit/test", policy=PolicyKind.EXPERT).sole_environment.split == "test"


MIXED = """
environments:
  bandit: {name: guess_number, split: test}
  cards: {name: bandit, options: {arms: 7}, evaluation_split: test}
sampling: {temperature: 0.5, top_p: 0.75}
evaluation: {sampling: {temperature: 0.25, top_p: 0.5}}
"""


@pytest.mark.parametrize(
    ("env", "name", "split", "options"),
    [
        ("bandit", "guess_number", "valid", {}),
        ("cards", "bandit", "test", {"arms": 7}),
        ("cards/valid", "bandit", "valid", {"arms": 7}),
        ("guess_number/test", "guess_number", "test", {}),
    ],
)
def test_an_environment_of_a_mixed_run_is_named_by_its_label_first(
    env: str, name: str, split: str, options: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(MIXED)
    found = evaluation_config(model=str(tmp_path), env=env)
    section = found.sole_environment
    assert (section.name, section.split) == (name, split)
    assert {key: section.options[key] for key in options} == options
    assert (found.sampling.temperature, found.sampling.top_p) == (0.25, 0.5)


SECTION = """
environment: guess_number
model: {path: m}
evaluation: {split: test, tasks: 7, samples: 3, sampling: {temperature: 0.25}}
"""


def request_of(folder: Path, *, tasks: int | None = None, **options: Any) -> EvaluationRequest:
    (folder / "config.yaml").write_text(SECTION)
    config = evaluation_config(model=str(folder), **options)
    return make_request(config, policy=PolicyKind.ENGINE, model=None, tasks=tasks)


def test_a_run_is_measured_as_its_evaluation_section_says_and_the_settings_name_the_keys(tmp_path: Path) -> None:
    words = "settings: guess_number/test, tasks 7 (evaluation.tasks), samples 3 (evaluation.samples), seed 0"
    assert describe_request(request_of(tmp_path)) == f"{words}, temperature 0.25"
    words = "settings: guess_number/test, tasks 5, samples 3 (evaluation.samples), seed 0, temperature 1"
    assert describe_request(request_of(tmp_path, tasks=5, temperature=1.0)) == words


def test_overrides_of_the_evaluation_section_take_precedence(tmp_path: Path) -> None:
    words = ["evaluation.split=valid", "evaluation.tasks=9", "evaluation.sampling.temperature=0"]
    found = request_of(tmp_path, overrides=words)
    assert (found.config.sole_environment.split, found.n_tasks, found.config.sampling.temperature) == ("valid", 9, 0.0)


def test_the_evaluation_section_says_nothing_about_another_environment(tmp_path: Path) -> None:
    other, own = (request_of(tmp_path, env=env) for env in ("bandit/test", "guess_number/valid"))
    assert (other.n_tasks, other.samples, other.config_keys) == (100, 1, ())
    assert (own.n_tasks, own.samples, own.config.sole_environment.split) == (7, 3, "valid")


def test_a_shipped_config_is_measured_as_its_evaluation_section_says() -> None:
    config = evaluation_config(source="qwen/code")
    request = make_request(config, policy=PolicyKind.ENGINE, model=None)
    assert (config.sole_environment.split, request.n_tasks, request.samples) == ("test", 200, 1)


def test_a_file_of_prompts_is_measured_whole_whatever_the_run_says(tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "one"}\n' * 11)
    found = request_of(tmp_path, prompts=str(tmp_path / "asked.jsonl"))
    assert (found.config.sole_environment.name, found.n_tasks, found.samples) == ("prompts", 11, 1)


def test_an_environment_of_a_run_is_found_by_its_label_or_else_by_its_name() -> None:
    run = load_config(None, ["environments={first: {name: guess_number}, maze: {name: bandit}, third: {name: maze}}"])
    found = {env: _part(env, run) for env in ("guess_number", "guess_number/test", "maze", "bandit", "third", "hanoi")}
    labels = {env: None if part is None else part.label for env, part in found.items()}
    assert labels == {
        "guess_number": "first",
        "guess_number/test": "first",
        "maze": "maze",
        "bandit": "maze",
        "third": "third",
        "hanoi": None,
    }
    with pytest.raises(UsageError, match="--env first or --env maze or --env third"):
        _part(None, run)
