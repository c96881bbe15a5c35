"""Rules of ``--resume``: config keys of a run that may change, with reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.config.config import Config
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ResumeRule:
    """Permission to change a config key on resume, with the reason."""

    may_change: bool
    why: str


@dataclass(frozen=True, slots=True)
class Change:
    """Config key whose value changes on resume."""

    key: str
    old: Any
    new: Any
    rules: Mapping[str, ResumeRule] = field(default_factory=lambda: RULES, repr=False)

    @property
    def rule(self) -> ResumeRule:
        """Rule of this change. Weights at a training service cannot be loaded by another engine."""
        if self.key == "engine.type" and "tinker" in (self.old, self.new):
            return _MODEL
        return rule_of(self.key, self.rules)

    def __str__(self) -> str:
        return f"{self.key}: {_format_value(self.old)} -> {_format_value(self.new)}"


_FOLDER = ResumeRule(False, "the run's folder has this name, and its tasks and sampling depend on this seed")
_MODEL = ResumeRule(False, "the weights and the optimizer's state belong to this model")
_TASKS = ResumeRule(False, "it changes the tasks")
_PLAY = ResumeRule(False, "it changes the rules of episodes")
_OBJECTIVE = ResumeRule(False, "it changes the loss of the same episodes")
_UPDATE = ResumeRule(False, "it changes what an update consists of, which the optimizer's state depends on")
_CONTEXT = ResumeRule(False, "it changes where episodes end")
_UNREAD = ResumeRule(False, "this training does not read it")
_LENGTH = ResumeRule(True, "length of the run; a cosine schedule is recomputed for the new length")
_RATE = ResumeRule(True, "size of the updates from now on: an unstable run may need smaller ones")
_PLACE = ResumeRule(True, "placement and speed of the same computation")
_SCHEDULE = ResumeRule(False, "it also changes the settings of past steps")
_BATCH = ResumeRule(True, "groups that the next batches consist of, and how old their tokens may be")
_WATCH = ResumeRule(True, "measurements, checkpoints and output")

RULES: Mapping[str, ResumeRule] = {
    "run": _FOLDER,
    "run.price_per_hour": _WATCH,
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
    "environments.LABEL.algorithm": _OBJECTIVE,
    "agent": _PLAY,
    "agent.tool_timeout_s": _PLACE,
    **dict.fromkeys(
        (f"agent.judge.engine.{name}" for name in ("url", "api_key_variable", "timeout_s", "retries")),
        _PLACE,
    ),
    "agent.judge.engine.max_concurrent": _PLACE,
    "agent.judge.cache": _PLACE,
    "agent.judge.budget": ResumeRule(True, "limits of the judge; earlier use counts"),
    "sampling": _PLAY,
    "engine": _PLACE,
    "engine.max_context": _CONTEXT,
    "engine.base_model": _MODEL,
    "algorithm": _OBJECTIVE,
    **dict.fromkeys(
        (f"algorithm.teacher.{name}" for name in ("servers", "engine", "api_key_variable", "timeout_s")),
        _PLACE,
    ),
    "algorithm.teacher.max_concurrent": _PLACE,
    "trainer.steps": _LENGTH,
    "trainer.episodes": _TASKS,
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
    "trainer.mini_batch_rows": _UPDATE,
    "trainer.critic": _UPDATE,
    "trainer.process_reward": _UPDATE,
    "trainer.moe": _OBJECTIVE,
    **dict.fromkeys(
        (f"trainer.{name}" for name in ("tokens_per_micro_batch", "share_prefixes", "lanes", "kernels", "fsdp")),
        _PLACE,
    ),
    **dict.fromkeys(
        (f"trainer.{name}" for name in ("gradient_checkpointing", "deterministic", "processes", "cpus")),
        _PLACE,
    ),
    "trainer.restarts": _PLACE,
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
    "rollout.max_staleness": _BATCH,
    "rollout.batch_order": _BATCH,
    "evaluation": _WATCH,
    "checkpoint": _WATCH,
    "curriculum": _TASKS,
    "schedules": _SCHEDULE,
    "cluster": _PLACE,
    "observe": _WATCH,
    "trackers": _WATCH,
}
"""Rules by key or key prefix. The longest matching one applies, and every config key has a match."""
OPTION_RULES: Mapping[str, ResumeRule] = dict.fromkeys(
    (f"agent.options.{name}" for name in ("host", "port", "key_variable", "feedback_key_variable", "expires_s")),
    ResumeRule(True, "address, keys and patience of live traffic"),
)
"""Rules of single options of an agent loop."""


def rule_of(key: str, rules: Mapping[str, ResumeRule] = RULES) -> ResumeRule:
    """Return the rule of a config key, such as ``trainer.steps``.

    ``adapters.planner.learning_rate`` uses the rule of ``adapters.learning_rate``, and ``environments.maze.workers``
    that of ``environment.workers``.

    Raises:
        KeyError: the table has no rule for this key.
    """
    if key in OPTION_RULES:
        return OPTION_RULES[key]
    section, _, rest = key.partition(".")
    if section == "environments":
        name = rest.partition(".")[2]
        if name.partition(".")[0] == "algorithm":
            name = "algorithm"
        labelled, sole = f"environments.LABEL.{name}", f"environment.{name}"
        key = labelled if labelled in rules else sole if sole in rules else section
    if section == "adapters":
        key = f"adapters.{rest.partition('.')[2]}"
    parts = key.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return rules[next((prefix for prefix in prefixes if prefix in rules), key)]


def learning_rules(section: str) -> Mapping[str, ResumeRule]:
    """Return the rules of runs that learn from fixed data by a config section: ``sft`` or ``preferences``."""
    schedule = ("learning_rate", "warmup_steps", "schedule")
    own = {
        **dict.fromkeys(schedule, _RATE),
        "save_minutes": _WATCH,
        "data": ResumeRule(True, "place of the file, whose contents must stay the same"),
        "sources": ResumeRule(True, "place of the episodes, which must stay the same"),
        **dict.fromkeys(("stop_at", "check_every", "check_tasks"), ResumeRule(True, "when the training ends")),
    }
    unread = (*schedule, "min_lr_ratio", "steps", "critic", "process_reward", "critic.learning_rate")
    return {
        **RULES,
        **dict.fromkeys((f"trainer.{name}" for name in (*unread, "process_reward.learning_rate")), _UNREAD),
        section: _UPDATE,
        **{f"{section}.{name}": rule for name, rule in own.items()},
    }


def changes(saved: Config, config: Config, rules: Mapping[str, ResumeRule] = RULES) -> tuple[Change, ...]:
    """Return the keys whose values differ, sorted by name."""
    before, after = dict(_flat(saved.model_dump(mode="json"))), dict(_flat(config.model_dump(mode="json")))
    keys = sorted(before.keys() | after.keys())
    return tuple(
        Change(key, before.get(key), after.get(key), rules) for key in keys if before.get(key) != after.get(key)
    )


def check_same_run(found: tuple[Change, ...], command: str = "train") -> None:
    """Check that all changes are allowed when this command resumes the run.

    Raises:
        ConfigError: some are not; the message gives the reason for each.
    """
    refused = [change for change in found if not change.rule.may_change]
    if refused:
        reasons = "; ".join(f"{change} ({change.rule.why})" for change in refused)
        raise ConfigError(
            "these keys cannot change on resume" if len(refused) > 1 else "this key cannot change on resume",
            got=reasons,
            expected="changes of its length, learning rate, placement, speed, evaluations, checkpoints or trackers"
            if command == "train"
            else "changes of its learning rate, placement, speed, checkpoints or trackers, or of the place of its data",
            hint="to train with other settings, start a new run from this one's model: "
            f"agentrl {command} CONFIG model.path=RUN",
        )


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _format_value(value: Any) -> str:
    return "not set" if value is None else str(value)
