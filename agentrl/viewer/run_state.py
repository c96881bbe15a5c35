"""State and config of a run or an evaluation, from its files and its lock.

Runs of other versions can be read, too: nothing is imported to read their configs.
"""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from agentrl.config import Config
from agentrl.config.keys import models_of
from agentrl.config.overrides import SAFE_LOADER
from agentrl.observe.run_folder import LOCK, LOCK_TABLE, is_locked
from agentrl.observe.run_status import Liveness, RunSnapshot
from agentrl.viewer.sources import SourceFolder, SourceKind

WITHOUT_NEWS_S = 600.0
"""Seconds without a file change after which an unfinished run counts as stalled."""
ELSEWHERE_S = 60.0
"""Maximum age in seconds of the newest change of a running run whose lock is not visible, as on a shared disk."""
OVERDUE_S = 5.0
"""Seconds past its deadline after which a wait counts as a stall."""
MAX_CONFIG_BYTES = 2**20
"""Maximum bytes of a config that is read."""
LABELLED = ("environments", "adapters")
"""Sections that map user-defined labels to sections."""
MAX_KEYS = 1000
"""Maximum number of keys that are shown."""


class SourceState(enum.StrEnum):
    """State of a run or an evaluation."""

    RUNNING = "running"
    FINISHED = "finished"
    CRASHED = "crashed"
    """Its process ended before its last step."""
    INTERRUPTED = "interrupted"
    """It was stopped by a signal or Ctrl-C, and can be resumed."""
    STALLED = "stalled"
    """Its process is alive but makes no progress, or waits past a deadline."""


_STATES = {
    Liveness.RUNNING: SourceState.RUNNING,
    Liveness.HUNG: SourceState.STALLED,
    Liveness.SUSPENDED: SourceState.STALLED,
    Liveness.FINISHED: SourceState.FINISHED,
    Liveness.STOPPED: SourceState.INTERRUPTED,
    Liveness.FAILED: SourceState.CRASHED,
    Liveness.CRASHED: SourceState.CRASHED,
}


def state_of(source: SourceFolder, status: RunSnapshot | None, *, is_complete: bool, changed: float) -> SourceState:
    """Return the state of a source.

    Args:
        source: The run or evaluation.
        status: Its status, if it writes one.
        is_complete: True if its last step or episode has ended.
        changed: Time of the newest change of its files, in seconds since 1970.
    """
    now = time.time()
    if status is not None:
        state = _STATES[status.liveness(now)]
        is_overdue = any(wait.deadline is not None and wait.deadline < now - OVERDUE_S for wait in status.waits)
        return SourceState.STALLED if state is SourceState.RUNNING and is_overdue else state
    if is_complete:
        return SourceState.FINISHED
    if is_locked(source.path / LOCK):
        is_quiet = now - changed > WITHOUT_NEWS_S
        return SourceState.STALLED if is_quiet else SourceState.RUNNING
    is_elsewhere = not LOCK_TABLE.exists()
    return SourceState.RUNNING if is_elsewhere and now - changed <= ELSEWHERE_S else SourceState.CRASHED


def is_over(source: SourceFolder, *, step: int | None, steps: int | None) -> bool:
    """Return True if a source has completed."""
    if source.kind is SourceKind.EVALUATION:
        return source.result_file.is_file()
    run = source.run
    with suppress(OSError):
        if run.diagnosis_file.stat().st_mtime >= run.metrics_file.stat().st_mtime:
            return True
    return step is not None and steps is not None and step >= steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSummary:
    """Settings of a run that the viewer shows."""

    environments: tuple[str, ...] = ()
    """Names of the environments."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """Split by the name of its environment."""
    model: str | None = None
    steps: int | None = None
    """Number of steps of the whole run."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Values that differ from the defaults, by key."""


def read_settings(file: Path | None) -> ConfigSummary:
    """Read the settings of a run; empty ones if the file is missing or damaged."""
    try:
        if file is None or file.stat().st_size > MAX_CONFIG_BYTES:
            return ConfigSummary()
        text = file.read_bytes()
        if b"&" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=SAFE_LOADER)):
            return ConfigSummary()  # runs write no YAML aliases, which can make a small file expand
        data = yaml.load(text, Loader=SAFE_LOADER)
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return ConfigSummary()
    if not isinstance(data, dict):
        return ConfigSummary()
    splits = dict(_environments(data))
    steps = _section(data, "trainer").get("steps")
    model = _section(data, "model").get("path")
    return ConfigSummary(
        environments=tuple(splits),
        splits={name: split for name, split in splits.items() if split},
        model=None if model is None else str(model),
        steps=steps if isinstance(steps, int) else None,
        changed=dict(list(_changed_keys(data, Config, ""))[:MAX_KEYS]),
    )


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def _environments(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and splits of the environments."""
    several = _section(data, "environments")
    entries = list(several.items()) or [("", data.get("environment"))]
    for label, entry in entries:
        if isinstance(entry, dict):
            yield str(entry.get("name", label)), str(entry.get("split") or "")
        elif isinstance(entry, str):
            name, _, split = entry.partition("/")
            yield name, split


def _changed_keys(data: Mapping[str, Any], model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a section whose values are not the defaults, including unknown keys."""
    for name, value in data.items():
        key, known = f"{prefix}{name}", model.model_fields.get(str(name))
        if known is None:
            yield key, value
            continue
        variants = _models_of(model, str(name))
        if isinstance(value, dict) and variants and name in LABELLED:
            for label, section in value.items():
                yield from _changed_keys(section if isinstance(section, dict) else {}, variants[0], f"{key}.{label}.")
        elif isinstance(value, dict) and variants:
            yield from _changed_keys(value, _variant(variants, value), f"{key}.")
        elif value != _default(model, str(name)):
            yield key, value


@functools.cache
def _models_of(model: type[BaseModel], name: str) -> list[type[BaseModel]]:
    return models_of(model.model_fields[name].annotation)


@functools.cache
def _default(model: type[BaseModel], name: str) -> Any:
    return _plain(model.model_fields[name].get_default(call_default_factory=True))


def _variant(variants: list[type[BaseModel]], value: Mapping[str, Any]) -> type[BaseModel]:
    """Return the model of a section: the one of its ``type``."""
    kind = value.get("type")
    typed = (one for one in variants if "type" in one.model_fields)
    return next((one for one in typed if one.model_fields["type"].default == kind), variants[0])


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value
