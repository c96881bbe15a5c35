"""The failure model: four rules, one enum, one flat tree of exceptions.

1. A bad episode is data, not a crash. It ends with one `Outcome`, its siblings live on, and the run goes on.
2. An error is classified once, where it crosses a boundary (engine, environment, tool, sandbox, scorer), by
   `boundary`; inside the boundary code raises what it likes, outside it only the types below are seen.
3. The type decides who reads it. `ToolError` is text for the model. `InfrastructureError` is recorded on the
   trajectory. `UsageError` and `TrainingError` stop the run and are printed to the user without a traceback.
4. Infrastructure outcomes never train and never count as reward 0: such an episode is retried, then left out of
   its group's statistics. A reward of `None` is not 0.

Every message says what, got, expected and the next step.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import ClassVar


class Outcome(enum.StrEnum):
    """How an episode ended. Every trajectory has exactly one."""

    FINISHED = "finished"
    """The environment ended the episode."""
    TRUNCATED_TURNS = "truncated_turns"
    """The turn budget (the agent's or the environment's own step limit) ran out."""
    TRUNCATED_TOKENS = "truncated_tokens"
    """The token budget of the trajectory ran out."""
    TRUNCATED_TIME = "truncated_time"
    """The episode's own time budget, a rule of the task, ran out."""
    STOPPED_BY_TOOL = "stopped_by_tool"
    """A tool that ends the episode was called."""
    POLICY_ERROR = "policy_error"
    """The policy's output could not be used too often."""
    ENVIRONMENT_ERROR = "environment_error"
    ENGINE_ERROR = "engine_error"
    SANDBOX_ERROR = "sandbox_error"
    CANCELLED = "cancelled"
    """The run stopped it: shutdown, or the trajectory grew too stale."""

    @property
    def is_infrastructure(self) -> bool:
        """The machinery failed or stopped the episode; the policy is not to blame and must not learn from it."""
        return self in _INFRASTRUCTURE

    @property
    def is_truncated(self) -> bool:
        """A budget ran out before the environment ended the episode."""
        return self in _TRUNCATED

    @property
    def is_trainable(self) -> bool:
        """The episode has a reward that says something about the policy."""
        return not self.is_infrastructure

    @property
    def is_retryable(self) -> bool:
        """The same task may be tried again: the machinery failed, and nobody asked for the episode to end."""
        return self.is_infrastructure and self is not Outcome.CANCELLED


_TRUNCATED = frozenset({Outcome.TRUNCATED_TURNS, Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_TIME})
_INFRASTRUCTURE = frozenset({Outcome.ENVIRONMENT_ERROR, Outcome.ENGINE_ERROR, Outcome.SANDBOX_ERROR, Outcome.CANCELLED})


class AgentRLError(Exception):
    """Base of all errors that agentrl raises on purpose.

    Args:
        what: What went wrong, and where.
        got: The value that was found.
        expected: What would have been right.
        hint: The next step for the reader.
    """

    def __init__(self, what: str, *, got: object = None, expected: object = None, hint: str | None = None) -> None:
        self.what, self.got, self.expected, self.hint = what, got, expected, hint
        message = what
        if got is not None:
            message += f": got {got}"
        if expected is not None:
            message += f", expected {expected}"
        if hint is not None:
            is_word = hint.partition(" ")[0].isalpha()  # and not a path, an address or a key
            message += f". {hint[:1].upper() if is_word else hint[:1]}{hint[1:]}"
        super().__init__(message)


class UsageError(AgentRLError):
    """The user must change something (a config, a name, a file) before this can run."""


class ConfigError(UsageError):
    """A config key or value is wrong, unknown, or would be ignored by the chosen parts."""


class UnknownNameError(UsageError):
    """A name is not in the registry; the message carries the nearest ones."""


class TemplateError(UsageError):
    """A chat template cannot be rendered turn by turn (it rewrites history, or has no known turn boundary)."""


class TrainingError(AgentRLError):
    """Training cannot go on: non-finite numbers, a failed weight sync, nothing left to train on."""


class LedgerError(AgentRLError):
    """The tokens sent to the engine are not the ledger's prefix. Never patched over."""

    outcome: ClassVar[Outcome] = Outcome.ENGINE_ERROR


class PolicyError(AgentRLError):
    """The policy's output cannot be used; the message is text for the model."""

    outcome: ClassVar[Outcome] = Outcome.POLICY_ERROR


class ToolError(AgentRLError):
    """A tool's failure that the model should read and act on."""


class InfrastructureError(AgentRLError):
    """The machinery failed. Subclasses say which part, through `outcome`."""

    outcome: ClassVar[Outcome]


class EngineError(InfrastructureError):
    """A policy engine failed, was lost, or missed its deadline."""

    outcome = Outcome.ENGINE_ERROR


class EnvironmentFailure(InfrastructureError):
    """An environment or a scorer raised, hung, or returned what is not allowed."""

    outcome = Outcome.ENVIRONMENT_ERROR


class SandboxError(InfrastructureError):
    """A sandbox could not start, or died."""

    outcome = Outcome.SANDBOX_ERROR


@contextmanager
def boundary(kind: type[InfrastructureError], what: str) -> Iterator[None]:
    """Classify whatever the enclosed code raises as `kind`, once; agentrl's own errors pass unchanged.

    Args:
        kind: The error type of this boundary.
        what: What was being done, for the message: ``"step of household (task 17, turn 6)"``.

    Raises:
        InfrastructureError: of type `kind`, with the original exception as its cause.
    """
    try:
        yield
    except AgentRLError:
        raise
    except Exception as error:
        raise _failure(kind, what, error) from error


def async_boundary(kind: type[InfrastructureError], what: str, *, deadline_s: float | None) -> _AsyncBoundary:
    """`boundary` for code that awaits, with a deadline in seconds (``None``: the caller bounds the wait).

    Raises:
        InfrastructureError: of type `kind`; a missed deadline is one too and says how long it waited.
    """
    return _AsyncBoundary(kind, what, deadline_s)


class _AsyncBoundary:
    """A class where a generator would do: every turn passes several."""

    __slots__ = ("_deadline_s", "_kind", "_scope", "_what")

    def __init__(self, kind: type[InfrastructureError], what: str, deadline_s: float | None) -> None:
        self._kind, self._what, self._deadline_s = kind, what, deadline_s
        self._scope = asyncio.timeout(deadline_s)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(error_type, error, trace)
        except TimeoutError as late:
            got = f"no answer in {self._deadline_s:g} s"
            raise self._kind(f"{self._what} missed its deadline", got=got) from late
        if isinstance(error, Exception) and not isinstance(error, AgentRLError):
            raise _failure(self._kind, self._what, error) from error


def _failure(kind: type[InfrastructureError], what: str, error: Exception) -> InfrastructureError:
    return kind(f"{what} failed", got=f"{type(error).__name__}: {error}")
