"""Runs for fault injection: their configs, and the targets of their faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.testing.chaos.plan import FILES, SERVED_ANSWERS, WAYS, Target

LOCAL_TARGETS = (Target.TRAINER, Target.ANSWER, Target.DISK, Target.CLOCK, *FILES)
GROUP_SIZE = 3
SCRATCH = (
    "model.scratch={layers: 1, hidden_size: 64, heads: 2, kv_heads: 1, vocab_size: 300, max_context: 512}",
    "model.scratch.initializer_range=0.2",
)
"""Default model of the runs: small, with an architecture that vLLM and SGLang can serve."""
COMMON = (
    "agent={loop: react_text, options: {format: plain, explain: false}, max_answer_tokens: 6, max_tokens: 400}",
    f"algorithm.group_size={GROUP_SIZE}",
    "trainer={tasks_per_step: 3, learning_rate: 1e-4}",
    "model.dtype=float32",
)
"""Settings of the default runs; a config replaces them."""
LIMITS = (
    "trainer.steps=100000",
    "evaluation.every=0",
    "checkpoint={every: 3, keep: 2}",
    "environment.step_timeout_s=6",
    "environment.reset_timeout_s=40",
    "rollout.retries=3",
    "rollout.stall_report_s=20",
    "trackers=[]",
)
"""Settings that all runs need: short deadlines, frequent checkpoints."""
WORKER_PROCESSES = ("environment.isolation=process", "environment.workers=2")
LOCAL_ENGINE = ("engine={type: local, max_num_seqs: 16, cache_tokens: 8192, timeout_s: 8}",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A kind of run."""

    name: str
    overrides: tuple[str, ...]
    ways: Mapping[Target, Sequence[str]]
    """Faults of each target."""
    serves_environment: bool = False
    """True if the environment is behind a server and a proxy."""


def _ways(*targets: Target) -> dict[Target, Sequence[str]]:
    return {target: WAYS[target] for target in targets}


_WORKERS = (Target.WORKER, Target.SUPERVISOR)
LOCAL_SCENARIOS = (
    Scenario(
        name="synchronous", overrides=(*LOCAL_ENGINE, "rollout.max_staleness=0"), ways=_ways(*LOCAL_TARGETS, *_WORKERS)
    ),
    Scenario(
        name="asynchronous", overrides=(*LOCAL_ENGINE, "rollout.max_staleness=2"), ways=_ways(*LOCAL_TARGETS, *_WORKERS)
    ),
    Scenario(
        name="two-ranks",
        overrides=(*LOCAL_ENGINE, "rollout.max_staleness=1", "trainer.processes=2"),
        ways=_ways(*LOCAL_TARGETS, Target.RANK),
    ),
    Scenario(
        name="served-environment",
        overrides=(*LOCAL_ENGINE, "rollout.max_staleness=1"),
        ways=_ways(Target.TRAINER, Target.SERVER, Target.CONNECTION, Target.STORE),
        serves_environment=True,
    ),
)


def engine_scenarios(engine: str) -> tuple[Scenario, ...]:
    """Return the scenarios with a vLLM or SGLang server behind a proxy."""
    settings = f"engine={{type: {engine}, max_num_seqs: 16, max_context: 512, timeout_s: 20, lost_timeout_s: 40}}"
    ways = _ways(Target.TRAINER, Target.SERVER, Target.CONNECTION, Target.WORKER, Target.STORE, Target.CHECKPOINT)
    return tuple(
        Scenario(
            name=f"{engine}-staleness-{staleness}",
            overrides=(settings, f"rollout.max_staleness={staleness}"),
            ways={**ways, Target.ANSWER: SERVED_ANSWERS},
        )
        for staleness in (1, 0)
    )
