"""What starts a server: a command line and the variables that it needs besides this process's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

THIS_MACHINE = "127.0.0.1"
"""The address of servers that nobody reaches from elsewhere."""

RETURN_ROUTES = "--enable-return-routed-experts"
"""Lets vLLM and SGLang alike tell which experts tokens went to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """Command line of one server, made by a pure function of its engine (``launch_command(...)``)."""

    argv: list[str]
    """The interpreter and its arguments, with the port and the model."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables set on top of this process's environment."""
    host: str = THIS_MACHINE
    """Address on which it listens."""
    health: str = "/health"
    """Path that answers 200 once the server is ready."""


CommandMaker = Callable[[int, Sequence[int]], LaunchCommand]
"""The command of a server, from its port and the positions of its GPUs (see `agentrl.serving.launch.gpus`)."""
