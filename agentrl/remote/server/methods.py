"""What a session can be asked for: the methods of `Resident`, each with its arguments and its result in JSON.

Worker processes (`agentrl.rollout.env_worker_main`) call the same methods, but pickle their messages: they come
from this program's own child, and carry factories.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeVar, cast

from agentrl.errors import EnvironmentFailure, ToolError, async_boundary, shortened
from agentrl.remote.client import RemoteTool
from agentrl.remote.server.session import Refusal, Session
from agentrl.remote.wire import Problem, read_content, write_content, write_message, write_tool_result
from agentrl.rollout.env_adapter import call_own_tool, restored_generator
from agentrl.task import Task

LARGEST_SEED = 2**128
T = TypeVar("T")
Body: TypeAlias = Mapping[str, Any]
Method: TypeAlias = Callable[[Session, Body], Awaitable[dict[str, Any]]]


def field(body: Body, name: str, kind: type[T]) -> T:
    """A field of a request.

    Raises:
        Refusal: it is missing or of another type.
    """
    value = body.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        expected = "an object" if kind is dict else f"of type {kind.__name__}"
        raise Refusal(Problem.REQUEST, f"{name!r} of the request is {value!r:.80}, expected {expected}")
    return value


def whole(body: Body, name: str, *, least: int, most: int) -> int:
    """A whole number of a request.

    Raises:
        Refusal: it is missing, of another type, or outside the range.
    """
    value = field(body, name, int)
    if not least <= value <= most:
        raise Refusal(Problem.REQUEST, f"{name!r} of the request is {shortened(value)}, expected {least} to {most}")
    return value


def _seed(body: Body) -> int | None:
    return None if body.get("seed") is None else whole(body, "seed", least=0, most=LARGEST_SEED)


async def _reset(session: Session, body: Body) -> dict[str, Any]:
    seed = _seed(body)
    # without a seed the environment goes on with its own generator, as Gymnasium's reset(seed=None) does
    task = Task(id=f"seed {seed}", environment="", seed=cast("int", seed), options=field(body, "options", dict))
    result = await session.environment.reset(task)
    session.tools = {tool.name: tool for tool in result.tools}
    described = [RemoteTool.describe(tool) for tool in result.tools]
    return {
        "observation": write_content(result.observation),
        "info": dict(result.info),
        "state_key": result.state_key,
        "action_hint": result.action_hint,
        "tools": [tool.to_plain() for tool in described],
    }


async def _step(session: Session, body: Body) -> dict[str, Any]:
    stepped = await session.environment.step(field(body, "action", str))
    result = stepped.result
    return {
        "observation": write_content(result.observation),
        "reward": result.reward,
        "terminated": result.terminated,
        "truncated": result.truncated,
        "info": dict(result.info),
        "state_key": stepped.state_key,
    }


async def _call_tool(session: Session, body: Body) -> dict[str, Any]:
    name = field(body, "name", str)
    if name not in session.tools:
        raise ToolError(f"there is no tool {name!r}", expected=", ".join(session.tools) or "none")
    arguments = field(body, "arguments", dict)
    async with async_boundary(EnvironmentFailure, f"tool {name}", deadline_s=session.tool_timeout_s):
        return write_tool_result(await call_own_tool(session.tools[name], arguments))


async def _state_key(session: Session, _body: Body) -> dict[str, Any]:
    return {"state_key": await session.environment.state_key()}


async def _admissible_actions(session: Session, _body: Body) -> dict[str, Any]:
    return {"value": await session.environment.admissible_actions()}


async def _snapshot(session: Session, _body: Body) -> dict[str, Any]:
    return {"value": await session.environment.call("optional", "snapshot")}


async def _restore(session: Session, body: Body) -> dict[str, Any]:
    await session.environment.call("optional", "restore", body.get("data"))
    return {"state_key": await session.environment.state_key()}


async def _web_page(session: Session, _body: Body) -> dict[str, Any]:
    return {"value": await session.environment.call("optional", "web_page")}


async def _tool_message(session: Session, body: Body) -> dict[str, Any]:
    message = await session.environment.call("optional", "tool_message", field(body, "action", str))
    return {"message": write_message(message)}


async def _expert(session: Session, _body: Body) -> dict[str, Any]:
    return {"is_fallible": await session.environment.call("new_expert")}


async def _expert_action(session: Session, body: Body) -> dict[str, Any]:
    try:
        observation = read_content(body["observation"])
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(Problem.REQUEST, f"'observation' of the request is no content: {error!r}") from error
    return {"action": (await session.environment.expert_action(observation)).text}


async def _expert_mistake(session: Session, body: Body) -> dict[str, Any]:
    state = field(body, "random_state", list)
    try:
        restored_generator(state)
    except (TypeError, ValueError, OverflowError) as error:
        raise Refusal(Problem.REQUEST, f"'random_state' of the request is no state of a generator: {error}") from error
    action, state = await session.environment.call("expert_mistake", state)
    return {"action": action, "random_state": state}


async def _sample(session: Session, body: Body) -> dict[str, Any]:
    seed = _seed(body)
    return {"action": await session.environment.call("sample", seed)}


METHODS: Mapping[str, Method] = {
    "reset": _reset,
    "step": _step,
    "call_tool": _call_tool,
    "state_key": _state_key,
    "admissible_actions": _admissible_actions,
    "snapshot": _snapshot,
    "restore": _restore,
    "web_page": _web_page,
    "tool_message": _tool_message,
    "expert": _expert,
    "expert_action": _expert_action,
    "expert_mistake": _expert_mistake,
    "sample": _sample,
}
