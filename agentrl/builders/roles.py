"""Roles of an agent loop from ``agent.roles``: prompts, tools, and separate policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.agent_loop import AgentLoop, AgentRole
from agentrl.builders.tools import build_tools, without_roles
from agentrl.config.config import Config
from agentrl.config.derived import make_agent_loop, per_environment_configs
from agentrl.config.environment import AgentConfig, RoleConfig, RoleToolConfig
from agentrl.engine import SamplingParams
from agentrl.errors import ConfigError, did_you_mean
from agentrl.render.tokenizers import token_breaker
from agentrl.rollout.policies import EpisodePolicy
from agentrl.rollout.roles.environment_roles import roles_of_environment
from agentrl.rollout.roles.role_policies import RolePolicy
from agentrl.rollout.roles.role_tools import RoleTool
from agentrl.rollout.roles.run_roles import RoleSetup, role_names
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.serving.openai import OpenAIEngine
from agentrl.tool import TOOL_NAME, Tool, Toolset
from agentrl.trajectory import SOLE_ROLE


def build_roles(agent: AgentConfig, loop: AgentLoop, environment_roles: Sequence[str] = ()) -> list[RoleSetup]:
    """Build the configured roles of a loop and its environment: prompts, tools and policies.

    Roles that the runtime plays for the environment are not trained.

    Raises:
        ConfigError: a role does not exist, the loop ignores its tools, or a tool has two different configurations.
        UnknownNameError: a tool does not exist.
    """
    _check_fits(agent, loop, environment_roles)
    _check_one_tool_of_a_name(agent)
    _check_calls_end(agent)
    called = {name: _role_tool(name, role.as_tool) for name, role in (agent.roles or {}).items() if role.as_tool}
    untrained = {"trained": False}
    roles = {
        name: role.model_copy(update=untrained) if name in environment_roles else role
        for name, role in (agent.roles or {}).items()
    }
    return [_build_role(agent, name, role, called) for name, role in roles.items()]


def _role_tool(name: str, config: RoleToolConfig) -> RoleTool:
    return RoleTool(name, description=config.description, arguments=config.arguments, max_turns=config.max_turns)


def _check_fits(agent: AgentConfig, loop: AgentLoop, environment_roles: Sequence[str]) -> None:
    """Check that the configured roles exist, and that none of their settings is ignored."""
    names = role_names(loop, agent.called_roles)
    if environment_roles and not names and SOLE_ROLE in (agent.roles or {}):
        names = [SOLE_ROLE]
    for name in environment_roles:
        _check_environment_role(name, agent, names)
    if names and agent.few_shot_turns:
        raise ConfigError(
            f"agent.few_shot_turns is ignored by the agent loop {agent.loop}: examples show one agent, but it has more",
            got=f"{agent.few_shot_turns}, with the roles {', '.join(names)}",
            expected="agent.few_shot_turns=0, or a loop with one agent",
        )
    for name, role in (agent.roles or {}).items():
        if name in environment_roles:
            continue
        if name not in names or (role.as_tool is not None and names.count(name) > 1):
            raise ConfigError(
                f"agent.roles.{name}: the agent loop {agent.loop} has no such role"
                if role.as_tool is None
                else f"agent.roles.{name}.as_tool: a role of the agent loop {agent.loop} cannot be called by others",
                expected=", ".join([*names, *environment_roles])
                or "a loop with several agents, or as_tool: {description: …}",
                hint=did_you_mean(name, [other for other in [*names, *environment_roles] if other != name]),
            )
        if role.as_tool is not None and not TOOL_NAME.fullmatch(name):
            raise ConfigError(
                f"agent.roles.{name}.as_tool: a role that others call needs a valid tool name",
                got=repr(name),
                expected="1 to 64 letters, digits, _ and -",
            )
        if role.as_tool is not None and not loop.offers_tools:
            raise ConfigError(
                f"agent.roles.{name}.as_tool: the agent loop {agent.loop} does not offer tools",
                got=f"agent.loop={agent.loop}",
                expected="agent.loop=tool_calling, or another loop that offers tools",
            )
        if role.tools and not loop.offers_tools:
            raise ConfigError(
                f"agent.roles.{name}.tools is ignored by the agent loop {agent.loop}",
                got=role.tools,
                expected="a loop that offers tools, or no tools",
            )


def _check_environment_role(name: str, agent: AgentConfig, names: Sequence[str]) -> None:
    """Check the settings of a role that the runtime plays for the environment."""
    role = (agent.roles or {}).get(name, RoleConfig())
    if role.trained:
        raise ConfigError(
            f"agent.roles.{name} is a role of the environment and cannot be trained: it has no reward of its own, and "
            "with the agent's reward it would learn to make the task easy",
            got="trained true",
            expected=f"no agent.roles.{name}.trained",
        )
    if role.as_tool is not None or role.tools:
        raise ConfigError(
            f"agent.roles.{name} is a role of the environment: it cannot be called as a tool, and cannot call tools",
            got="as_tool" if role.as_tool is not None else f"tools {role.tools}",
            expected=f"no agent.roles.{name}.{'as_tool' if role.as_tool is not None else 'tools'}",
        )
    if name in names:
        raise ConfigError(
            f"both the environment and the agent loop {agent.loop} have a role {name}",
            got=", ".join(names),
            expected="different role names",
        )


def _build_role(agent: AgentConfig, name: str, config: RoleConfig, called: Mapping[str, RoleTool]) -> RoleSetup:
    role = AgentRole(
        name=name,
        system_prompt=config.system_prompt,
        trained=config.is_trained,
        max_answer_tokens=config.max_answer_tokens,
    )
    tools: list[Tool | Toolset] | None = None
    if config.tools is not None:
        own = agent.model_copy(update={"tools": without_roles(agent, config.tools)})
        tools = [*build_tools(own), *(called[entry] for entry in called if entry in config.tools)]
    return RoleSetup(role=role, tools=tools, policy=_build_policy(name, config), as_tool=called.get(name))


def _build_policy(name: str, config: RoleConfig) -> EpisodePolicy | None:
    if config.policy is not None:
        return ScriptedEpisodePolicy(ScriptedPolicy(config.policy))
    if config.engine is not None:
        sampling = SamplingParams(temperature=config.temperature)
        service = OpenAIEngine(config.engine, section=f"agent.roles.{name}.engine")
        return RolePolicy(service, sampling, break_up=token_breaker(config.engine.model))
    return None


def _check_one_tool_of_a_name(agent: AgentConfig) -> None:
    known: dict[str, object] = {}
    for entries in (agent.tools, *(role.tools for role in (agent.roles or {}).values())):
        for entry in entries or ():
            name = entry if isinstance(entry, str) else str(entry["name"])
            if known.setdefault(name, entry) != entry:
                raise ConfigError(
                    f"tool {name} has two configurations in the same episode",
                    got=f"{known[name]} and {entry}",
                    expected="the same options in agent.tools and in every agent.roles.ROLE.tools",
                )


def _check_calls_end(agent: AgentConfig) -> None:
    """Check that no role can call itself, directly or indirectly: such recursion would use up all turns."""
    roles, called = agent.roles or {}, agent.called_roles
    calls = {name: [other for other in called if other in (roles[name].tools or ())] for name in called}
    for first in called:
        reached, ahead = set[str](), list(calls[first])
        while ahead:
            name = ahead.pop()
            if name not in reached:
                reached.add(name)
                ahead += calls[name]
        if first in reached:
            raise ConfigError(
                f"agent.roles.{first}.tools: the role {first} can call itself",
                got=f"{first} calls {', '.join(calls[first])}",
                expected="roles that call each other in one direction",
            )


def check_roles(config: Config) -> None:
    """Check the roles of a config.

    Raises:
        ConfigError: a role or the role of a weight does not exist in any loop, or an expert with several agents.
    """
    roles: list[str] = []
    for part in per_environment_configs(config):
        agent = part.config.agent
        loop = make_agent_loop(agent.loop, agent.options)
        environment_roles = roles_of_environment(part.config)
        _check_fits(agent, loop, environment_roles)
        if environment_roles and config.algorithm.expert is not None:
            raise ConfigError(
                "algorithm.expert does not work with environment roles: the expert's episodes would have another user",
                got=f"an environment with the roles {', '.join(environment_roles)}",
                expected="an environment that plays its user itself, or no algorithm.expert",
            )
        roles += role_names(loop, agent.called_roles)
    for name in config.algorithm.role_weights:
        if name not in roles:
            raise ConfigError(
                f"algorithm.role_weights.{name}: no agent loop of the run has this role",
                expected=", ".join(roles) or "a loop with several agents, or no algorithm.role_weights",
                hint=did_you_mean(name, roles),
            )
    if roles and config.algorithm.expert is not None:
        raise ConfigError(
            "algorithm.expert does not work with several agents: an expert plays only one",
            got=f"a loop with the roles {', '.join(roles)}",
            expected="a loop with one agent, or no algorithm.expert",
        )
