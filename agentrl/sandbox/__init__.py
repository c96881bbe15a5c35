"""Sandboxes, which run untrusted code. `open_sandbox` makes one from a spec.

A back end is a subclass of `Sandbox` that is made with a `SandboxSpec`, registered under its name
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
    """Make the sandbox that a spec describes, to be entered with ``async with`` (or started and closed by hand).

    Args:
        spec: A `SandboxSpec`, the same as plain data, or a back end's name.
        has_gateway: The caller lets its programs reach the gateway (`Sandbox.forward`), where the spec says so.

    Raises:
        UsageError: the spec is not understood, or asks for what the back end cannot give.
    """
    settings = read_spec(spec)
    if settings.uses_gateway and not has_gateway:
        raise UsageError(
            "the gateway is reached from the sandbox of the external loop's program only",
            got=f"network {settings.network}",
            expected="network none, a list of hosts, or all",
            hint="take agent.options.sandbox of the external loop for a program that asks the policy",
        )
    make = lookup(Kind.SANDBOX, settings.type)
    sandbox = make(settings) if callable(make) else make
    if not isinstance(sandbox, Sandbox):
        raise UsageError(f"{settings.type} makes no sandbox", got=type(sandbox).__name__, expected="a Sandbox")
    return sandbox
