"""Tools of a run and the sandbox that they use."""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.config.config import Config
from agentrl.config.derived import per_environment_configs
from agentrl.config.environment import AgentConfig, ToolEntries
from agentrl.errors import ConfigError, UsageError
from agentrl.registry import Kind, lookup
from agentrl.sandbox import Sandbox, open_sandbox, read_spec
from agentrl.tool import Tool, Toolset, tool
from agentrl.tool.schema import Arguments, WrongArguments

LIMITS = ("timeout_s", "max_tokens", "max_concurrent", "max_per_second")
"""Limits of a tool that a config may change."""


def build_tools(agent: AgentConfig) -> list[Tool | Toolset]:
    """Build the configured tools, with their options.

    Raises:
        ConfigError: a tool does not accept an option, or two tools have the same name.
        UnknownNameError: a tool does not exist.
    """
    found = [find_tool(entry) for entry in agent.tools]
    counts = Counter(one.name for one in found if isinstance(one, Tool))
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ConfigError(
            "agent.tools has two tools with the same name", got=", ".join(twice), expected="different names"
        )
    return found


def find_tool(entry: str | Mapping[str, Any]) -> Tool | Toolset:
    """Build the tool of an entry of ``agent.tools``: a registry name or ``module:attr``, with or without options.

    A plain function becomes a tool. The options of any tool may include limits on calls (`LIMITS`).

    Raises:
        ConfigError: the tool does not accept an option.
        UnknownNameError: the tool does not exist.
    """
    options = {} if isinstance(entry, str) else {key: value for key, value in entry.items() if key != "name"}
    name = entry if isinstance(entry, str) else str(entry["name"])
    found = lookup(Kind.TOOL, name)
    if inspect.isclass(found) and issubclass(found, Toolset):
        return _make_toolset(name, found, options)
    if not callable(found):
        raise ConfigError(f"{name} is not a tool", got=type(found).__name__, expected="a function with @agentrl.tool")
    made = found if isinstance(found, Tool) else tool(found)
    limits = {name: options.pop(name) for name in LIMITS if name in options}
    if limits:
        made = made.with_rules(limits)
    if not options and not made.is_stateful:
        return made
    return made.with_options(options)


def _make_toolset(name: str, kind: type[Toolset], options: Mapping[str, Any]) -> Toolset:
    arguments = Arguments(f"tools {name}", types.MethodType(kind.__init__, kind))
    try:
        return kind(**arguments.read(options))
    except WrongArguments as error:
        raise ConfigError(f"options of tools {name} are invalid: {error}", expected=arguments.describe()) from error


def sandbox_maker(agent: AgentConfig) -> Callable[[], Sandbox] | None:
    """Return the function that opens an episode's sandbox, from ``agent.sandbox``; ``None`` without the section.

    Raises:
        ConfigError: the section is invalid.
    """
    if agent.sandbox is None:
        return None
    try:
        return functools.partial(open_sandbox, read_spec(agent.sandbox))
    except UsageError as error:
        what = f"agent.sandbox: {error.what}"
        raise ConfigError(what, got=error.got, expected=error.expected, hint=error.hint) from error


def uses_sandbox(tools: Sequence[Tool | Toolset]) -> bool:
    """Return True if one of the tools uses the episode's sandbox."""
    return any(isinstance(one, Tool) and one.needs_sandbox for one in tools)


def agents_of(agent: AgentConfig) -> list[AgentConfig]:
    """Return the ``agent`` section, and one with the role's tools for each role that has its own tools."""
    own = [without_roles(agent, role.tools) for role in (agent.roles or {}).values() if role.tools is not None]
    return [agent, *(agent.model_copy(update={"tools": tools, "roles": None}) for tools in own)]


def without_roles(agent: AgentConfig, entries: ToolEntries) -> ToolEntries:
    """Return the entries of a role's ``tools`` without the roles that it may call."""
    return [entry for entry in entries if entry not in agent.called_roles]


def check_tools(config: Config) -> None:
    """Check the tools of all environments.

    Raises:
        ConfigError: a tool needs a sandbox and none is configured, or no tool uses the configured one.
    """
    agents = [agent for part in per_environment_configs(config) for agent in agents_of(part.config.agent)]
    users = [agent for agent in agents if uses_sandbox(build_tools(agent))]
    for agent in agents:
        sandbox_maker(agent)
    if users and config.agent.sandbox is None:
        names = [one.name for one in build_tools(users[0]) if isinstance(one, Tool) and one.needs_sandbox]
        raise ConfigError(
            f"the tools {', '.join(names)} need a sandbox" if len(names) > 1 else f"tool {names[0]} needs a sandbox",
            expected="the section agent.sandbox",
            hint="set agent.sandbox={type: local}",
        )
    if config.agent.sandbox is not None and not users:
        raise ConfigError(
            "agent.sandbox is ignored: no tool uses it",
            expected="a tool that uses it in agent.tools, such as python, bash or read_file",
            hint="or remove agent.sandbox",
        )
