"""The failure model: four rules, one enum, one flat tree of exceptions.

1. A bad episode is data, not a crash. It ends with one `Outcome`; the other episodes and the run continue.
2. `boundary` classifies an error once, where it crosses a boundary (engine, environment, tool, sandbox, scorer). Inside
   a boundary, code may raise anything; outside, only the types below occur.
3. The type determines the reader. `ToolError` is text for the model. `InfrastructureError` is recorded on the
   trajectory. `UsageError` and `TrainingError` stop the run and are printed to the user without a traceback.
4. Infrastructure outcomes are never trained on and never count as reward 0: such an episode is retried, then excluded
   from its group's statistics. A reward of `None` is not 0.

Every message states what went wrong, what it got, what it expected, and the next step.
"""

from __future__ import annotations

import asyncio
import difflib
import enum
import linecache
import math
import numbers
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, TypeAlias, TypeGuard

RunningTask: TypeAlias = "asyncio.Task[Any] | None"

MAX_REWARD = 1e12
"""Maximum magnitude of a reward: sums and squares of rewards stay finite in float32."""
A_REWARD = "a finite number between -1e12 and 1e12"
MAX_REASON_CHARS = 2000
"""Maximum number of characters from the text of user code's exceptions."""


class Outcome(enum.StrEnum):
    """Ways in which an episode ends. Every trajectory has exactly one outcome."""

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
    """The policy's output was unusable too often."""
    ENVIRONMENT_ERROR = "environment_error"
    ENGINE_ERROR = "engine_error"
    SANDBOX_ERROR = "sandbox_error"
    REWARD_ERROR = "reward_error"
    """A reward function or another scorer failed, not the environment."""
    CANCELLED = "cancelled"
    """The run was stopped during the episode, or a session of live traffic got no feedback."""

    @property
    def is_infrastructure(self) -> bool:
        """True if the infrastructure failed or stopped the episode, so that the policy must not learn from it."""
        return self in _INFRASTRUCTURE

    @property
    def is_truncated(self) -> bool:
        """True if a budget ran out before the environment ended the episode."""
        return self in _TRUNCATED

    @property
    def is_trainable(self) -> bool:
        """True if the episode's reward depends on the policy."""
        return not self.is_infrastructure

    @property
    def is_retryable(self) -> bool:
        """True if the task may be retried: infrastructure failed, and the episode was not cancelled."""
        return self.is_infrastructure and self is not Outcome.CANCELLED


_TRUNCATED = frozenset({Outcome.TRUNCATED_TURNS, Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_TIME})
_INFRASTRUCTURE = frozenset(
    {Outcome.ENVIRONMENT_ERROR, Outcome.ENGINE_ERROR, Outcome.SANDBOX_ERROR, Outcome.REWARD_ERROR, Outcome.CANCELLED}
)


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of a file."""

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file} line {self.line}"


class AgentRLError(Exception):
    """Base class of all errors that agentrl raises deliberately.

    Args:
        what: Description and location of the error.
        got: Value that was found.
        expected: Valid values.
        hint: Next step for the reader.
    """

    subject: str | None = None
    """Name of the code that failed, the same for all episodes: ``reward function exact``."""
    location: SourceLocation | None = None
    """Line at which the subject's code failed."""

    def __init__(self, what: str, *, got: object = None, expected: object = None, hint: str | None = None) -> None:
        self.what, self.got, self.expected = what, got, expected
        message = what
        if got is not None:
            message += f": got {got}"
        if expected is not None:
            message += f", expected {expected}"
        super().__init__(message)
        self.hint: str | None = None
        if hint is not None:
            self.add_hint(hint)

    def add_hint(self, hint: str) -> None:
        """Add the next step to an error that has none; for callers that know more than the raising code."""
        if self.hint is None:
            is_word = hint.partition(" ")[0].isalpha()  # not a path, an address or a key
            self.hint = hint
            self.args = (f"{self.args[0]}. {hint[:1].upper() if is_word else hint[:1]}{hint[1:]}",)

    @property
    def reason(self) -> str:
        """The value that was found and, if known, what was expected; without these, what went wrong.

        >>> AgentRLError("it failed", got="KeyError: 3").reason, AgentRLError("it failed", got=3, expected=4).reason
        ('KeyError: 3', 'got 3, expected 4')
        """
        if self.got is None:
            return self.what
        return str(self.got) if self.expected is None else f"got {self.got}, expected {self.expected}"


class UsageError(AgentRLError):
    """An error that the user must fix (in a config, a name, a file)."""


class ConfigError(UsageError):
    """A config key or value that is wrong, unknown, or would be ignored by the chosen parts."""


class UnknownNameError(UsageError):
    """A name that is not in the registry; the message contains the nearest ones."""


class TemplateError(UsageError):
    """A chat template that cannot be rendered turn by turn (it rewrites history, or has no known turn boundary)."""


class TrainingError(AgentRLError):
    """An error after which training cannot continue: non-finite numbers, a failed weight sync, no data left."""


class RankLost(TrainingError):
    """The loss of a rank's process or node, after which a run restarts from its newest checkpoint."""


class ResumableError(TrainingError):
    """An error that ends the run with a checkpoint: it can be resumed when the cause is gone."""


class BudgetSpent(ResumableError):
    """A spent budget of the run, which can be resumed with a larger budget."""


class ServersLost(ResumableError):
    """The loss of all inference servers, which did not return in time."""


class LedgerError(AgentRLError):
    """A difference between the tokens sent to the engine and the ledger's prefix; never corrected silently."""

    outcome: ClassVar[Outcome] = Outcome.ENGINE_ERROR


class PolicyError(AgentRLError):
    """Output of the policy that cannot be used; the message is text for the model."""

    outcome: ClassVar[Outcome] = Outcome.POLICY_ERROR


class ToolError(AgentRLError):
    """A tool's failure that the model should read and act on."""


class InfrastructureError(AgentRLError):
    """An infrastructure failure; the `outcome` of the subclass identifies the part."""

    outcome: ClassVar[Outcome]


class EngineError(InfrastructureError):
    """Failure of a policy engine, which raised, was lost, or missed its deadline."""

    outcome = Outcome.ENGINE_ERROR


class EnvironmentFailure(InfrastructureError):
    """Failure of an environment, which raised, hung, or returned an invalid value."""

    outcome = Outcome.ENVIRONMENT_ERROR


class RewardFailure(EnvironmentFailure):
    """Failure of a scorer other than the environment, which raised, hung, or returned an invalid value."""

    outcome = Outcome.REWARD_ERROR


class SandboxError(InfrastructureError):
    """Failure of a sandbox, which could not start, or died."""

    outcome = Outcome.SANDBOX_ERROR


class CtrlC(KeyboardInterrupt):
    """The user's interruption, raised in code that blocks the event loop of a run."""


@contextmanager
def boundary(kind: type[InfrastructureError], what: str) -> Iterator[None]:
    """Classify every exception of the enclosed code as `kind`, once; agentrl's own errors pass unchanged.

    A cancellation of the running task and Ctrl-C also pass (see `is_addressed_to`); ``SystemExit``, a
    ``CancelledError`` of another task and the like are failures of the enclosed code. The enclosed code must not await.

    Args:
        kind: Error type of this boundary.
        what: Description of the operation, for the message: ``"step of household (task 17, turn 6)"``.

    Raises:
        InfrastructureError: of type `kind`, with the original exception as its cause.
    """
    task = running_task()
    try:
        yield
    except AgentRLError:
        raise
    except BaseException as error:
        if is_addressed_to(task, error):
            raise
        raise failure_of(kind, what, error) from error


def is_addressed_to(task: RunningTask, error: BaseException) -> bool:
    """Return True if an exception from user code is meant for `task`, and is not an error of that code.

    These are the cancellation of `task` (``None`` in a thread without an event loop), Ctrl-C, and the end of a
    coroutine that is closed from outside. Other exceptions that are not an `Exception` (``sys.exit()``, the
    cancellation of a task that the code itself started) are errors of that code.
    """
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    if isinstance(error, KeyboardInterrupt):
        return _is_ctrl_c(error)
    return isinstance(error, GeneratorExit) and task is not None and running_task() is not task


def running_task() -> RunningTask:
    """Return the current task; ``None`` outside an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _is_ctrl_c(error: KeyboardInterrupt) -> bool:
    """Return True if a signal handler raised the exception. Only the main thread runs signal handlers."""
    if isinstance(error, CtrlC):
        return True
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True  # this handler leaves no trace
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == asyncio.runners.__name__


def is_bool(value: object) -> TypeGuard[bool]:
    """Return True for a bool of Python or NumPy; Python does not count the latter as a number."""
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")


def is_number(value: object) -> bool:
    """Return True for a real number, a bool, or an object that `float` may convert, such as a `Decimal` or an array."""
    return isinstance(value, numbers.Real) or is_bool(value) or hasattr(type(value), "__float__")


def bounded_reward(value: Any) -> float | None:
    """Convert a reward, or a component of one, to a float; return ``None`` for an invalid one.

    Valid are real numbers of any type that are finite and at most `MAX_REWARD` in magnitude, and arrays and tensors
    with one such element.

    >>> bounded_reward(2), bounded_reward(True), bounded_reward(1e308), bounded_reward(10**400), bounded_reward(2j)
    (2.0, 1.0, None, None, None)
    """
    if not is_number(value):
        return None
    item = None if isinstance(value, numbers.Real) else getattr(value, "item", None)
    try:
        plain = item() if callable(item) else value
        number = math.nan if isinstance(plain, str | bytes) else float(plain)
    except (ArithmeticError, ValueError, RuntimeError, TypeError):  # too large, several elements, a complex number
        return None
    return number if abs(number) <= MAX_REWARD else None


def shorten(value: object, characters: int = 80) -> str:
    """Return a bounded representation of a user's value, for an error message.

    >>> shorten(10**5000)[:12], shorten("x" * 100, 6)
    ('an int of 16', "'xxxxx…")
    """
    if isinstance(value, int) and abs(value) > 10**characters:
        return f"an int of {value.bit_length()} bits"
    text = repr(value[: characters + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= characters else f"{text[:characters]}…"


def did_you_mean(name: object, known: Iterable[str]) -> str | None:
    """Return an error's hint with the nearest known name; ``None`` if no name is similar.

    >>> did_you_mean("GRPO", ["gae", "grpo"]), did_you_mean("x", ["grpo"])
    ("did you mean 'grpo'?", None)
    """
    names = {one.lower(): one for one in known}
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    return f"did you mean {names[near[0]]!r}?" if near else None


_ADVICE = {
    "only works in main thread": "this code runs in a thread: use a timeout without signals, or, for an environment, "
    "environment.isolation=process",
    "There is no current event loop in thread": "this code runs in a thread without an event loop: use asyncio.run()",
    "cannot be called from a running event loop": "use await in an async function, or, for an environment, "
    "environment.isolation=thread",
}
"""Next steps for errors that depend on where agentrl runs the user's code, by a part of their text."""


def described_error(error: BaseException) -> str:
    """Return the type and text of an exception from user code, whose text may be long or may itself fail."""
    error = _as_raised(error)
    try:
        text = str(error)
    except BaseException as failed:
        text = f"(its text cannot be read: {type(failed).__name__})"
    advice = next((f" ({advice})" for part, advice in _ADVICE.items() if part in text), "")
    return f"{type(error).__name__}: {text[:MAX_REASON_CHARS]}{advice}" if text else type(error).__name__


def _as_raised(error: BaseException) -> BaseException:
    """Return the ``StopIteration`` (of ``next()``, for example) that Python replaced when it left a coroutine."""
    cause = error.__cause__
    if type(error) is RuntimeError and isinstance(cause, StopIteration | StopAsyncIteration):
        return cause if "raised Stop" in str(error) else error
    return error


def raised_in(error: BaseException, file: str | None = None) -> str | None:
    """Describe the line that raised an exception; with `file`, the line in that file, or ``None`` if there is none."""
    location = raised_at(error, file)
    return None if location is None else f"it was raised in {location}: {location.code}"


def raised_at(error: BaseException, file: str | None = None) -> SourceLocation | None:
    """Return the line that raised an exception; with `file`, the line in that file, or ``None`` if there is none."""
    place: TracebackType | None = None
    entry = _as_raised(error).__traceback__
    while entry is not None:
        if file in (None, entry.tb_frame.f_code.co_filename):
            place = entry
        entry = entry.tb_next
    if place is None:
        return None
    name, line = place.tb_frame.f_code.co_filename, place.tb_lineno or 0
    linecache.checkcache(name)
    return SourceLocation(name, line, linecache.getline(name, line, place.tb_frame.f_globals).strip())


def with_location(name: str, location: SourceLocation | None) -> str:
    """Add the file and line to a name, where they are known: ``reward function exact (my.py line 3)``."""
    return name if location is None else f"{name} ({location})"


class WrongReturnValue(ValueError):
    """Invalid value that user code returned. The line that raised it only noticed it, so failures do not name it."""


def failure_of(kind: type[InfrastructureError], what: str, error: BaseException) -> AgentRLError:
    """Convert an exception of user code to a failure of type `kind`; return an `AgentRLError` unchanged."""
    if isinstance(error, AgentRLError):
        return error
    if isinstance(error, WrongReturnValue):
        failure = kind(f"{what} failed: {error}")
        failure.got, failure.__cause__ = str(error), error
        return failure
    where = raised_in(error) if issubclass(kind, EnvironmentFailure) else None
    failure = kind(f"{what} failed", got=described_error(error), hint=where)
    failure.location = raised_at(error) if where else None
    failure.__cause__ = error
    return failure
