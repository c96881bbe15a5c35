"""Sandboxes, which run untrusted code. `open_sandbox` makes one from a spec.

A back end is a subclass of `Sandbox` whose constructor takes a `SandboxSpec`, registered under its name
(`agentrl.registry.Kind.SANDBOX`, or a plugin's table).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.errors import UsageError
from agentrl.registry import Kind, lookup
from agentrl.sandbox.contract import Command as Command
from agentrl.sandbox.contract import Entry as Entry
from agentrl.sandbox.contract import ProtocolFactory as ProtocolFactory
from agentrl.sandbox.contract import Sandbox as Sandbox
from agentrl.sandbox.contract import SandboxFileError as SandboxFileError
from agentrl.sandbox.contract import SandboxProcess as SandboxProcess
from agentrl.sandbox.spec import DEFAULT_LIMITS as DEFAULT_LIMITS
from agentrl.sandbox.spec import ExecResult as ExecResult
from agentrl.sandbox.spec import Limits as Limits
from agentrl.sandbox.spec import SandboxSpec as SandboxSpec
from agentrl.sandbox.spec import read_spec as read_spec


def open_sandbox(spec: SandboxSpec | Mapping[str, Any] | str = "local", *, has_gateway: bool = False) -> Sandbox:
    """Create the sandbox of a spec; enter it with ``async with``, or call its `start` and `close`.

    Args:
        spec: A `SandboxSpec`, its fields as a mapping, or the name of a back end.
        has_gateway: True if the caller forwards the gateway into the sandbox (`Sandbox.forward`) when the spec
            requires it.

    Raises:
        UsageError: the spec is invalid, or the back end does not support it.
    """
    settings = read_spec(spec)
    if settings.uses_gateway and not has_gateway:
        raise UsageError(
            "only the external loop's sandbox can reach the gateway",
            got=f"network {settings.network}",
            expected="network none, a list of hosts, or all",
            hint="for a program that calls the policy, use agent.options.sandbox of the external loop",
        )
    make = lookup(Kind.SANDBOX, settings.type)
    sandbox = make(settings) if callable(make) else make
    if not isinstance(sandbox, Sandbox):
        raise UsageError(f"{settings.type} is not a sandbox type", got=type(sandbox).__name__, expected="a Sandbox")
    return sandbox
