"""What starts a server: a command line and the variables that it needs besides this process's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """Command line of one server, made by a pure function of its engine (``launch_command(...)``)."""

    argv: list[str]
    """The interpreter and its arguments, with the port and the model."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables set on top of this process's environment."""
