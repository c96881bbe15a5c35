"""The methods that a run can call on an environment, declared once.

Each `EnvMethod` names the part of the contract (`agentrl.env`) that it needs, the arguments of a request and the form
of its result in JSON. All that stands between an episode and an environment derives from this table:

- `agentrl.rollout.env_pool.EnvHandle.call` takes an entry, and so knows the types of arguments and result;
- `agentrl.rollout.env_adapter.EnvAdapter` calls its own method of this name, else the environment's;
- an environment server carries out the entries that are `is_served`, and tells which parts its environment has;
- `agentrl.remote.client.RemoteEnvironment` offers the parts that its server told.

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
    LARGEST_CALL,
    LARGEST_REQUEST,
    Body,
    Problem,
    Refusal,
    field,
    read_content,
    read_message,
    read_tool_result,
    whole,
    write_content,
    write_message,
    write_tool_result,
)
from agentrl.tool import Tool, ToolDependencies, ToolResult, ToolRules

P = ParamSpec("P")
R = TypeVar("R")
LARGEST_SEED = 2**128
CallTool: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[ToolResult]]


class RemoteTool(Tool):
    """Tool whose name and schema are here, and whose function is in a worker process or behind a server.

    Args:
        name: Name that the policy uses.
        schema: The description that was made where the function is.
        stop: A call ends the episode.
        rules: How calls are carried out, where it is not the default.
        remote: Calls the function; ``None`` leaves setting it to the receiver of the tool.
    """

    def __init__(
        self,
        name: str,
        schema: dict[str, Any],
        stop: bool = False,
        rules: Mapping[str, Any] = MappingProxyType({}),
        remote: CallTool | None = None,
    ) -> None:
        self.name = name
        known = {rule.name for rule in dataclasses.fields(ToolRules)}  # a newer server may know more
        self.rules = ToolRules(**{name: value for name, value in rules.items() if name in known} | {"stop": stop})
        self.options = {}
        self.schema = schema
        self.remote = remote

    def to_plain(self) -> dict[str, Any]:
        """Return the description as JSON types: keyword arguments of this class."""
        rules = self.rules.non_defaults()
        stop = bool(rules.pop("stop", False))
        return {"name": self.name, "schema": self.schema, "stop": stop, **({"rules": rules} if rules else {})}

    @classmethod
    def describe(cls, tool: Tool) -> RemoteTool:
        """Make the remote form of a tool, where the tool is."""
        rules = {name: value for name, value in tool.rules.non_defaults().items() if name not in ("stop", "inline")}
        return cls(tool.name, tool.schema, tool.stop, rules)

    @property
    def is_stateful(self) -> bool:
        """False: its state is the environment's."""
        return False

    @property
    def needs_sandbox(self) -> bool:
        """False: the environment holds what the function needs."""
        return False

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as they are: they are checked where the function is."""
        return dict(arguments)

    async def open(self, stack: AsyncExitStack, provisions: ToolDependencies | None = None) -> Callable[..., Any]:
        """Open nothing: the environment owns the function."""
        assert self.remote is not None
        return self.remote

    async def run(self, bound: Callable[..., Any], checked: Mapping[str, Any]) -> ToolResult:
        """Call the function where it is."""
        result: ToolResult = await bound(self.name, checked)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetResult:
    """First observation of an episode, and what the environment offers in it."""

    observation: Content
    info: Mapping[str, Any]
    state_key: str | None
    action_hint: str
    tools: tuple[Tool, ...]
    """The tools bound to this episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """Result of a step, and the key of the state that it led to."""

    result: StepResult
    state_key: str | None


def restored_generator(state: Sequence[Any]) -> random.Random:
    """Make a generator from its state in JSON types.

    Raises:
        TypeError: it is no state; also the next two.
        ValueError: as above.
        OverflowError: as above.
    """
    version, numbers, gauss = state
    generator = random.Random()
    generator.setstate((version, tuple(numbers), gauss))
    return generator


def same(value: Any) -> Any:
    """Return a value whose JSON form is itself."""
    return value


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a method in a request."""

    name: str
    read: Callable[[Body, str], Any]
    """Takes it out of a request; raises `Refusal` where it is missing or of another type."""
    write: Callable[[Any], Any] = same
    is_large: bool = False
    """A snapshot or an observation: the request may have `LARGEST_REQUEST` bytes."""


def _text(body: Body, name: str) -> str:
    return field(body, name, str)


def _mapping(body: Body, name: str) -> dict[str, Any]:
    return field(body, name, dict)


def _seed(body: Body, name: str) -> int | None:
    return None if body.get(name) is None else whole(body, name, least=0, most=LARGEST_SEED)


def _plain(body: Body, name: str) -> Any:
    return body.get(name)


def _content(body: Body, name: str) -> Content:
    try:
        return read_content(body[name])
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(Problem.REQUEST, f"{name!r} of the request is no content: {error!r}") from error


def _generator_state(body: Body, name: str) -> list[Any]:
    state = field(body, name, list)
    try:
        restored_generator(state)
    except (TypeError, ValueError, OverflowError) as error:
        raise Refusal(Problem.REQUEST, f"{name!r} of the request is no state of a generator: {error}") from error
    return state


@dataclass(frozen=True, slots=True)
class ResultForm(Generic[R]):
    """The JSON form of a method's result."""

    write: Callable[[R], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], R]


def _field_form(name: str) -> ResultForm[Any]:
    """Make the form of a JSON value: an answer with one field."""
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


def _write_step(stepped: Stepped) -> dict[str, Any]:
    result = stepped.result
    return {
        "observation": write_content(result.observation),
        "reward": result.reward,
        "terminated": result.terminated,
        "truncated": result.truncated,
        "info": dict(result.info),
        "state_key": stepped.state_key,
    }


def _read_step(answer: Mapping[str, Any]) -> Stepped:
    result = StepResult(
        observation=read_content(answer["observation"]),
        reward=answer["reward"],
        terminated=answer["terminated"],
        truncated=answer["truncated"],
        info=answer["info"],
    )
    return Stepped(result=result, state_key=answer.get("state_key"))


def _write_message(message: Message | None) -> dict[str, Any]:
    if message is None:
        raise UsageError("the environment has no tool_message()")
    return {"message": write_message(message)}


_VALUE = _field_form("value")
_STATE_KEY = _field_form("state_key")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnvMethod(Generic[P, R]):
    """One method that a run can call on an environment."""

    name: str
    part: str | None = None
    """The optional attribute of an environment without which the method cannot be called; ``None``: all have it."""
    arguments: tuple[Argument, ...] = ()
    """Those that a request carries; the adapter has defaults for others."""
    result: ResultForm[R] = _VALUE
    is_served: bool = True
    """Clients of an environment server may ask for it."""

    @property
    def largest_request(self) -> int:
        """Bytes of a request that a server reads."""
        return LARGEST_REQUEST if any(argument.is_large for argument in self.arguments) else LARGEST_CALL

    def write_arguments(self, *values: Any) -> dict[str, Any]:
        """Return the arguments as fields of a request."""
        return {argument.name: argument.write(value) for argument, value in zip(self.arguments, values, strict=True)}

    def read_arguments(self, body: Body) -> list[Any]:
        """Take the arguments out of a request.

        Raises:
            Refusal: one is missing or of another type.
        """
        return [argument.read(body, argument.name) for argument in self.arguments]


RESET: EnvMethod[[int | None, Mapping[str, Any]], ResetResult] = EnvMethod(
    name="reset",
    arguments=(Argument("seed", _seed), Argument("options", _mapping)),
    result=ResultForm(_write_reset, _read_reset),
)
STEP: EnvMethod[[str], Stepped] = EnvMethod(
    name="step", arguments=(Argument("action", _text),), result=ResultForm(_write_step, _read_step)
)
CALL_TOOL: EnvMethod[[str, Mapping[str, Any]], ToolResult] = EnvMethod(
    name="call_tool",
    part="tools",
    arguments=(Argument("name", _text), Argument("arguments", _mapping, dict)),
    result=ResultForm(write_tool_result, read_tool_result),
)
"""Asked of worker processes and servers only; inline and in threads the run holds the tools themselves."""
STATE_KEY: EnvMethod[[], str | None] = EnvMethod(name="state_key", part="state_key", result=_STATE_KEY)
ADMISSIBLE_ACTIONS: EnvMethod[[], list[str] | None] = EnvMethod(name="admissible_actions", part="admissible_actions")
SNAPSHOT: EnvMethod[[], Any] = EnvMethod(name="snapshot", part="snapshot")
RESTORE: EnvMethod[[Any], str | None] = EnvMethod(
    name="restore", part="restore", arguments=(Argument("data", _plain, is_large=True),), result=_STATE_KEY
)
"""Gives the key of the state that was put back."""
WEB_PAGE: EnvMethod[[], str] = EnvMethod(name="web_page", part="web_page")
TOOL_MESSAGE: EnvMethod[[str], Message | None] = EnvMethod(
    name="tool_message",
    part="tool_message",
    arguments=(Argument("action", _text),),
    result=ResultForm(_write_message, lambda answer: read_message(answer["message"])),
)
EXPERT: EnvMethod[[], bool] = EnvMethod(name="expert", part="expert", result=_field_form("is_fallible"))
"""Asks the environment for a new expert; true if it can make mistakes."""
EXPERT_ACTION: EnvMethod[..., ExpertAction] = EnvMethod(
    name="expert_action",
    part="expert",
    arguments=(Argument("observation", _content, write_content, is_large=True),),
    result=ResultForm(lambda action: {"action": action.text}, lambda answer: ExpertAction(text=str(answer["action"]))),
)
"""Gives what the environment's own expert does after an observation. Inside a run, `seed` decides whether, with
probability `mistakes`, it makes a mistake first; a server is not asked for either."""
EXPERT_MISTAKE: EnvMethod[[list[Any]], tuple[str | None, list[Any]]] = EnvMethod(
    name="expert_mistake",
    part="expert",
    arguments=(Argument("random_state", _generator_state),),
    result=ResultForm(
        lambda drawn: {"action": drawn[0], "random_state": drawn[1]},
        lambda answer: (answer["action"], answer["random_state"]),
    ),
)
"""Gives a mistake in place of the expert's last action, and the state that its generator is left in."""
SAMPLE: EnvMethod[[int | None], str] = EnvMethod(
    name="sample", part="action_space", arguments=(Argument("seed", _seed),), result=_field_form("action")
)
RANDOM_ACTION: EnvMethod[[int], str] = EnvMethod(name="random_action", is_served=False)
"""Gives an admissible action or a sample of the action space; the first call's seed decides all of an episode's."""
ACTION_HINT: EnvMethod[[], str] = EnvMethod(name="action_hint", is_served=False)
PARTS: EnvMethod[[], frozenset[str]] = EnvMethod(name="parts", is_served=False)
"""Gives the `OPTIONAL_PARTS` that the environment has."""
CLOSE: EnvMethod[[], None] = EnvMethod(name="close", is_served=False)

METHODS: Mapping[str, EnvMethod[..., Any]] = {
    method.name: method for method in list(globals().values()) if isinstance(method, EnvMethod)
}
SERVED_METHODS = {name: method for name, method in METHODS.items() if method.is_served}
OPTIONAL_PARTS = frozenset(method.part for method in METHODS.values() if method.part is not None)
"""Attributes that an environment may have besides `reset` and `step`."""
