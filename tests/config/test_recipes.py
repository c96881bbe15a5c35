"""Recipes have the published values, except for declared differences, and a small size that trains."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentrl.config import Config, load_config, shipped_configs
from agentrl.config.config import AlgorithmConfig
from agentrl.config.derived import per_environment_configs
from agentrl.config.estimate import derive
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError
from agentrl.registry import Kind, names
from agentrl.rollout.task_source import task_source
from agentrl.runs.rl import train
from agentrl.runs.start import start_run
from agentrl.training.gradients import Objective

ROOT = Path(__file__).parents[2]
NO_CLIP = 1e6
"""Upper bound of a ratio that never clips."""


def recipe_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe_tables", ROOT / "docs" / "recipe_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = recipe_tables()
RECIPES: dict[str, dict[str, Any]] = TABLES.published()["recipes"]
OWN = [name for name, entry in RECIPES.items() if "config" not in entry]


def load(name: str, *overrides: str) -> Config:
    return load_config(TABLES.config_of(name, RECIPES[name]), overrides)


def kl(algorithm: AlgorithmConfig) -> list[Any]:
    """Return the coefficient, the place and the estimator of the KL to the reference."""
    if algorithm.kl_coef > 0:
        return [algorithm.kl_coef, "loss", algorithm.reference.kl_estimator]
    if (shaping := algorithm.shaping.get("kl")) is not None:
        return [shaping["coef"], "reward", shaping["estimator"]]
    return [0.0, "none", "none"]


def clip(algorithm: AlgorithmConfig) -> Any:
    low, high = (algorithm.loss_options.get(f"clip_{side}") for side in ("low", "high"))
    return "off" if high == NO_CLIP else [low, high]


def stages(config: Config, key: str) -> list[Any]:
    """Return the values of a key at later stages."""
    points = (config.schedules or {})[key].points
    return list((points or {}).values())


def entropy_schedule(config: Config) -> Any:
    return (config.schedules or {})["algorithm.entropy_coef"]


def resampling(config: Config) -> list[int]:
    resample = config.algorithm.selection.resample
    return [resample.keep, resample.least_right, resample.least_wrong]


def process_reward(config: Config) -> list[Any]:
    section = config.trainer.process_reward
    return [section.learning_rate, section.beta, section.update]


def reward_names(config: Config) -> list[str]:
    return [reward if isinstance(reward, str) else reward["name"] for reward in config.agent.reward]


COMPUTED: dict[str, Callable[[Config], Any]] = {
    "accuracy": lambda c: [c.algorithm.selection.min_accuracy, c.algorithm.selection.max_accuracy],
    "actions_per_turn": lambda c: c.sole_environment.options["actions_per_turn"],
    "aggregation": lambda c: c.algorithm.aggregation,
    "alpha": lambda c: c.algorithm.advantage_options["alpha"],
    "answer_tokens": lambda c: c.agent.max_answer_tokens,
    "ares": lambda c: [c.algorithm.shaping["ares"][name] for name in ("window", "percentile", "weight")],
    "bandit_reward": lambda c: c.sole_environment.options["reward"],
    "attempts": lambda c: c.agent.options["attempts"],
    "beta": lambda c: c.algorithm.loss_options["beta"],
    "betas": lambda c: list(c.trainer.adam.betas),
    "buffer": lambda c: c.sole_environment.options["buffer"],
    "chunk": lambda c: c.agent.options["part_tokens"],
    "clip": lambda c: clip(c.algorithm),
    "critic_learning_rate": lambda c: c.trainer.critic.learning_rate,
    "critic_rows": lambda c: c.trainer.mini_batch_rows,
    "depth": lambda c: c.algorithm.advantage_options["depth"],
    "dual_clip": lambda c: c.algorithm.loss_options["dual_clip"],
    "entropy": lambda c: c.algorithm.entropy_coef,
    "entropy_factor": lambda c: round(entropy_schedule(c).factor ** (1 / derive(c).updates_per_step), 3),
    "entropy_max": lambda c: entropy_schedule(c).max,
    "entropy_step": lambda c: entropy_schedule(c).step,
    "eta": lambda c: c.algorithm.loss_options["eta"],
    "experts": lambda c: c.algorithm.expert.members,
    "filters_groups": lambda c: c.algorithm.dynamic_sampling,
    "first_token": lambda c: [c.sampling.first_token.temperature, c.sampling.first_token.top_k],
    "gae": lambda c: [c.algorithm.advantage_options["gamma"], c.algorithm.advantage_options["gae_lambda"]],
    "gamma": lambda c: c.algorithm.advantage_options["gamma"],
    "group": lambda c: derive(c).episodes_per_step // derive(c).groups_per_step,
    "inputs": lambda c: c.sole_environment.options["inputs"],
    "invalid": lambda c: c.algorithm.shaping["invalid"]["penalty"],
    "kl": lambda c: kl(c.algorithm),
    "kl_coef": lambda c: c.algorithm.kl_coef,
    "kl_cov": lambda c: [c.algorithm.loss_options["share"], c.algorithm.loss_options["coef"]],
    "learning_rate": lambda c: c.trainer.learning_rate,
    "model": lambda c: c.model.path,
    "observation_tokens": lambda c: c.agent.max_observation_tokens,
    "omega": lambda c: c.algorithm.advantage_options["omega"],
    "overlong_buffer": lambda c: c.algorithm.shaping["overlong"]["buffer"],
    "passages": lambda c: c.sole_environment.options["topk"],
    "positive_weight": lambda c: c.algorithm.loss_options["positive_weight"],
    "pretrain_steps": lambda c: c.trainer.critic.pretrain_steps,
    "refresh_every": lambda c: c.algorithm.reference.refresh_every,
    "penalties": lambda c: [c.agent.options["wrong"], c.agent.options["malformed"]],
    "process_reward": process_reward,
    "references": lambda c: c.sole_environment.options["references"],
    "resample": resampling,
    "resampling": lambda c: [c.algorithm.shaping["pf_ppo"]["power"], c.algorithm.shaping["pf_ppo"]["method"]],
    "rewards": reward_names,
    "rows": lambda c: c.trainer.mini_batch_rows,
    "search_reward": lambda c: c.sole_environment.options["reward"],
    "stage_answer_tokens": lambda c: stages(c, "agent.max_answer_tokens"),
    "stage_temperatures": lambda c: stages(c, "sampling.temperature"),
    "steps": lambda c: c.trainer.steps,
    "target_entropy": lambda c: entropy_schedule(c).target,
    "tasks": lambda c: derive(c).groups_per_step,
    "temperature": lambda c: c.sampling.temperature,
    "tokens": lambda c: c.agent.max_tokens,
    "top_p": lambda c: c.sampling.top_p,
    "turns": lambda c: c.agent.max_turns,
    "updates": lambda c: derive(c).updates_per_step,
    "warmup": lambda c: c.trainer.warmup_steps / derive(c).updates_per_step,
    "weight_decay": lambda c: c.trainer.adam.weight_decay,
}
"""What the config and its dry run have, by the keys of ``published``."""


def undeclared(config: Config, entry: dict[str, Any]) -> list[str]:
    """Return what is wrong with the declared differences of a recipe."""
    declared, problems = entry.get("differs", {}), []
    for key, value in entry["published"].items():
        found = COMPUTED[key](config)
        if (found != value) != (key in declared):
            what = "is declared as a difference, but is the same" if found == value else "is not declared"
            problems.append(f"{key}: published {value}, here {found}: {what}")
    return problems + [f"{key}: declared, but not published" for key in declared if key not in entry["published"]]


@pytest.mark.parametrize("name", RECIPES)
def test_published_values_are_equal_except_for_declared_differences(name):
    assert undeclared(load(name), RECIPES[name]) == []


def test_an_undeclared_and_a_needless_difference_are_found():
    config, entry = load("dapo"), RECIPES["dapo"]
    other = {**entry, "published": {**entry["published"], "group": 8}}
    assert undeclared(config, other) == ["group: published 8, here 16: is not declared"]
    assert undeclared(config, {**entry, "differs": {"group": "x"}}) == [
        "group: published 16, here 16: is declared as a difference, but is the same"
    ]
    assert undeclared(config, {**entry, "differs": {"rows": "x"}}) == ["rows: declared, but not published"]


@pytest.mark.parametrize("name", OWN)
def test_the_header_of_a_file_says_what_the_table_says(name):
    text = (ROOT / "configs" / "recipes" / f"{name}.yaml").read_text()
    head = TABLES.header(name, RECIPES[name])
    assert text[: len(head)] == head, f"the file should begin with:\n{head}"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("simplevla_rl", "simulator LIBERO"), ("llasa-tts", "speech")],
)
def test_a_system_without_a_recipe_says_why(name, reason):
    with pytest.raises(ConfigError, match=f"there is no recipe for .*{reason}"):
        load_config(f"recipes/{name}")
    with pytest.raises(ConfigError, match="no config file recipes/unheard_of"):
        load_config("recipes/unheard_of")
    with pytest.raises(ConfigError, match="Did you mean recipes/dapo\\?"):
        load_config("recipes/DAPO")


def test_every_file_has_published_values():
    files = {name.removeprefix("recipes/") for name in shipped_configs() if name.startswith("recipes/")}
    assert files == set(OWN)
    assert not re.search(r"https?://", TABLES.FILE.read_text())


@pytest.mark.parametrize("name", RECIPES)
def test_the_small_size_needs_no_download(name):
    config = load(name, "size=small")
    assert config.model.path == "scratch"
    assert derive(config).episodes_per_step <= 64
    for part in per_environment_configs(config):
        environment = part.config.sole_environment
        spec = resolve_environment(environment.name)
        assert spec.name in names(Kind.ENVIRONMENT)
        assert len(task_source(spec, environment)) >= config.trainer.tasks_per_step
    Objective(config.algorithm)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_small_size_trains(name, tmp_path):
    tiny = "model.scratch={layers: 1, hidden_size: 32, heads: 1, kv_heads: 1}"
    config = load(name, "size=small", "model.device=cpu", tiny, f"run.directory={tmp_path}")
    result = train(start_run(config, kind="rl"))
    assert result.step == config.trainer.steps
