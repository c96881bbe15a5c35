"""The words and values of the sandbox protocol, as JSON; ``docs/sandboxes.md`` describes them."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

from agentrl.sandbox.limits import DEFAULT_LIMITS, ExecResult, Limits

PROTOCOL = "agentrl-sandbox"
VERSION = 1
SANDBOXES = f"/v{VERSION}/sandboxes"
TOKEN_VARIABLE = "AGENTRL_SANDBOX_TOKEN"
"""Environment variable with the token that a server asks for and a client sends."""
LARGEST_CALL = 4 * 2**20
"""Bytes of a request that a server reads, where neither a file nor a snapshot is in it."""
LARGEST_INPUT = 32 * 2**20
"""Bytes of one with the standard input of a program."""
LARGEST_REQUEST = 512 * 2**20
"""Bytes of any request, whatever the sandbox's limits are."""


def write_bytes(data: bytes) -> str:
    """Bytes, as JSON can hold them."""
    return base64.b64encode(data).decode()


def read_bytes(text: str) -> bytes:
    """What `write_bytes` wrote.

    Raises:
        ValueError: it is not base64.
    """
    return base64.b64decode(text, validate=True)


def largest_request(method: str, limits: Limits) -> int:
    """Bytes of a call that a server reads: what its sandboxes can hold, in base64."""
    match method:
        case "write":
            held = limits.file_bytes or LARGEST_REQUEST
        case "restore":
            held = limits.disk_bytes or LARGEST_REQUEST
        case "exec" | "process_write":
            return LARGEST_INPUT
        case _:
            return LARGEST_CALL
    return min(LARGEST_REQUEST, held * 3 // 2 + LARGEST_CALL)


def write_result(result: ExecResult) -> dict[str, Any]:
    """How a command ended."""
    told = dataclasses.asdict(result)
    return {**told, "stdout": write_bytes(result.stdout), "stderr": write_bytes(result.stderr)}


def read_result(data: Mapping[str, Any]) -> ExecResult:
    """What `write_result` wrote."""
    return ExecResult(**{**data, "stdout": read_bytes(data["stdout"]), "stderr": read_bytes(data["stderr"])})


def write_limits(limits: Limits | None) -> dict[str, float] | None:
    """Limits by name."""
    return None if limits is None else limits.given


def demanded(limits: Limits) -> list[str]:
    """The limits of a spec that are no defaults: somebody asked for them, and a server may not lower them unsaid."""
    defaults = DEFAULT_LIMITS.given
    return [name for name, value in limits.given.items() if value != defaults[name]]


def read_limits(data: Mapping[str, Any] | None) -> Limits | None:
    """What `write_limits` wrote.

    Raises:
        TypeError: an unknown limit.
        UsageError: a limit that is no positive number.
    """
    return None if data is None else Limits(**data)
