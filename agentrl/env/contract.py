"""Contract of an environment with observations and actions in text (and images).

An environment is a plain `gymnasium.Env`, or an `AsyncEnv` with the same five-tuple. Observations are text or message
content; an action is the text of one model turn (the agent loop has already extracted it from the answer). Optional
parts are found by name:

- ``state_key()``: key of the *full* state (observations may hide some of it), for step groups and snapshots.
- ``snapshot()``: the state as plain data; ``restore(data)`` restores it.
- ``expert()``: an `Expert` that solves the task through the public text interface.
- ``admissible_actions()``: list of the actions that are accepted now, as texts; computed on request.
- ``tools``: tools bound to this episode (a list of `agentrl.tool.Tool`).
- ``tool_message(action)``: if it has tools, the assistant message that takes a text action by calling them.
- ``action_hint``: one line for the model that describes an action.
- ``final_reward()``: reward for the state that an unfinished episode leaves, as a number, or as a number and an info
  with ``success`` and ``reward_components``. Called once, after the last action, if a limit of the run (turns, tokens,
  time), a tool of the run or the agent loop ended the episode before the environment did.
- ``web_page()``: the observation as an HTML page for manual play: a click on an element takes its ``data-action``, with
  "{}" replaced by the typed text.

The final ``info`` may hold ``success`` (bool) and ``task_type`` (str); each step's may hold ``valid`` (bool, False if
the action was not understood) and ``reward_components`` (numbers by name); that of `reset` may hold ``goal`` (str,
which loops repeat when the first observation has left the context; empty if every observation is sufficient).

Several players: ``info["players"]`` of `reset` lists their names, in their order. The ``player`` of each info is the
player that acts next and reads the observation. A step's ``rewards`` holds rewards of single players, by name; its
reward counts for all players.

An episode may propose tasks for later episodes: ``proposals`` in an info is a list of objects in JSON types, which the
environment's task source reads if it is an `agentrl.task.ProposedTasks`.

Some of the players may be roles that the runtime plays for the environment, such as a simulated user: those named by
`EnvironmentSpec.roles_of`. Agents see only the parts that the environment shows. ``instructions`` in the info of
`reset` maps such roles to information for them alone. See docs/roles.md.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import random
import shlex
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from agentrl.errors import ConfigError
from agentrl.message import Content
from agentrl.registry import Extra
from agentrl.task import TaskSource

if TYPE_CHECKING:
    import gymnasium

T = TypeVar("T")
AnyEnv: TypeAlias = "gymnasium.Env[Any, Any] | AsyncEnv"
"""Environment of either kind."""


class AsyncEnv(ABC):
    """Environment with asynchronous steps, such as a service or a sandbox; otherwise like `gymnasium.Env`."""

    action_hint: str = ""

    @abstractmethod
    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Start an episode; the same seed and options give the same episode."""

    @abstractmethod
    async def step(self, action: str) -> tuple[Content, float, bool, bool, dict[str, Any]]:
        """Take one action: observation, reward, terminated, truncated, info."""

    async def close(self) -> None:
        """Release all resources. Always called once."""
        return


def optional_part(env: AnyEnv, name: str) -> Any:
    """Return an optional attribute of an environment, through its wrappers; ``None`` if it has none."""
    find = getattr(env, "get_wrapper_attr", None)
    try:
        return getattr(env, name) if find is None else find(name)
    except AttributeError:
        return None


async def maybe_await(value: T | Awaitable[T]) -> T:
    """Return the result of an environment's method, awaited if the method is a coroutine."""
    return await value if inspect.isawaitable(value) else value


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends, because all methods that it awaits are synchronous."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return cast("T", stop.value)
    coroutine.close()
    raise RuntimeError("a method without async returned an awaitable: define it with async def")


class Expert(Protocol):
    """Scripted policy: an upper bound, and the source of demonstrations for warm starts."""

    def act(self, observation: Content) -> str:
        """Return the next action, given the observation after the last one."""


class FallibleExpert(Expert, Protocol):
    """Expert that can also make mistakes and recover from them; `agentrl sft` uses it if `sft.mistakes` is set."""

    def mistake(self, rng: random.Random) -> str | None:
        """Return a mistake to make before the latest action of `act`.

        Args:
            rng: Random numbers for the choice of the mistake.

        Returns:
            An action that a beginner might take now and that changes nothing; ``None`` if there is none.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAction:
    """Action of an expert, possibly a deliberate mistake."""

    text: str
    is_mistake: bool = False
    """True for a mistake, which has no loss; only the recovery from it is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step."""

    observation: Content
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]

    @property
    def done(self) -> bool:
        """True if the episode is over."""
        return self.terminated or self.truncated


class Isolation(enum.StrEnum):
    """Isolation of an environment's blocking code."""

    INLINE = "inline"
    """In the event loop: for simulators whose steps take well under a millisecond, and for an `AsyncEnv`."""
    THREAD = "thread"
    PROCESS = "process"
    """In a worker process; a crash affects only its own episodes."""


class Instructions(NamedTuple):
    """Parts of the system prompt about an environment, for certain options of it."""

    text: str
    """For agents that write actions as text."""
    tools: str = ""
    """For agents that call the environment's tools; `text` if empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """Description of an environment: its factory, tasks and limits. A catalogue entry is one of these."""

    name: str
    """Registry name, as in ``--env name/split``."""
    make: Callable[..., AnyEnv]
    """Factory, called with the config's `options` as keyword arguments; importable by name, for worker processes."""
    tasks: Callable[..., TaskSource]
    """Factory of the task source, called with the split's name, and `options` as keyword arguments."""
    splits: tuple[str, ...] = ("train", "valid", "test")
    splits_of: Callable[..., Sequence[str]] | None = None
    """Returns the splits for `options`, for an environment whose data may have only some; default: `splits`."""
    description: str = ""
    """One paragraph for `agentrl env show`."""
    instructions: str = ""
    """Part of the system prompt about the environment and its actions, in the text-action protocol."""
    tool_instructions: str = ""
    """Part of the system prompt for an agent that calls the environment's tools; `instructions` if empty."""
    answer_format: str = ""
    """Default ``format`` of text loops: ``free`` if `instructions` specify the format of answers."""
    max_turns: int | None = None
    """Step limit of the environment, which its option ``max_steps``, if any, overrides; the agent's turn budget may be
    smaller."""
    reward_range: tuple[float, float] = (float("-inf"), float("inf"))
    """Minimum and maximum return of an episode."""
    success_threshold: float | None = None
    """Minimum return of a solved episode, if the final info has no ``success``."""
    isolation: Isolation = Isolation.THREAD
    isolation_of: Callable[..., Isolation] | None = None
    """Returns the isolation for `options`, for an environment with several engines; default: `isolation`."""
    images_of: Callable[..., bool] | None = None
    """Returns True if observations contain images for `options`; default: they do not."""
    roles_of: Callable[..., Sequence[str]] | None = None
    """Returns the players that the runtime plays for the environment, for `options`, such as a simulated user; default:
    none."""
    instructions_of: Callable[..., Instructions | None] | None = None
    """Returns the instructions for `options`, for an environment whose options change its rules; ``None``, and by
    default: `instructions` and `tool_instructions`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    reset_columns: bool = False
    """True if columns of a task file that are not fields of `Task` are options of `reset`, as in TRL's data sets."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Success rates of the ``random`` and ``expert`` policies, and of ``blind`` play: the best sequence of actions
    chosen without reading observations. Tests assert them."""
    version: int = 0
    """Version of the default tasks, options and rewards; results of different versions cannot be compared."""
    extra: Extra | None = None
    """Extra that is required to create the environment, but not to list or describe it."""

    def make_under(self, options: Mapping[str, Any]) -> AnyEnv:
        """Create an environment with options, which override the spec's.

        Raises:
            ConfigError: its constructor does not accept them.
        """
        return self._call(self.make, options)

    def tasks_under(self, split: str, options: Mapping[str, Any]) -> TaskSource:
        """Return the tasks of a split for options, which override the spec's.

        Raises:
            ConfigError: the task source does not accept them.
        """
        return self._call(self.tasks, options, split)

    def _call(self, function: Callable[..., T], options: Mapping[str, Any], *arguments: Any) -> T:
        try:
            return function(*arguments, **{**self.options, **options})
        except (TypeError, ValueError) as error:
            given = [f"{name}={value}" for name, value in options.items() if self.options.get(name, ...) != value]
            if not given:
                raise
            raise ConfigError(
                f"environment {self.name} does not accept its options",
                got=f"{', '.join(given)}: {error}",
                expected=f"options such as {', '.join(self.options)}"
                if self.options
                else "arguments of its constructor",
                hint=f"run: agentrl env show {shlex.quote(self.name)}",
            ) from error

    def splits_under(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the splits that have tasks for options, which override the spec's."""
        return self.splits if self.splits_of is None else tuple(self._call(self.splits_of, options))

    def turns_under(self, options: Mapping[str, Any]) -> int | None:
        """Return the environment's step limit for options, which override the spec's."""
        limit = {**self.options, **options}.get("max_steps")
        return limit if self.max_turns is not None and isinstance(limit, int) else self.max_turns

    def isolation_under(self, options: Mapping[str, Any]) -> Isolation:
        """Return the isolation for options, which override the spec's."""
        return self.isolation if self.isolation_of is None else self._call(self.isolation_of, options)

    def roles_under(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the roles that the runtime plays for options, which override the spec's."""
        return () if self.roles_of is None else tuple(self._call(self.roles_of, options))

    def with_instructions_under(self, options: Mapping[str, Any]) -> EnvironmentSpec:
        """Return the spec with the instructions for options, which override the spec's."""
        told = None if self.instructions_of is None else self._call(self.instructions_of, options)
        return self if told is None else dataclasses.replace(self, instructions=told.text, tool_instructions=told.tools)

    def shows_images(self, options: Mapping[str, Any]) -> bool:
        """Return True if observations contain images for options, which override the spec's."""
        return self.images_of is not None and self._call(self.images_of, options)
