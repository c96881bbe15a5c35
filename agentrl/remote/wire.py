"""Routes, errors and values of the environment protocol, as JSON; ``docs/environments/remote.md`` describes them.

Python's own `json` writes and reads them: state snapshots hold numbers of more than 64 bits, and a ``nan`` in an
``info`` stays one. What is not JSON changes on the way as it would in any file: a tuple arrives as a list.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from agentrl.env import EnvironmentSpec
from agentrl.errors import shortened
from agentrl.message import (
    Content,
    ContentPart,
    ImagePart,
    Message,
    TextPart,
    ToolCall,
)
from agentrl.task import Task
from agentrl.tool import ToolResult

T = TypeVar("T")
Body: TypeAlias = Mapping[str, Any]
"""The JSON object of a request."""

PROTOCOL = "agentrl-environment"
VERSION = 1
HEALTH = "/health"
"""The only route without a version: it tells which versions a server speaks."""
INFO = f"/v{VERSION}/info"
TASKS = f"/v{VERSION}/tasks"
SESSIONS = f"/v{VERSION}/sessions"
TOKEN_VARIABLE = "AGENTRL_ENV_TOKEN"
"""Environment variable with the token that a server asks for and a client sends."""
LARGEST_REQUEST = 16 * 2**20
"""Bytes of a request that a server reads where a snapshot or images may be in it."""
LARGEST_CALL = 4 * 2**20
"""Bytes of all other requests."""
LARGEST_ANSWER = 64 * 2**20
"""Bytes of an answer that a client reads."""
TASKS_PER_PAGE = 100


class Problem(enum.StrEnum):
    """Kind of an error answer: ``{"error": {"kind": …, "message": …}}``."""

    USAGE = "usage"
    """The user must change something: an option of the reset, a split, a method that the environment lacks."""
    ENVIRONMENT = "environment"
    """The environment raised, hung, or returned what is not allowed."""
    TOOL = "tool"
    """The text is for the policy, who called a tool wrongly."""
    REQUEST = "request"
    """The request is not understood."""
    NUMBER = "number"
    """The request's number is neither the next one nor a repetition of the last."""
    SESSION = "session"
    """No session of this id: it was closed, its lease ran out, or the server was started again."""
    BUSY = "busy"
    """All sessions are taken."""
    TOKEN = "token"
    """The token is missing or wrong."""

    @property
    def status(self) -> int:
        """The HTTP status that goes with it."""
        return _STATUS[self]


_STATUS = {
    Problem.USAGE: 400,
    Problem.ENVIRONMENT: 500,
    Problem.TOOL: 422,
    Problem.REQUEST: 400,
    Problem.NUMBER: 409,
    Problem.SESSION: 404,
    Problem.BUSY: 503,
    Problem.TOKEN: 401,
}


class Refusal(Exception):
    """Answered to the client.

    Args:
        problem: What it is about.
        message: For a person.
    """

    def __init__(self, problem: Problem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


def field(body: Body, name: str, kind: type[T]) -> T:
    """Read a field of a request.

    Raises:
        Refusal: it is missing or of another type.
    """
    value = body.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        expected = "an object" if kind is dict else f"of type {kind.__name__}"
        raise Refusal(Problem.REQUEST, f"{name!r} of the request is {value!r:.80}, expected {expected}")
    return value


def whole(body: Body, name: str, *, least: int, most: int) -> int:
    """Read a whole number of a request.

    Raises:
        Refusal: it is missing, of another type, or outside the range.
    """
    value = field(body, name, int)
    if not least <= value <= most:
        raise Refusal(Problem.REQUEST, f"{name!r} of the request is {shortened(value)}, expected {least} to {most}")
    return value


def to_json(value: Any) -> bytes:
    """Encode a message.

    Raises:
        TypeError: something in it has no JSON form.
        ValueError: it holds itself.
    """
    return json.dumps(value, default=_plain, separators=(",", ":")).encode()


def from_json(data: bytes) -> Any:
    """Decode a message.

    Raises:
        ValueError: the bytes are not JSON.
    """
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _plain(value: Any) -> Any:
    """Return NumPy's numbers and arrays, and mappings of other types, as JSON knows them."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def write_content(content: Content) -> Any:
    """Write an observation: text, or a list of parts."""
    if isinstance(content, str):
        return content
    return [
        {"text": part.text}
        if isinstance(part, TextPart)
        else {
            "image": base64.b64encode(part.data).decode(),
            "media_type": part.media_type,
            "alternative": part.alternative,
        }
        for part in content
    ]


def read_content(data: Any) -> Content:
    """Read what `write_content` wrote.

    Raises:
        TypeError: it is neither text nor a list of parts.
        KeyError: a part is neither text nor an image.
        ValueError: an image is not base64.
    """
    return data if isinstance(data, str) else tuple(map(_read_part, data))


def _read_part(part: Mapping[str, Any]) -> ContentPart:
    if "text" in part:
        return TextPart(text=part["text"])
    data = base64.b64decode(part["image"], validate=True)
    return ImagePart(data=data, media_type=part["media_type"], alternative=part["alternative"])


def write_message(message: Message) -> dict[str, Any]:
    """Write a message of a conversation."""
    calls = [{"name": call.name, "arguments": dict(call.arguments), "id": call.id} for call in message.tool_calls]
    return {
        "role": message.role,
        "content": write_content(message.content),
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "reasoning": message.reasoning,
    }


def read_message(data: Mapping[str, Any]) -> Message:
    """Read what `write_message` wrote."""
    return Message(
        role=data["role"],
        content=read_content(data["content"]),
        tool_calls=tuple(ToolCall(**call) for call in data["tool_calls"]),
        tool_call_id=data["tool_call_id"],
        name=data["name"],
        reasoning=data["reasoning"],
    )


def write_task(task: Task) -> dict[str, Any]:
    """Write a task; its reader knows its environment."""
    return {
        "id": task.id,
        "seed": task.seed,
        "options": dict(task.options),
        "prompt": task.prompt,
        **({"messages": [write_message(message) for message in task.messages]} if task.messages else {}),
        "ground_truth": task.ground_truth,
        **({"columns": dict(task.columns)} if task.columns else {}),
        "type": task.type,
        "max_turns": task.max_turns,
    }


def read_task(data: Mapping[str, Any], environment: str) -> Task:
    """Read what `write_task` wrote, as a task of `environment`."""
    messages = tuple(read_message(message) for message in data.get("messages", ()))
    return Task(environment=environment, **{**data, "messages": messages})


def write_tool_result(result: ToolResult) -> dict[str, Any]:
    """Write the result of a tool; only the text where there is nothing else."""
    more = {"reward": result.reward, "metrics": dict(result.metrics), "stop": result.stop}
    return {"text": result.text, **{name: value for name, value in more.items() if value}}


def read_tool_result(plain: Mapping[str, Any]) -> ToolResult:
    """Read what `write_tool_result` wrote."""
    return ToolResult(
        str(plain["text"]),
        reward=plain.get("reward", 0.0),
        metrics=plain.get("metrics", {}),
        stop=bool(plain.get("stop", False)),
    )


_TOLD = (
    "name",
    "description",
    "version",
    "instructions",
    "tool_instructions",
    "answer_format",
    "max_turns",
    "success_threshold",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An environment behind a server."""

    url: str
    spec: Mapping[str, Any]
    """The facts of its `EnvironmentSpec` that are plain data."""
    parts: frozenset[str]
    """The optional parts that it has; a newer server may know more of them."""
    action_hint: str
    fingerprint: str
    """Checksum of all this and the options: another one is another environment."""

    @property
    def name(self) -> str:
        """Its name on the server."""
        return str(self.spec["name"])

    @property
    def reward_range(self) -> tuple[float, float]:
        """Least and greatest return; JSON has no infinity, so that an open end is ``None`` there."""
        low, high = self.spec["reward_range"]
        return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def write_served(
    spec: EnvironmentSpec, options: Mapping[str, Any], parts: frozenset[str], action_hint: str
) -> dict[str, Any]:
    """Make the answer of the info route."""
    told: dict[str, Any] = {name: getattr(spec, name) for name in _TOLD}
    told["max_turns"] = spec.turns_under(options)
    told["splits"] = list(spec.splits)
    told["scores"] = dict(spec.scores)
    told["reward_range"] = [value if math.isfinite(value) else None for value in spec.reward_range]
    told["shows_images"] = spec.shows_images(options)
    told["roles"] = list(spec.roles_under(options))
    told["options"] = {name: _shown(value) for name, value in options.items()}
    facts = {"spec": told, "parts": sorted(parts), "action_hint": action_hint}
    fingerprint = hashlib.sha256(to_json(facts)).hexdigest()[:16]
    return {"protocol": PROTOCOL, "version": VERSION, **facts, "fingerprint": fingerprint}


def read_served(url: str, info: Mapping[str, Any]) -> Served:
    """Read what `write_served` wrote."""
    return Served(
        url=url,
        spec=info["spec"],
        parts=frozenset(info["parts"]),
        action_hint=info["action_hint"],
        fingerprint=info["fingerprint"],
    )


def spec_facts(served: Served) -> dict[str, Any]:
    """Make the keyword arguments of the `EnvironmentSpec` of a served environment, besides its factories."""
    facts = {name: served.spec[name] for name in _TOLD if name != "name" and name in served.spec}
    roles = tuple(served.spec.get("roles", ()))  # an older server has none
    return {
        **facts,
        "splits": tuple(served.spec["splits"]),
        "scores": dict(served.spec["scores"]),
        "reward_range": served.reward_range,
        "images_of": _always if served.spec["shows_images"] else None,
        "roles_of": functools.partial(_these, roles) if roles else None,
    }


def _always(**options: Any) -> bool:
    return True


def _these(roles: tuple[str, ...], **options: Any) -> tuple[str, ...]:
    return roles


def _shown(value: Any) -> Any:
    if dataclasses.is_dataclass(value) or not isinstance(value, str | int | float | bool | list | dict | type(None)):
        return str(value)
    return value
