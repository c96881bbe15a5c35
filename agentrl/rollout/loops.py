"""Agent loops by name, with their options checked."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from agentrl.agent_loop import AgentLoop
from agentrl.config.parts import agent_loop_class
from agentrl.errors import ConfigError


def make_agent_loop(name: str, options: Mapping[str, Any]) -> AgentLoop:
    """The loop that the config's ``agent.loop`` and ``agent.options`` describe.

    Raises:
        UnknownNameError: no such loop.
        ConfigError: an option that the loop does not take, or a value that it refuses.
    """
    kind = agent_loop_class(name)
    known = list(inspect.signature(kind).parameters)
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            raise ConfigError(
                f"agent loop {name} has no option {option!r}",
                expected=", ".join(known) or "no options",
                hint=f"did you mean {near[0]!r}?" if near else None,
            )
    loop: AgentLoop = kind(**options)
    return loop
