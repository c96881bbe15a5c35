"""Roles of a run: those of the agent loop, those that others call, and those of the environment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentrl.agent_loop import AgentLoop, AgentRole
from agentrl.rollout.policies import EpisodePolicy
from agentrl.rollout.roles.role_episode import EpisodeRoles, RoleEpisode
from agentrl.rollout.roles.role_tools import RoleTool
from agentrl.rollout.tools import list_tools
from agentrl.tool import Tool, Toolset
from agentrl.trajectory import SOLE_ROLE


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSetup:
    """One role of a run with its tools and policy."""

    role: AgentRole
    tools: Sequence[Tool | Toolset] | None = None
    """Tools of the role; ``None`` for the episode's tools."""
    policy: EpisodePolicy | None = None
    """Policy that answers in place of the run's policy; such a role does not train."""
    as_tool: RoleTool | None = None
    """Tool with which other roles call it; ``None`` for a role of the loop."""


def role_names(loop: AgentLoop, called: Sequence[str]) -> list[str]:
    """Return the roles of an episode: those of the loop or its only agent, then `called`; empty for a single agent."""
    return [*(loop.roles or [SOLE_ROLE]), *called] if loop.roles or called else []


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRoles:
    """Roles of all episodes of a run."""

    names: Sequence[str]
    """Roles of the loop, and roles that they call; empty if a single agent plays with roles of the environment."""
    environment: Sequence[str]
    """Roles that the runtime plays for the environment, such as its user."""
    setups: Sequence[RoleSetup] = ()
    """Setups of roles; roles without a setup use the run's tools and policy."""

    @classmethod
    def find(cls, loop: AgentLoop, environment: Sequence[str], setups: Sequence[RoleSetup]) -> RunRoles | None:
        """Return the roles of a loop and an environment; ``None`` for a single agent."""
        names = role_names(loop, [setup.role.name for setup in setups if setup.as_tool is not None])
        if environment and not names:  # the loop's agent may have a setup too
            names = [setup.role.name for setup in setups if setup.role.name == SOLE_ROLE]
        return cls(names=names, environment=environment, setups=setups) if names or environment else None

    @property
    def tools(self) -> list[Tool]:
        """Tools with which roles call other roles."""
        return [setup.as_tool for setup in self.setups if setup.as_tool is not None]

    async def prepare_episode(self) -> Callable[..., RoleEpisode]:
        """List the tools of the roles for one episode, and return the constructor of the episode."""
        setups = {setup.role.name: setup for setup in self.setups}
        roles = EpisodeRoles(
            agents={name: await _make_role(name, setups.get(name)) for name in self.names},
            environment={name: await _make_role(name, setups.get(name), trained=False) for name in self.environment},
            policies={name: setup.policy for name, setup in setups.items() if setup.policy is not None},
        )
        return functools.partial(RoleEpisode, roles=roles)

    async def close(self) -> None:
        """Close the policies of roles."""
        for setup in self.setups:
            if setup.policy is not None:
                await setup.policy.close()


async def _make_role(name: str, setup: RoleSetup | None, *, trained: bool = True) -> AgentRole:
    """Return a role with the tools that it may call; `trained` applies to a role without a setup."""
    if setup is None:
        return AgentRole(name=name, trained=trained)
    if setup.tools is None:
        return setup.role
    return replace(setup.role, tools={tool.name: tool for tool in await list_tools(setup.tools)})
