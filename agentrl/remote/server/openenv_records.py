"""Records of OpenEnv's protocol: actions read from messages; observations, states, tools and errors written to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import ToolError
from agentrl.message import Content, text_of
from agentrl.remote.listening import DEEPEST, is_deep
from agentrl.remote.server.episodes import ServedEpisode
from agentrl.remote.wire import write_content
from agentrl.task import Task
from agentrl.tool import Tool
from agentrl.tool.schema import WrongArguments

RPC_CODES = {
    "parse": -32700,
    "request": -32600,
    "method": -32601,
    "params": -32602,
    "internal": -32603,
    "server": -32000,
}
"""Error codes of JSON-RPC."""
AN_ACTION = '{"action": TEXT} or {"type": "call_tool", "tool_name": NAME, "arguments": {…}}'


class WrongMessage(Exception):
    """A message that the server answers with an error of this code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvAction:
    """The action of a step: a text or a tool call. Without either, the client asks for the tools."""

    text: str | None = None
    tool: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> OpenEnvAction:
        """Read an action; OpenEnv's own clients may add ``metadata``, which is ignored.

        Raises:
            WrongMessage: it is not an action.
        """
        fields = {name: value for name, value in data.items() if name != "metadata"}
        text, tool, arguments = fields.get("action"), fields.get("tool_name"), fields.get("arguments", {})
        match fields.get("type"):
            case "list_tools" if fields.keys() == {"type"}:
                return cls()
            case "call_tool" if isinstance(tool, str) and isinstance(arguments, dict):
                return cls(tool=tool, arguments=arguments)
            case None if isinstance(text, str) and fields.keys() == {"action"}:
                return cls(text=text)
        raise WrongMessage("VALIDATION_ERROR", f"not an action: got {json.dumps(fields)[:200]}, expected {AN_ACTION}")


def read_object(text: str) -> dict[str, Any]:
    """Read the JSON object of a message.

    Raises:
        WrongMessage: it is none.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongMessage("INVALID_JSON", f"the message is not valid JSON: {error}") from error
    if not isinstance(message, dict):
        raise WrongMessage("VALIDATION_ERROR", f"the message is {text[:80]!r}, expected an object")
    if is_deep(message):
        raise WrongMessage("VALIDATION_ERROR", f"the message has more than {DEEPEST} levels of lists and objects")
    return message


def whole_number_or_none(data: Mapping[str, Any], name: str) -> int | None:
    """Read a whole number that may be left out.

    Raises:
        WrongMessage: it is something else.
    """
    value = data.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise WrongMessage("VALIDATION_ERROR", f"{name} is {value!r:.80}, expected a whole number from 0")
    return value


def write_shown(content: Content) -> dict[str, Any]:
    """Write an observation: its text, and its images, if it has any."""
    if isinstance(content, str):
        return {"text": content}
    images = [part for part in write_content(content) if "image" in part]
    return {"text": text_of(content), **({"images": images} if images else {})}


def write_observation(
    fields: Mapping[str, Any], reward: float | None, episode: ServedEpisode, info: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the data of an answer to a reset or a step; `episode` has carried it out."""
    metadata = {**episode.state.to_plain(), "info": dict(info)}
    observation = {**fields, "metadata": metadata}
    return {"observation": observation, "reward": reward, "done": episode.state.is_over, "metadata": metadata}


def write_state(episode: ServedEpisode, name: str) -> dict[str, Any]:
    """Write the state of an episode."""
    state = episode.state.to_plain()
    return {"episode_id": name, "step_count": state.pop("steps"), **state}


def write_tool(tool: Tool) -> dict[str, Any]:
    """Write a tool."""
    function = tool.schema["function"]
    return {
        "name": tool.name,
        "description": function.get("description", ""),
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
    }


def write_shown_task(task: Task, index: int) -> dict[str, Any]:
    """Write what clients may know of a task; its answer is not part of it."""
    return {"index": index, "id": task.id, "type": task.type, "prompt": task.prompt}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvCall:
    """The result of a tool call."""

    tool: str
    text: str | None = None
    images: Sequence[Mapping[str, Any]] = ()
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: Mapping[str, str] | None = None
    """Type and message of the error that the policy reads."""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the observation."""
        images = {"images": list(self.images)} if self.images else {}
        return {"tool_name": self.tool, "result": self.text, "error": self.error, **images}


async def call_for_observation(episode: ServedEpisode, name: str, arguments: Mapping[str, Any]) -> OpenEnvCall:
    """Call a tool; errors that the policy can fix are part of the result.

    Raises:
        AgentRLError: no episode is running, or the environment failed.
    """
    try:
        result = await episode.call_tool(name, arguments)
    except ToolError as error:
        kind = "invalid_args" if isinstance(error.__cause__, WrongArguments) else "execution_error"
        kind = kind if name in episode.tools else "tool_not_found"
        return OpenEnvCall(tool=name, error={"error_type": kind, "message": str(error)})
    images = write_shown(result.content).get("images", ())
    return OpenEnvCall(tool=name, text=result.text, images=images, reward=result.reward, metrics=result.metrics)


def write_error(code: str, message: str) -> dict[str, Any]:
    """Write the answer to a message that failed."""
    return {"type": "error", "data": {"message": message, "code": code}}


def write_rpc_error(number: Any, code: str, message: str) -> dict[str, Any]:
    """Write the error of a JSON-RPC request; `code` is a key of `RPC_CODES`."""
    return {"jsonrpc": "2.0", "id": number, "error": {"code": RPC_CODES.get(code, -32602), "message": message}}


_TEXT = {"type": "string"}
SCHEMAS: Mapping[str, Any] = {
    "action": {
        "title": "Action",
        "oneOf": [
            {"type": "object", "properties": {"action": _TEXT}, "required": ["action"]},
            {
                "type": "object",
                "properties": {"type": {"const": "call_tool"}, "tool_name": _TEXT, "arguments": {"type": "object"}},
                "required": ["type", "tool_name"],
            },
            {"type": "object", "properties": {"type": {"const": "list_tools"}}, "required": ["type"]},
        ],
    },
    "observation": {
        "title": "Observation",
        "type": "object",
        "properties": {
            "text": _TEXT,
            "images": {"type": "array", "items": {"type": "object"}},
            "tool_name": _TEXT,
            "result": {"type": ["string", "null"]},
            "error": {"type": ["object", "null"]},
            "metadata": {"type": "object"},
        },
    },
    "state": {
        "title": "State",
        "type": "object",
        "properties": {
            "episode_id": _TEXT,
            "step_count": {"type": "integer"},
            "task_id": {"type": ["string", "null"]},
            "total_reward": {"type": "number"},
            "done": {"type": "boolean"},
            "terminated": {"type": "boolean"},
            "truncated": {"type": "boolean"},
            "success": {"type": ["boolean", "null"]},
        },
    },
}
"""JSON schemas of the answer of ``/schema``."""
