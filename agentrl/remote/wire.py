"""Routes, errors and values of the environment protocol, as JSON; ``docs/environments/remote.md`` describes them.

Messages use Python's `json`, because state snapshots contain integers of more than 64 bits and an ``info`` may contain
``nan``. Types that JSON lacks are converted as usual: a tuple arrives as a list.
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
from agentrl.errors import shorten
from agentrl.message import Content, ContentPart, ImagePart, Message, TextPart, ToolCall
from agentrl.task import Task
from agentrl.tool import ToolResult

T = TypeVar("T")
Body: TypeAlias = Mapping[str, Any]
"""The JSON object of a request."""

PROTOCOL = "agentrl-environment"
VERSION = 1
HEALTH = "/health"
"""The only unversioned route; it returns the protocol versions of the server."""
INFO = f"/v{VERSION}/info"
TASKS = f"/v{VERSION}/tasks"
SESSIONS = f"/v{VERSION}/sessions"
TOKEN_VARIABLE = "AGENTRL_ENV_TOKEN"
"""Environment variable with the token that a server requires and a client sends."""
MAX_REQUEST_BYTES = 16 * 2**20
"""Maximum size in bytes of a request that may contain a snapshot or images."""
MAX_CALL_BYTES = 4 * 2**20
"""Maximum size in bytes of all other requests."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Maximum size in bytes of an answer that a client reads."""
TASKS_PER_PAGE = 100
_SPEC_FIELDS = (
    "name",
    "description",
    "version",
    "instructions",
    "tool_instructions",
    "answer_format",
    "max_turns",
    "success_threshold",
    "reset_columns",
)


class RefusalKind(enum.StrEnum):
    """Kind of an error answer: ``{"error": {"kind": …, "message": …}}``."""

    USAGE = "usage"
    """The user must change something: an option of `reset`, a split, a method that the environment lacks."""
    ENVIRONMENT = "environment"
    """The environment raised, hung, or returned an invalid value."""
    TOOL = "tool"
    """The policy made an invalid tool call; the message is shown to the policy."""
    REQUEST = "request"
    """The request is malformed."""
    NUMBER = "number"
    """The request's number is neither the next one nor that of the last request."""
    SESSION = "session"
    """No session has this id: it was closed, its lease expired, or the server restarted."""
    BUSY = "busy"
    """All sessions are in use."""
    TOKEN = "token"
    """The token is missing or wrong."""

    @property
    def status(self) -> int:
        """HTTP status of answers of this kind."""
        return _STATUS[self]


_STATUS = {
    RefusalKind.USAGE: 400,
    RefusalKind.ENVIRONMENT: 500,
    RefusalKind.TOOL: 422,
    RefusalKind.REQUEST: 400,
    RefusalKind.NUMBER: 409,
    RefusalKind.SESSION: 404,
    RefusalKind.BUSY: 503,
    RefusalKind.TOKEN: 401,
}


class Refusal(Exception):
    """Error that is returned to the client."""

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def field(body: Body, name: str, kind: type[T]) -> T:
    """Read a field of a request.

    Raises:
        Refusal: the field is missing or has another type.
    """
    value = body.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        expected = "an object" if kind is dict else f"of type {kind.__name__}"
        raise Refusal(RefusalKind.REQUEST, f"{name!r} of the request is {value!r:.80}, expected {expected}")
    return value


def whole_number(body: Body, name: str, *, least: int, most: int) -> int:
    """Read a whole number of a request.

    Raises:
        Refusal: the field is missing, has another type, or is out of range.
    """
    value = field(body, name, int)
    if not least <= value <= most:
        raise Refusal(RefusalKind.REQUEST, f"{name!r} of the request is {shorten(value)}, expected {least} to {most}")
    return value


def to_json(value: Any) -> bytes:
    """Encode a message.

    Raises:
        TypeError: a value cannot be represented in JSON.
        ValueError: the value contains a reference cycle.
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
    """Convert NumPy numbers and arrays, and mappings other than `dict`, to JSON types."""
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
    """Read an observation that `write_content` wrote.

    Raises:
        TypeError: the data is neither text nor a list of parts.
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
    """Read a message that `write_message` wrote."""
    return Message(
        role=data["role"],
        content=read_content(data["content"]),
        tool_calls=tuple(ToolCall(**call) for call in data["tool_calls"]),
        tool_call_id=data["tool_call_id"],
        name=data["name"],
        reasoning=data["reasoning"],
    )


def write_task(task: Task) -> dict[str, Any]:
    """Encode a task without its environment, which the receiver knows."""
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
    """Read a task of `environment` that `write_task` wrote."""
    messages = tuple(read_message(message) for message in data.get("messages", ()))
    return Task(environment=environment, **{**data, "messages": messages})


def write_tool_result(result: ToolResult) -> dict[str, Any]:
    """Encode the result of a tool; empty fields are omitted, except the text."""
    content = result.content
    parts = None if isinstance(content, str) else write_content(content)
    more = {
        "content": parts,
        "reward": result.reward,
        "metrics": dict(result.metrics),
        "stop": result.stop,
        "truncated": result.truncated,
    }
    success = {} if result.success is None else {"success": result.success}
    return {"text": result.text, **{name: value for name, value in more.items() if value}, **success}


def read_tool_result(plain: Mapping[str, Any]) -> ToolResult:
    """Read a result that `write_tool_result` wrote."""
    return ToolResult(
        read_content(plain["content"]) if plain.get("content") else str(plain["text"]),
        reward=plain.get("reward", 0.0),
        metrics=plain.get("metrics", {}),
        stop=bool(plain.get("stop", False)),
        truncated=bool(plain.get("truncated", False)),
        success=plain.get("success"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEnvironment:
    """Description of an environment behind a server."""

    url: str
    spec: Mapping[str, Any]
    """Fields of its `EnvironmentSpec` that are plain data."""
    parts: frozenset[str]
    """Optional parts that the environment has; a newer server may list unknown ones."""
    action_hint: str
    fingerprint: str
    """Checksum of the description and the options; it differs between environments."""

    @property
    def name(self) -> str:
        """Name of the environment on the server."""
        return str(self.spec["name"])

    @property
    def reward_range(self) -> tuple[float, float]:
        """Minimum and maximum return; infinity is ``None`` in JSON."""
        low, high = self.spec["reward_range"]
        return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def write_served(
    spec: EnvironmentSpec, options: Mapping[str, Any], parts: frozenset[str], action_hint: str
) -> dict[str, Any]:
    """Return the answer of the info route."""
    told = spec.with_instructions_under(options)
    fields: dict[str, Any] = {name: getattr(told, name) for name in _SPEC_FIELDS}
    fields["max_turns"] = spec.turns_under(options)
    fields["splits"] = list(spec.splits_under(options))
    fields["scores"] = dict(spec.scores)
    fields["reward_range"] = [value if math.isfinite(value) else None for value in spec.reward_range]
    fields["shows_images"] = spec.shows_images(options)
    fields["roles"] = list(spec.roles_under(options))
    fields["options"] = {name: _to_plain(value) for name, value in options.items()}
    facts = {"spec": fields, "parts": sorted(parts), "action_hint": action_hint}
    fingerprint = hashlib.sha256(to_json(facts)).hexdigest()[:16]
    return {"protocol": PROTOCOL, "version": VERSION, **facts, "fingerprint": fingerprint}


def read_served(url: str, info: Mapping[str, Any]) -> ServedEnvironment:
    """Read a description that `write_served` wrote."""
    return ServedEnvironment(
        url=url,
        spec=info["spec"],
        parts=frozenset(info["parts"]),
        action_hint=info["action_hint"],
        fingerprint=info["fingerprint"],
    )


def spec_facts(served: ServedEnvironment) -> dict[str, Any]:
    """Return the keyword arguments of a served environment's `EnvironmentSpec`, without its factories."""
    facts = {name: served.spec[name] for name in _SPEC_FIELDS if name != "name" and name in served.spec}
    roles = tuple(served.spec["roles"])
    return {
        **facts,
        "splits": tuple(served.spec["splits"]),
        "scores": dict(served.spec["scores"]),
        "reward_range": served.reward_range,
        "images_of": _always if served.spec["shows_images"] else None,
        "roles_of": functools.partial(_constant_roles, roles) if roles else None,
    }


def _always(**options: Any) -> bool:
    return True


def _constant_roles(roles: tuple[str, ...], **options: Any) -> tuple[str, ...]:
    return roles


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) or not isinstance(value, str | int | float | bool | list | dict | type(None)):
        return str(value)
    return value
