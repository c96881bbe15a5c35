"""Environments: their contract, and their lookup by name."""

from agentrl.env.contract import (
    AnyEnv,
    AsyncEnv,
    EnvironmentSpec,
    Expert,
    ExpertAction,
    FallibleExpert,
    Instructions,
    Isolation,
    StepResult,
    maybe_await,
    optional_part,
    run_coroutine,
)

__all__ = [
    "AnyEnv",
    "AsyncEnv",
    "EnvironmentSpec",
    "Expert",
    "ExpertAction",
    "FallibleExpert",
    "Instructions",
    "Isolation",
    "StepResult",
    "maybe_await",
    "optional_part",
    "run_coroutine",
]
