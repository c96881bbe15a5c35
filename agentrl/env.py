"""The contract of an environment: a world with a task, in text (and images).

An environment is a plain `gymnasium.Env`, or an `AsyncEnv` with the same five-tuple. Observations are text or message
content; an action is the text of one model turn (the agent loop has already cut it out of the answer). What more it
may offer is found by name, never required:

==================== =====================================================================================
``state_key()``      key of the *full* state (observations may hide some): step groups, snapshots
``snapshot()``       the state as plain data; ``restore(data)`` puts it back
``expert()``         an `Expert` that solves the task through the public text interface
``admissible_actions()``  the actions that the world accepts now, as a list of texts; computed when asked for
``tools``            tools bound to this episode (a list of `agentrl.tool.Tool`)
``tool_message(action)``  with tools of its own: the assistant message that takes a text action by calling them
``action_hint``      one line for the model: what an action looks like
``web_page()``       the observation as a page of HTML, for a person: an element's ``data-action`` is taken when it is
                     clicked, with "{}" replaced by what was typed
==================== =====================================================================================

The final ``info`` may hold ``success`` (bool) and ``task_type`` (str); each step's may hold ``valid`` (bool, whether
the action was understood) and ``reward_components`` (numbers by name); that of `reset` ``goal`` (str, what loops repeat
where the first observation is out of sight; empty when every observation says enough).

Several players: ``info["players"]`` of `reset` lists their names, in their order. Each info then says in ``player`` who
acts next, and the observation is what this player reads. A step's ``rewards`` holds what single players got, by name;
its reward is everybody's.

Some of the players may be roles that the runtime plays for the environment, such as a simulated user: those that
`EnvironmentSpec.roles_of` names. Agents then see nothing of them but what the environment tells. The info of `reset`
holds in ``instructions``, by name, what such a role has to know, and nobody else reads. See docs/roles.md.
"""

from __future__ import annotations

import enum
import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from agentrl.message import Content
from agentrl.registry import Extra
from agentrl.task import TaskSource

if TYPE_CHECKING:
    import gymnasium

T = TypeVar("T")


class AsyncEnv(ABC):
    """An environment whose steps await something (a service, a sandbox). Same meaning as `gymnasium.Env`."""

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
        """Release everything. Called once, whatever happened before."""
        return


AnyEnv: TypeAlias = "gymnasium.Env[Any, Any] | AsyncEnv"


def optional_part(env: AnyEnv, name: str) -> Any:
    """Find an optional attribute of an environment through its wrappers; ``None`` where there is none."""
    find = getattr(env, "get_wrapper_attr", None)
    try:
        return getattr(env, name) if find is None else find(name)
    except AttributeError:
        return None


async def maybe_await(value: T | Awaitable[T]) -> T:
    """Return the result of an environment's method, awaited if the method is a coroutine."""
    return await value if inspect.isawaitable(value) else value


class Expert(Protocol):
    """A scripted policy: an upper bound, and the source of warm starts."""

    def act(self, observation: Content) -> str:
        """The next action, given the observation that followed the last one."""


class FallibleExpert(Expert, Protocol):
    """An expert that can also show how to go on after a mistake. `agentrl sft` asks it when `sft.mistakes` is set."""

    def mistake(self, rng: random.Random) -> str | None:
        """A mistake in place of the action that `act` returned last, which is then taken one step later.

        Args:
            rng: Draws among mistakes.

        Returns:
            An action that a beginner might take now and that changes nothing; ``None`` where there is none.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAction:
    """Action of an expert, good or deliberately bad."""

    text: str
    is_mistake: bool = False
    """Shown so that the recovery can be learned; carries no loss itself."""


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
        """The episode is over."""
        return self.terminated or self.truncated


class Isolation(enum.StrEnum):
    """Place where an environment's blocking code runs."""

    INLINE = "inline"
    """In the event loop: for simulators whose steps take well under a millisecond, and for an `AsyncEnv`."""
    THREAD = "thread"
    PROCESS = "process"
    """In a worker process; a crash costs its own episodes only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """Description of an environment: its factory, tasks and limits. A catalogue entry is one of these."""

    name: str
    """Registry name, as in ``--env name/split``."""
    make: Callable[..., AnyEnv]
    """Called with `options` from the config as keyword arguments; importable by name, for worker processes."""
    tasks: Callable[..., TaskSource]
    """Called with the split's name, and `options` as keyword arguments."""
    splits: tuple[str, ...] = ("train", "valid", "test")
    description: str = ""
    """One paragraph for `agentrl env show`."""
    instructions: str = ""
    """The system prompt's part about the world: what the agent can do, in the text-action protocol."""
    tool_instructions: str = ""
    """The same for an agent that calls the environment's own tools; `instructions` when empty."""
    answer_format: str = ""
    """The ``format`` of text loops where the config names none: ``free`` where `instructions` say how to answer."""
    max_turns: int | None = None
    """The environment's own step limit, which its option ``max_steps`` replaces where it has one; the agent's turn
    budget may be smaller."""
    reward_range: tuple[float, float] = (float("-inf"), float("inf"))
    """Least and greatest return of an episode."""
    success_threshold: float | None = None
    """An episode whose final info has no ``success`` counts as solved from this return on."""
    isolation: Isolation = Isolation.THREAD
    isolation_of: Callable[..., Isolation] | None = None
    """Where the code runs under `options`, for an environment of several engines; `isolation` when left out."""
    images_of: Callable[..., bool] | None = None
    """Whether observations hold images under `options`; left out, they hold none."""
    roles_of: Callable[..., Sequence[str]] | None = None
    """The players that the runtime plays for the environment under `options`, such as a simulated user; none when left
    out."""
    options: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    """Success of the ``random`` and ``expert`` policies, and of ``blind`` play: the best sequence of actions that is
    chosen without reading any observation. Tests assert them."""
    version: int = 0
    """Raised when the default tasks, options or rewards change: results of two versions cannot be compared."""
    extra: Extra | None = None
    """What must be installed to make it; listing and describing it need nothing."""

    def turns_under(self, options: Mapping[str, Any]) -> int | None:
        """Return the environment's own step limit under options, which are put over the spec's own."""
        told = {**self.options, **options}.get("max_steps")
        return told if self.max_turns is not None and isinstance(told, int) else self.max_turns

    def isolation_under(self, options: Mapping[str, Any]) -> Isolation:
        """Return where the code runs under options, which are put over the spec's own."""
        return self.isolation if self.isolation_of is None else self.isolation_of(**{**self.options, **options})

    def roles_under(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the roles that the runtime plays under options, which are put over the spec's own."""
        return () if self.roles_of is None else tuple(self.roles_of(**{**self.options, **options}))

    def shows_images(self, options: Mapping[str, Any]) -> bool:
        """Return whether observations hold images under options, which are put over the spec's own."""
        return self.images_of is not None and self.images_of(**{**self.options, **options})
