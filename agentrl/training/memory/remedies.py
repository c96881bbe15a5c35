"""What to change in a run that does not fit."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.config.engines import LocalEngineConfig
from agentrl.config.overrides import apply, parse_override
from agentrl.config.schema import Config
from agentrl.training.memory.plan import MemoryPlan, plan


def remedies(config: Config, planned: MemoryPlan, limit: int) -> tuple[list[str], MemoryPlan]:
    """Changes that make a run smaller, one after the other until it fits or none is left, and what it takes then."""
    chosen: list[str] = []
    best = planned
    for change in _changes(config):
        if best.total <= limit:
            break
        tried = _changed(config, [*chosen, change])
        known = planned.footprint if tried.model.dtype == config.model.dtype else None
        found = plan(tried, known)
        if found.total < best.total:
            chosen, best = [*chosen, change], found
    return chosen, best


def _changed(config: Config, changes: Sequence[str]) -> Config:
    data = config.model_dump()
    for change in changes:
        apply(data, parse_override(change))
    return Config.model_validate(data)


def _changes(config: Config) -> Sequence[str]:
    engine, trainer = config.engine, config.trainer
    found = []
    if isinstance(engine, LocalEngineConfig):
        found.append(f"engine.cache_tokens={max(config.agent.max_tokens, engine.cache_tokens // 8)}")
    found.append("trainer.gradient_checkpointing=true")
    if config.agent.max_tokens < trainer.tokens_per_micro_batch:
        found.append(f"trainer.tokens_per_micro_batch={config.agent.max_tokens}")
    if config.model.dtype == "float32" and trainer.processes == 1:
        found.append("model.dtype=bfloat16")
    if trainer.lanes > 1:
        found.append("trainer.lanes=1")
    return found
