"""Keys of the config: all keys, and errors for unknown ones, such as renamed keys and names of other frameworks."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from agentrl.config.config import Config
from agentrl.config.environment import MixedEnvironmentConfig
from agentrl.config.overrides import KeyPath
from agentrl.errors import AgentRLError
from agentrl.registry import Kind, lookup, names

LABELLED = "environments"
"""Section that holds other sections under labels chosen by the user."""
LABEL_WORD = "LABEL"
"""Placeholder for such a label."""
LIKE_IT = 0.8
"""Minimum similarity of names in different sections."""

RENAMED_KEYS: Mapping[str, str] = {
    "agent.shots": "agent.few_shot_turns",
    "agent.max_refused": "agent.max_rejected_actions",
    "agent.max_invalid": "agent.max_parse_failures",
    "engine.slots": "engine.max_num_seqs",
    "engine.max_running": "engine.max_num_seqs",
    "trainer.mixture": "trainer.moe",
    "trainer.mixture.balance": "trainer.moe.aux_loss_coef",
    "trainer.mixture.replay": "trainer.moe.router_replay",
    "trainer.numerics.most_skipped": "trainer.numerics.max_skipped",
    "model.lora.targets": "model.lora.target_modules",
    "model.lora.whole": "model.lora.modules_to_save",
}
"""Former and current names of keys; the keys of a renamed section are listed, too."""

WHOLE_KEYS: Mapping[str, str] = {
    "engine.name": "engine.type",
    "model.name": "model.path",
    "agent.name": "agent.loop",
    "rollout.n": "algorithm.group_size",
    "actor_rollout_ref.rollout.n": "algorithm.group_size",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.actor.optim.lr": "trainer.learning_rate",
    "data.train_batch_size": "trainer.tasks_per_step",
    "data.train_files": "environment.tasks",
    "sft.batch_size": "sft.tokens_per_update",
    "sft.num_train_epochs": "sft.epochs",
    "preferences.batch_size": "preferences.pairs_per_update",
    "preferences.num_train_epochs": "preferences.epochs",
    "preferences.beta": "preferences.loss_options.beta",
    "algorithm.name": "algorithm.advantage",
    "algorithm.type": "algorithm.advantage",
}
"""Keys whose last word means something else in another section."""

OTHER_NAMES: Mapping[str, str] = {
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "estimator": "algorithm.advantage",
    "loss_type": "algorithm.loss",
    "loss_fn": "algorithm.loss",
    "beta": "algorithm.kl_coef",
    "kl_beta": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "entropy_coeff": "algorithm.entropy_coef",
    "clip_ratio": "algorithm.loss_options.clip_high",
    "clip_range": "algorithm.loss_options.clip_high",
    "clip_ratio_low": "algorithm.loss_options.clip_low",
    "clip_ratio_high": "algorithm.loss_options.clip_high",
    "epsilon": "algorithm.loss_options.clip_low",
    "epsilon_low": "algorithm.loss_options.clip_low",
    "epsilon_high": "algorithm.loss_options.clip_high",
    "loss_agg_mode": "algorithm.aggregation",
    "n_samples": "algorithm.group_size",
    "num_generations": "algorithm.group_size",
    "n_samples_per_prompt": "algorithm.group_size",
    "samples_per_prompt": "algorithm.group_size",
    "batch_size": "trainer.tasks_per_step",
    "train_batch_size": "trainer.tasks_per_step",
    "rollout_batch_size": "trainer.tasks_per_step",
    "per_device_train_batch_size": "trainer.tasks_per_step",
    "lr": "trainer.learning_rate",
    "max_steps": "trainer.steps",
    "num_steps": "trainer.steps",
    "total_steps": "trainer.steps",
    "total_training_steps": "trainer.steps",
    "ppo_epochs": "trainer.epochs",
    "num_iterations": "trainer.epochs",
    "ppo_mini_batch_size": "trainer.mini_batches",
    "num_minibatches": "trainer.mini_batches",
    "ppo_max_token_len_per_gpu": "trainer.tokens_per_micro_batch",
    "grad_clip": "trainer.max_grad_norm",
    "lr_scheduler_type": "trainer.schedule",
    "max_tokens": "agent.max_answer_tokens",
    "max_new_tokens": "agent.max_answer_tokens",
    "max_gen_toks": "agent.max_answer_tokens",
    "max_response_length": "agent.max_answer_tokens",
    "max_completion_length": "agent.max_answer_tokens",
    "max_prompt_length": "agent.max_tokens",
    "max_seq_len": "agent.max_tokens",
    "max_model_len": "engine.max_context",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "torch_dtype": "model.dtype",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "num_fewshot": "agent.few_shot_turns",
    "api_key": "engine.api_key_variable",
    "api_key_var": "engine.api_key_variable",
    "env": "environment.name",
    "env_args": "environment.options",
    "env_config": "environment.options",
    "env_kwargs": "environment.options",
    "env_name": "environment.name",
    "dataset": "environment.tasks",
    "train_files": "environment.tasks",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "eval_steps": "evaluation.every",
    "test_freq": "evaluation.every",
    "report_to": "trackers",
    "logger": "trackers",
    "output_dir": "run.directory",
    "experiment_name": "run.name",
    "run_name": "run.name",
}
"""Names of other frameworks' settings, and the corresponding keys."""

_OPTIONS = (("loss_options", Kind.LOSS), ("advantage_options", Kind.ADVANTAGE))
"""Option sections, and the kind of function that accepts the options."""


def section_at(path: KeyPath) -> list[str]:
    """Return the keys of the section at `path` (of all types, for a section with a ``type``); empty if not found."""
    models: list[type[BaseModel]] = [Config]
    for key in (*path[:1], *path[2:]) if path[:1] in ((LABELLED,), ("schedules",)) else path:
        models = [inner for model in models if key in model.model_fields for inner in models_of(_type(model, key))]
    return sorted({name for model in models for name in model.model_fields})


def all_keys() -> list[KeyPath]:
    """Return the path of every key that holds a value."""
    found: dict[KeyPath, None] = {}
    _walk(Config, (), found)
    return list(found)


def _walk(model: type[BaseModel], path: KeyPath, found: dict[KeyPath, None]) -> None:
    for name in own_fields(model):
        inner = models_of(_type(model, name))
        for section in inner:
            _walk(section, (*path, *key_words(name)), found)
        if not inner:
            found[(*path, name)] = None


def own_fields(model: type[BaseModel]) -> list[str]:
    """Return the keys of a section without inherited ones, which are documented in the other section."""
    return [name for name in model.model_fields if model is not MixedEnvironmentConfig or name in model.__annotations__]


def key_words(section: str) -> KeyPath:
    """Return a section's name as in key paths: with a placeholder for the user's label if the section has labels."""
    return (section, LABEL_WORD) if section == LABELLED else (section,)


def _type(model: type[BaseModel], field: str) -> Any:
    return model.model_fields[field].annotation


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections among the alternatives of a field's type, or under its labels."""
    if get_origin(annotation) is dict:
        return models_of(get_args(annotation)[1])
    if get_origin(annotation) in (Union, UnionType):
        return [model for part in get_args(annotation) for model in models_of(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def describe_renaming(key: str) -> str | None:
    """Return the current names of a renamed key and of the keys of a renamed section; ``None`` for any other key.

    >>> describe_renaming("agent.shots")
    'agent.shots is now agent.few_shot_turns'
    """
    found = [f"{old} is now {new}" for old, new in RENAMED_KEYS.items() if f"{old}.".startswith(f"{key}.")]
    return "; ".join(found) if key in RENAMED_KEYS else None


def describe_unknown_key(path: KeyPath) -> str:
    """Return the error message for an unknown key, with the key that is probably meant."""
    key, section = ".".join(path), section_at(path[:-1])
    if (renaming := describe_renaming(key)) is not None:
        return f"renamed key: {renaming}"
    if "." in path[-1] and tuple(key.split(".")) in all_keys():
        return f"unknown key {path[-1]}: in a file, a section holds its keys; write {_nest(key.split('.'))}"
    if path[-1] in section:
        return f"unknown key {key} for this type of {'.'.join(path[:-1])}: another type has it"
    if near := nearest_key(path, section):
        return f"unknown key {key}; did you mean {near}?"
    return f"unknown key {key}; known keys here: {', '.join(section)}" if section else f"unknown key {key}"


def _nest(path: Sequence[str]) -> str:
    return f"{path[0]}: {{{_nest(path[1:])}}}" if len(path) > 1 else f"{path[0]}: …"


def describe_unknown_section(path: KeyPath, value: object) -> str | None:
    """Return the error message for an unknown section whose keys other frameworks have; ``None`` for any other one.

    >>> describe_unknown_section(("data",), {"train_batch_size": 4})
    'unknown key data.train_batch_size; did you mean trainer.tasks_per_step?'
    """
    if ".".join(path) in RENAMED_KEYS:
        return None
    found = [leaf for leaf in _leaves(path, value) if ".".join(leaf) in WHOLE_KEYS or leaf[-1] in OTHER_NAMES]
    return "; ".join(map(describe_unknown_key, found)) if isinstance(value, Mapping) and found else None


def _leaves(path: KeyPath, value: object) -> Iterator[KeyPath]:
    if not isinstance(value, Mapping):
        yield path
        return
    for name, inner in value.items():
        yield from _leaves((*path, str(name)), inner)


def nearest_key(path: KeyPath, section: Sequence[str]) -> str | None:
    """Return the key that is probably meant by an unknown one; ``None`` if no key is similar."""
    name = path[-1]
    known = WHOLE_KEYS.get(".".join(path)) or OTHER_NAMES.get(name) or _option(path)
    if known is not None:
        return known
    if near := difflib.get_close_matches(name, section, n=1, cutoff=0.6):
        return ".".join((*path[:-1], near[0]))
    keys = all_keys()
    others = difflib.get_close_matches(name, {key[-1] for key in keys}, n=1, cutoff=LIKE_IT)
    same = sorted((key for key in keys if others and key[-1] == others[0]), key=len)
    return ".".join(same[0]) if same else None


def _option(path: KeyPath) -> str | None:
    """Return the key of a loss or estimator option that was written under ``algorithm`` itself."""
    if path[0] != "algorithm":
        return None
    for section, kind in _OPTIONS:
        found = difflib.get_close_matches(path[-1], _options_of(kind), n=1, cutoff=LIKE_IT)
        if found:
            return f"algorithm.{section}.{found[0]}"
    return None


@functools.cache
def _options_of(kind: Kind) -> frozenset[str]:
    """Collect the options that the losses or the estimators accept."""
    found: set[str] = set()
    for name in names(kind):
        with contextlib.suppress(AgentRLError, TypeError, ValueError):  # a plugin that cannot be imported here
            parameters = inspect.signature(lookup(kind, name)).parameters.values()
            found |= {one.name for one in parameters if one.kind is one.KEYWORD_ONLY or one.default is not one.empty}
    return frozenset(found)
