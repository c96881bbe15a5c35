"""Rules of `agentrl train --resume`: which config keys may change, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config.config import Config
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ResumeRule:
    """Permission to change a key when a run is resumed, with the reason."""

    may_change: bool
    why: str


@dataclass(frozen=True, slots=True)
class Change:
    """A key that a resumed run has with another value than before."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


_FOLDER = ResumeRule(False, "the run's folder has this name, and its tasks and sampling this seed")
_MODEL = ResumeRule(False, "the weights and the optimizer's state belong to this model")
_TASKS = ResumeRule(False, "other tasks make another run")
_PLAY = ResumeRule(False, "episodes would be played by other rules")
_OBJECTIVE = ResumeRule(False, "it changes the loss of the same episodes")
_UPDATE = ResumeRule(False, "it decides what an update consists of, and the optimizer's state belongs to it")
_CONTEXT = ResumeRule(False, "episodes end there")
_UNREAD = ResumeRule(False, "training does not read it")
_LENGTH = ResumeRule(True, "how long the run is; a cosine schedule is computed anew over the new length")
_RATE = ResumeRule(True, "how far an update goes: an unstable run may need less; it holds from now on")
_PLACE = ResumeRule(True, "where and how fast the same thing is computed")
_WATCH = ResumeRule(True, "what is measured, saved and shown")

RULES: Mapping[str, ResumeRule] = {
    "run": _FOLDER,
    "model": _MODEL,
    "model.device": _PLACE,
    "environment": _TASKS,
    **dict.fromkeys(
        (f"environment.{name}" for name in ("isolation", "workers", "max_concurrent")),
        _PLACE,
    ),
    "environment.reset_timeout_s": _PLACE,
    "environment.step_timeout_s": _PLACE,
    "environments": _TASKS,
    "environments.LABEL.evaluation_split": _WATCH,
    "agent": _PLAY,
    "agent.tool_timeout_s": _PLACE,
    **dict.fromkeys(
        (f"agent.judge.engine.{name}" for name in ("url", "api_key_variable", "timeout_s", "retries")),
        _PLACE,
    ),
    "agent.judge.engine.max_concurrent": _PLACE,
    "agent.judge.cache": _PLACE,
    "agent.judge.budget": ResumeRule(True, "how much the judge may use; what was used before counts"),
    "sampling": _PLAY,
    "engine": _PLACE,
    "engine.max_context": _CONTEXT,
    "algorithm": _OBJECTIVE,
    **dict.fromkeys(
        (f"algorithm.teacher.{name}" for name in ("servers", "engine", "api_key_variable", "timeout_s")),
        _PLACE,
    ),
    "algorithm.teacher.max_concurrent": _PLACE,
    "trainer.steps": _LENGTH,
    **dict.fromkeys(
        (f"trainer.{name}" for name in ("learning_rate", "warmup_steps", "schedule", "min_lr_ratio", "max_grad_norm")),
        _RATE,
    ),
    "trainer.critic.learning_rate": _RATE,
    "trainer.process_reward.learning_rate": _RATE,
    **dict.fromkeys(
        (f"trainer.{name}" for name in ("tasks_per_step", "optimizer", "adam", "epochs", "mini_batches", "max_kl")),
        _UPDATE,
    ),
    "trainer.critic": _UPDATE,
    "trainer.process_reward": _UPDATE,
    "trainer.moe": _OBJECTIVE,
    **dict.fromkeys(
        (f"trainer.{name}" for name in ("tokens_per_micro_batch", "share_prefixes", "lanes", "kernels", "fsdp")),
        _PLACE,
    ),
    **dict.fromkeys(
        (f"trainer.{name}" for name in ("gradient_checkpointing", "deterministic", "processes")),
        _PLACE,
    ),
    "trainer.context_parallel": _PLACE,
    "trainer.tensor_parallel": _PLACE,
    "trainer.numerics": _WATCH,
    "adapters": _MODEL,
    "adapters.algorithm": _OBJECTIVE,
    **dict.fromkeys(
        (f"adapters.{name}" for name in ("learning_rate", "warmup_steps", "schedule", "min_lr_ratio")),
        _RATE,
    ),
    "adapters.max_grad_norm": _RATE,
    "sft": _UNREAD,
    "preferences": _UNREAD,
    "rollout": _PLACE,
    "evaluation": _WATCH,
    "checkpoint": _WATCH,
    "curriculum": _TASKS,
    "cluster": _PLACE,
    "trackers": _WATCH,
}
"""The rule of a key is that of the longest of these that it is or begins with; every key has one."""


def rule_of(key: str) -> ResumeRule:
    """The rule of a config key, such as ``trainer.steps``.

    ``adapters.planner.learning_rate`` follows ``adapters.learning_rate``. Of several environments,
    ``environments.maze.workers`` follows ``environment.workers``.

    Raises:
        KeyError: the table has no rule for this key.
    """
    section, _, rest = key.partition(".")
    if section == "environments":
        name = rest.partition(".")[2]
        labelled, sole = f"environments.LABEL.{name}", f"environment.{name}"
        key = labelled if labelled in RULES else sole if sole in RULES else section
    if section == "adapters":
        key = f"adapters.{rest.partition('.')[2]}"
    parts = key.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return RULES[next((prefix for prefix in prefixes if prefix in RULES), key)]


def changes(saved: Config, config: Config) -> tuple[Change, ...]:
    """The keys that differ, in the order of their names."""
    before, after = dict(_flat(saved.model_dump(mode="json"))), dict(_flat(config.model_dump(mode="json")))
    keys = sorted(before.keys() | after.keys())
    return tuple(Change(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key))


def check_same_run(found: tuple[Change, ...]) -> None:
    """Check that a resumed run stays the run that it is.

    Raises:
        ConfigError: a change would make it another one; the message gives the reason for each.
    """
    refused = [change for change in found if not rule_of(change.key).may_change]
    if refused:
        reasons = "; ".join(f"{change} ({rule_of(change.key).why})" for change in refused)
        raise ConfigError(
            "a resumed run keeps what it is",
            got=f"a change of {reasons}",
            expected="changes of its length, learning rate, placement, speed, evaluations, checkpoints or trackers",
            hint="to train with other settings, start a new run from this one's model: "
            "agentrl train CONFIG model.path=RUN",
        )


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
