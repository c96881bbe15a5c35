"""Queries of an environment before a run starts: make it, call a function on it and close it, within a deadline."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import shlex
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from agentrl.config.config import Config
from agentrl.config.derived import per_environment_configs
from agentrl.config.environment import EnvironmentConfig
from agentrl.env import AnyEnv, EnvironmentSpec, Isolation, maybe_await, optional_part
from agentrl.env.lookup import resolve_environment
from agentrl.errors import AgentRLError, EnvironmentFailure, UsageError, boundary
from agentrl.errors.foreign import DaemonThreads

_log = logging.getLogger(__name__)
T = TypeVar("T")
_THREADS = DaemonThreads("environment probe")
PROBE_DEADLINE_S: float = EnvironmentConfig.model_fields["reset_timeout_s"].default
"""Deadline where no config sets ``environment.reset_timeout_s``."""


class EnvironmentTimeout(UsageError):
    """An environment did not answer before the deadline; its thread is abandoned."""


def probe_environment(
    spec: EnvironmentSpec,
    options: Mapping[str, Any],
    question: Callable[[AnyEnv], T],
    *,
    isolation: Isolation | None = None,
    deadline_s: float = PROBE_DEADLINE_S,
) -> T:
    """Make an environment in a daemon thread, call `question` on it, and close it; an error of ``close`` is logged.

    Args:
        spec: The environment.
        options: Options of its constructor, which replace those of the spec.
        question: Function of the environment, called before the first reset.
        isolation: Place where its code runs; that of the spec if left out. With `Isolation.INLINE`, the constructor
            runs in an event loop, as it does in a run.
        deadline_s: Seconds for the constructor and the question together, and for the close.

    Raises:
        EnvironmentTimeout: no answer within the deadline.
        EnvironmentFailure: the constructor or the question raised.
        AgentRLError: they raised this error themselves, such as a missing extra.
    """
    make = partial(spec.make_under, options)
    needs_loop = (isolation or spec.isolation_under(options)) is Isolation.INLINE
    answer: Future[T] = Future()

    def make_and_ask() -> None:
        try:
            with boundary(EnvironmentFailure, f"making environment {spec.name}"):
                if needs_loop:
                    asyncio.run(_ask(make, question, answer))
                else:
                    env = make()
                    asyncio.run(_ask(lambda: env, question, answer))
        except AgentRLError as error:
            if answer.done():
                what = f"closing environment {spec.name} failed"
                _log.warning("%s", EnvironmentFailure(what, got=error.got, expected=error.expected, hint=error.hint))
            else:
                answer.set_exception(error)

    ended = _THREADS.submit(contextvars.copy_context().run, make_and_ask)
    try:
        found = answer.result(deadline_s)
    except TimeoutError as late:
        raise EnvironmentTimeout(
            f"environment {spec.name} hangs before its first reset",
            got=f"no answer in {deadline_s:g} s",
            expected="a constructor and attributes that return",
            hint=f"run: agentrl env check {shlex.quote(spec.name)}; environment.reset_timeout_s sets a run's deadline",
        ) from late
    if not wait([ended], timeout=deadline_s).done:
        _log.warning("environment %s was not closed in %g s", spec.name, deadline_s)
    return found


async def _ask(make: Callable[[], AnyEnv], question: Callable[[AnyEnv], T], answer: Future[T]) -> None:
    env = make()
    try:
        answer.set_result(question(env))
    finally:
        await maybe_await(env.close())


def check_environments(config: Config) -> None:
    """Create and close each environment once, to report failures before the run starts.

    Environments in separate processes are skipped: a process takes seconds to start, and their first episode reports
    the same failure.

    Raises:
        UsageError: an environment cannot be created.
    """
    for part in per_environment_configs(config):
        spec, environment = resolve_environment(part.config.sole_environment.name), part.config.sole_environment
        isolation = environment.isolation or spec.isolation_under(environment.options)
        if isolation is Isolation.PROCESS:
            continue
        try:
            probe_environment(
                spec, environment.options, lambda _: None, isolation=isolation, deadline_s=environment.reset_timeout_s
            )
        except AgentRLError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"environment {spec.name} cannot be created",
                got=error.got,
                expected="a constructor that accepts environment.options",
                hint=f"try: agentrl env check {shlex.quote(spec.name)}",
            ) from error


def has_expert(spec: EnvironmentSpec, config: Config) -> bool:
    """Check whether the environment has an expert.

    Raises:
        UsageError: it cannot be made.
    """
    environment = config.sole_environment
    try:
        return probe_environment(
            spec,
            environment.options,
            lambda env: optional_part(env, "expert") is not None,
            isolation=environment.isolation,
            deadline_s=environment.reset_timeout_s,
        )
    except EnvironmentFailure as error:
        raise UsageError(str(error), hint=f"run: agentrl env check {shlex.quote(spec.name)}") from error
