"""Table of the methods that a run can call on an environment.

Each `EnvMethod` names the part of the contract (`agentrl.env`) that it needs, the arguments of a request and the JSON
form of its result. All layers between an episode and an environment use this table:

- `agentrl.rollout.env_pool.EnvHandle.call` takes an entry, which types the arguments and the result;
- `agentrl.rollout.env_workers.EnvAdapter` calls its own method of this name or else the environment's;
- an environment server executes the entries with `is_served`, and lists the parts of its environment;
- `agentrl.remote.client.RemoteEnvironment` has the parts that its server lists.

To add an optional method of environments, add an entry with its name as `part`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

from agentrl.env import ExpertAction, StepResult
from agentrl.errors import UsageError
from agentrl.message import Content, Message
from agentrl.remote.wire import (
    MAX_CALL_BYTES,
    MAX_REQUEST_BYTES,
    Body,
    Refusal,
    RefusalKind,
    field,
    read_content,
    read_message,
    read_tool_result,
    whole_number,
    write_content,
    write_message,
    write_tool_result,
)
from agentrl.tool import ForwardedTool, Tool, ToolDependencies, ToolResult, ToolRules

P = ParamSpec("P")
R = TypeVar("R")
MAX_SEED = 2**128
CallTool: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[ToolResult]]


class RemoteTool(ForwardedTool):
    """Local name and schema of a tool whose function is in a worker process or behind a server.

    Args:
        name: Name that the policy uses.
        schema: Schema from the process that has the function.
        stop: True if a call ends the episode.
        rules: Fields of `ToolRules` that differ from the defaults.
        remote: Function that calls the tool; with ``None``, the receiver of the tool sets it.
    """

    def __init__(
        self,
        name: str,
        schema: dict[str, Any],
        stop: bool = False,
        rules: Mapping[str, Any] = MappingProxyType({}),
        remote: CallTool | None = None,
    ) -> None:
        known = {rule.name for rule in dataclasses.fields(ToolRules)}  # a newer server may send more
        own = {name: value for name, value in rules.items() if name in known} | {"stop": stop}
        super().__init__(name, schema, ToolRules(**own))
        self.remote = remote

    def to_plain(self) -> dict[str, Any]:
        """Return the description as JSON types: keyword arguments of this class."""
        rules = self.rules.non_defaults()
        stop = bool(rules.pop("stop", False))
        return {"name": self.name, "schema": self.schema, "stop": stop, **({"rules": rules} if rules else {})}

    @classmethod
    def describe(cls, tool: Tool) -> RemoteTool:
        """Describe a tool for another process; called in the process that has the tool."""
        rules = {name: value for name, value in tool.rules.non_defaults().items() if name not in ("stop", "inline")}
        return cls(tool.name, tool.schema, tool.stop, rules)

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments unchanged; the process that has the function validates them."""
        return dict(arguments)

    async def open(self, stack: AsyncExitStack, provisions: ToolDependencies | None = None) -> Callable[..., Any]:
        """Do nothing, because the environment owns the function."""
        assert self.remote is not None
        return self.remote

    async def run(self, bound: Callable[..., Any], checked: Mapping[str, Any]) -> ToolResult:
        """Call the function in its process."""
        result: ToolResult = await bound(self.name, checked)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetResult:
    """First observation of an episode, and the tools and hint of the environment."""

    observation: Content
    info: Mapping[str, Any]
    state_key: str | None
    action_hint: str
    tools: tuple[Tool, ...]
    """Tools bound to this episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReply:
    """Result of a step and the key of the resulting state."""

    result: StepResult
    state_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalReward:
    """Reward for the state that an unfinished episode leaves."""

    reward: float
    info: Mapping[str, Any]


def restore_generator(state: Sequence[Any]) -> random.Random:
    """Make a random generator from its state in JSON types.

    Raises:
        TypeError, ValueError, OverflowError: the state is invalid.
    """
    version, numbers, gauss = state
    generator = random.Random()
    generator.setstate((version, tuple(numbers), gauss))
    return generator


def identity(value: Any) -> Any:
    """Return a JSON value unchanged."""
    return value


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a method in a request."""

    name: str
    read: Callable[[Body, str], Any]
    """Function that reads the argument from a request; raises `Refusal` if it is missing or has another type."""
    write: Callable[[Any], Any] = identity
    is_large: bool = False
    """True for a snapshot or an observation: the request may have `MAX_REQUEST_BYTES` bytes."""


def _text(body: Body, name: str) -> str:
    return field(body, name, str)


def _mapping(body: Body, name: str) -> dict[str, Any]:
    return field(body, name, dict)


def _seed(body: Body, name: str) -> int | None:
    return None if body.get(name) is None else whole_number(body, name, least=0, most=MAX_SEED)


def _plain(body: Body, name: str) -> Any:
    return body.get(name)


def _content(body: Body, name: str) -> Content:
    try:
        return read_content(body[name])
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(RefusalKind.REQUEST, f"{name!r} of the request is not an observation: {error!r}") from error


def _generator_state(body: Body, name: str) -> list[Any]:
    state = field(body, name, list)
    try:
        restore_generator(state)
    except (TypeError, ValueError, OverflowError) as error:
        raise Refusal(RefusalKind.REQUEST, f"{name!r} of the request is not a generator state: {error}") from error
    return state


@dataclass(frozen=True, slots=True)
class ResultForm(Generic[R]):
    """JSON representation of a method's result."""

    write: Callable[[R], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], R]


def _field_form(name: str) -> ResultForm[Any]:
    """Make the representation of a JSON value, which is the only field of the answer."""
    return ResultForm(lambda value: {name: value}, lambda answer: answer[name])


def _write_reset(result: ResetResult) -> dict[str, Any]:
    return {
        "observation": write_content(result.observation),
        "info": dict(result.info),
        "state_key": result.state_key,
        "action_hint": result.action_hint,
        "tools": [RemoteTool.describe(tool).to_plain() for tool in result.tools],
    }


def _read_reset(answer: Mapping[str, Any]) -> ResetResult:
    return ResetResult(
        observation=read_content(answer["observation"]),
        info=answer["info"],
        state_key=answer.get("state_key"),
        action_hint=answer["action_hint"],
        tools=tuple(RemoteTool(**tool) for tool in answer["tools"]),
    )


def _write_step(stepped: StepReply) -> dict[str, Any]:
    result = stepped.result
    return {
        "observation": write_content(result.observation),
        "reward": result.reward,
        "terminated": result.terminated,
        "truncated": result.truncated,
        "info": dict(result.info),
        "state_key": stepped.state_key,
    }


def _read_step(answer: Mapping[str, Any]) -> StepReply:
    result = StepResult(
        observation=read_content(answer["observation"]),
        reward=answer["reward"],
        terminated=answer["terminated"],
        truncated=answer["truncated"],
        info=answer["info"],
    )
    return StepReply(result=result, state_key=answer.get("state_key"))


def _write_message(message: Message | None) -> dict[str, Any]:
    if message is None:
        raise UsageError("the environment has no tool_message()")
    return {"message": write_message(message)}


def _write_final_reward(found: FinalReward | None) -> dict[str, Any]:
    return {"reward": None} if found is None else {"reward": found.reward, "info": dict(found.info)}


def _read_final_reward(answer: Mapping[str, Any]) -> FinalReward | None:
    return None if answer["reward"] is None else FinalReward(reward=answer["reward"], info=answer["info"])


_VALUE = _field_form("value")
_STATE_KEY = _field_form("state_key")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnvMethod(Generic[P, R]):
    """One method that a run can call on an environment."""

    name: str
    part: str | None = None
    """Optional attribute of an environment that the method needs; ``None`` if all environments have the method."""
    arguments: tuple[Argument, ...] = ()
    """Arguments in a request; the adapter has defaults for all others."""
    result: ResultForm[R] = _VALUE
    is_served: bool = True
    """True if clients of an environment server may call the method."""

    @property
    def largest_request(self) -> int:
        """Maximum size of a request in bytes."""
        return MAX_REQUEST_BYTES if any(argument.is_large for argument in self.arguments) else MAX_CALL_BYTES

    def write_arguments(self, *values: Any) -> dict[str, Any]:
        """Return the arguments as fields of a request."""
        return {argument.name: argument.write(value) for argument, value in zip(self.arguments, values, strict=True)}

    def read_arguments(self, body: Body) -> list[Any]:
        """Read the arguments from a request.

        Raises:
            Refusal: an argument is missing or has another type.
        """
        return [argument.read(body, argument.name) for argument in self.arguments]


RESET: EnvMethod[[int | None, Mapping[str, Any]], ResetResult] = EnvMethod(
    name="reset",
    arguments=(Argument("seed", _seed), Argument("options", _mapping)),
    result=ResultForm(_write_reset, _read_reset),
)
STEP: EnvMethod[[str], StepReply] = EnvMethod(
    name="step", arguments=(Argument("action", _text),), result=ResultForm(_write_step, _read_step)
)
CALL_TOOL: EnvMethod[[str, Mapping[str, Any]], ToolResult] = EnvMethod(
    name="call_tool",
    part="tools",
    arguments=(Argument("name", _text), Argument("arguments", _mapping, dict)),
    result=ResultForm(write_tool_result, read_tool_result),
)
"""Called only on worker processes and servers; otherwise the run holds the tools itself."""
STATE_KEY: EnvMethod[[], str | None] = EnvMethod(name="state_key", part="state_key", result=_STATE_KEY)
ADMISSIBLE_ACTIONS: EnvMethod[[], list[str] | None] = EnvMethod(name="admissible_actions", part="admissible_actions")
FINAL_REWARD: EnvMethod[[], FinalReward | None] = EnvMethod(
    name="final_reward", part="final_reward", result=ResultForm(_write_final_reward, _read_final_reward)
)
"""Judges the state that an unfinished episode leaves; ``None`` if the environment does not."""
SNAPSHOT: EnvMethod[[], Any] = EnvMethod(name="snapshot", part="snapshot")
RESTORE: EnvMethod[[Any], str | None] = EnvMethod(
    name="restore", part="restore", arguments=(Argument("data", _plain, is_large=True),), result=_STATE_KEY
)
"""Restores a snapshot and returns the key of its state."""
WEB_PAGE: EnvMethod[[], str] = EnvMethod(name="web_page", part="web_page")
TOOL_MESSAGE: EnvMethod[[str], Message | None] = EnvMethod(
    name="tool_message",
    part="tool_message",
    arguments=(Argument("action", _text),),
    result=ResultForm(_write_message, lambda answer: read_message(answer["message"])),
)
EXPERT: EnvMethod[[], bool] = EnvMethod(name="expert", part="expert", result=_field_form("is_fallible"))
"""Makes a new expert; returns True if it can make mistakes."""
EXPERT_ACTION: EnvMethod[..., ExpertAction] = EnvMethod(
    name="expert_action",
    part="expert",
    arguments=(Argument("observation", _content, write_content, is_large=True),),
    result=ResultForm(lambda action: {"action": action.text}, lambda answer: ExpertAction(text=str(answer["action"]))),
)
"""Returns the action of the environment's expert after an observation. Inside a run, the expert first makes a mistake
with probability `mistakes`, drawn with `seed`; neither argument is sent to a server."""
EXPERT_MISTAKE: EnvMethod[[list[Any]], tuple[str | None, list[Any]]] = EnvMethod(
    name="expert_mistake",
    part="expert",
    arguments=(Argument("random_state", _generator_state),),
    result=ResultForm(
        lambda drawn: {"action": drawn[0], "random_state": drawn[1]},
        lambda answer: (answer["action"], answer["random_state"]),
    ),
)
"""Returns a mistake in place of the expert's last action, and the new state of its random generator."""
SAMPLE: EnvMethod[[int | None], str] = EnvMethod(
    name="sample", part="action_space", arguments=(Argument("seed", _seed),), result=_field_form("action")
)
RANDOM_ACTION: EnvMethod[[int], str] = EnvMethod(name="random_action", is_served=False)
"""Returns an admissible action or a sample of the action space; an episode's first seed determines all its samples."""
ACTION_HINT: EnvMethod[[], str] = EnvMethod(name="action_hint", is_served=False)
PARTS: EnvMethod[[], frozenset[str]] = EnvMethod(name="parts", is_served=False)
"""Returns the `OPTIONAL_PARTS` of the environment."""

METHODS: Mapping[str, EnvMethod[..., Any]] = {
    method.name: method for method in list(globals().values()) if isinstance(method, EnvMethod)
}
SERVED_METHODS = {name: method for name, method in METHODS.items() if method.is_served}
OPTIONAL_PARTS = frozenset(method.part for method in METHODS.values() if method.part is not None)
"""Attributes that an environment may have in addition to `reset` and `step`."""
