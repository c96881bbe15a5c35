"""Roles of a run and of each episode: those of the agent loop, those that others call, and those of the environment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.agent_loop import (
    PLAIN_TURN,
    AgentLoop,
    AgentRole,
    Answer,
    Conversation,
    EpisodeEnd,
    TurnOptions,
    unknown_role,
)
from agentrl.env import StepResult
from agentrl.errors import A_REWARD, AgentRLError, EngineError, EnvironmentFailure, Outcome, UsageError, bounded_reward
from agentrl.message import Content, Message, ToolCall, encodable, system
from agentrl.remote.env_methods import StepReply
from agentrl.rollout.episode import RecordedConversation, RuntimeEpisode
from agentrl.rollout.policies import EpisodePolicy
from agentrl.rollout.roles.environment_roles import EnvironmentRoles
from agentrl.rollout.roles.role_tools import RoleTool, ask_role
from agentrl.rollout.tools import ToolCallResult, list_tools
from agentrl.tool import Tool, Toolset
from agentrl.trajectory import SOLE_ROLE, Turn, base_role


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRoles:
    """Roles of one episode, by name."""

    agents: Mapping[str, AgentRole]
    """Roles of the loop, and roles that they call; empty for a single agent."""
    environment: Mapping[str, AgentRole]
    """Roles that the runtime plays for the environment."""
    policies: Mapping[str, EpisodePolicy]
    """Policies of roles that the run's policy does not play."""


class RoleEpisode(RuntimeEpisode):
    """Episode of several agents, or of agents and the environment's roles."""

    def __init__(self, *, roles: EpisodeRoles, **parts: Any) -> None:
        super().__init__(**parts)
        self.roles = roles.agents
        if self.roles:
            self._history = None  # the loop decides which role reads the task
        self._role_policies = roles.policies
        self._environment_roles = EnvironmentRoles(self.spec.name, roles.environment, self._open_for_environment)
        self._role_error: EpisodeEnd | AgentRLError | None = None
        """Exception raised while a role of the environment was answering."""

    async def _reset_environment(self) -> Content:
        observation = await super()._reset_environment()
        self._environment_roles.take_instructions(self.info)
        self.player_names = tuple(name for name in self.player_names if name not in self._environment_roles.roles)
        opened = StepResult(observation=observation, reward=0.0, terminated=False, truncated=False, info=self.info)
        unrecorded = Turn(index=0, start=0, end=0)
        result = await self._run_environment_roles(opened, unrecorded, is_opening=True)
        if result.done or result.reward:
            raise EnvironmentFailure(
                f"environment {self.spec.name} ended, or gave a reward, before the agent could act",
                got=f"reward {result.reward}, done {result.done}",
            )
        return result.observation

    async def _step(self, action: str) -> StepResult:
        if self.player in self._environment_roles.roles:  # the environment would take the action as this role's answer
            raise self._role_error or EngineError(f"role {self.player} has not answered yet", got=f"action {action!r}")
        return await super()._step(action)

    async def _take_action(self, action: str, turn: Turn) -> StepResult:
        self._environment_roles.note_agent_turn()
        return await self._run_environment_roles(await super()._take_action(action, turn), turn)

    def _record_step(self, stepped: StepReply, turn: Turn, began: float) -> StepResult:
        result = super()._record_step(stepped, turn, began)
        if self.roles and "rewards" in result.info:
            self._reward_players(result.info["rewards"])
        return result

    async def _run_environment_roles(self, result: StepResult, turn: Turn, *, is_opening: bool = False) -> StepResult:
        """Play the environment's roles until the agent's turn; return the latest result with the summed reward."""
        acting = self.turns.acting
        try:
            while not result.done and self.player in self._environment_roles.roles:
                words = await self._environment_roles.respond(str(self.player), self._cut(result.observation))
                began = self.turns.waits.clock()
                answered = self._record_step(await self.environment.step(encodable(words)), turn, began)
                facts = {**answered.info, "valid": result.info.get("valid", True)}
                result = replace(answered, reward=result.reward + answered.reward, info=facts)
        except (EpisodeEnd, AgentRLError) as error:
            self._role_error = error
            if is_opening and isinstance(error, EpisodeEnd) and error.outcome is Outcome.TRUNCATED_TOKENS:
                raise UsageError(
                    f"role {self.player} of environment {self.spec.name} has no room for its first answer",
                    got=f"agent.max_tokens {self.turns.budget.limits.max_tokens}",
                    expected="more tokens: its instructions use all of them",
                ) from error
            raise
        finally:
            self.turns.acting = acting
        return result

    async def try_action(self, action: str) -> StepResult:
        """Take an action, and restore the environment's state."""
        if self._environment_roles.roles:
            roles = ", ".join(self._environment_roles.roles)
            raise UsageError(f"an action cannot be tried if roles of the environment answer it: {roles}")
        return await super().try_action(action)

    def tools_of(self, role: str = SOLE_ROLE) -> Mapping[str, Tool]:
        """Return the tools of a role; a role that others call may call roles only if its own tools name them."""
        return self._tools_for(self._find_role(role)) if role != SOLE_ROLE or self.roles else self.tools

    def _tools_for(self, role: AgentRole) -> Mapping[str, Tool]:
        if role.tools is not None:
            return role.tools
        if not isinstance(self._configured.get(role.name), RoleTool):
            return self.tools
        return {name: tool for name, tool in self.tools.items() if not isinstance(tool, RoleTool)}

    def _callable_tools(self) -> Mapping[str, Tool]:
        turn = self.turns.acting
        return self.tools if turn is None or turn.role not in self.roles else self.tools_of(turn.role)

    async def _carry_out(
        self, calls: Sequence[ToolCall], tools: Mapping[str, Tool], turn: Turn
    ) -> list[ToolCallResult]:
        """Call tools, or let a role answer; the calling turn is the acting one again afterwards."""
        tool = tools.get(calls[0].name)
        if not isinstance(tool, RoleTool):
            return await super()._carry_out(calls, tools, turn)
        caller = self.turns.acting
        try:  # the role's own turns count its seconds; calls of roles are never parallel
            return [await ask_role(self, tool, calls[0], self._tools_for(self.roles[tool.name]))]
        finally:
            self.turns.acting = caller

    def open(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None, role: str = SOLE_ROLE
    ) -> Conversation:
        """Start a conversation of a role; its messages are kept until the episode is scored."""
        if role == SOLE_ROLE and not self.roles:
            return super().open(messages, tools=tools)
        found = self._find_role(role)
        if found.system_prompt is not None:
            rest = messages[1:] if messages and messages[0].role == "system" else messages
            messages = [system(found.system_prompt), *rest]
        if tools is None:
            tools = list(self._tools_for(found).values()) if self.loop.offers_tools else ()
        policy = self._role_policies.get(role) or self._policy.for_role(role)
        opened = policy.open(self, messages, tools)
        return RoleConversation(RecordedConversation(opened, self.turns.trajectory, messages), found)

    def _open_for_environment(self, role: AgentRole, messages: Sequence[Message]) -> Conversation:
        """Start a conversation of one of the environment's roles, which scorers do not see."""
        policy = self._role_policies.get(role.name) or self._policy.for_role(role.name, of_environment=True)
        return RoleConversation(policy.open(self, messages, ()), role)

    def _find_role(self, name: str) -> AgentRole:
        if name not in self.roles:
            raise unknown_role(self.loop, name, self.roles)
        return self.roles[name]

    def give_reward(
        self, reward: float, *, turn: int | None = None, role: str | None = None, success: bool | None = None
    ) -> None:
        """Add to the reward of a turn, of all roles or of one."""
        if role is not None:
            self._reward_role(self._find_role(role), reward, turn)
            if success is None:
                return
            reward = 0.0
        super().give_reward(reward, turn=turn, success=success)

    def _reward_role(self, role: AgentRole, reward: float, number: int | None) -> None:
        """Add to the reward of a role's turn; if the role does not train or has no turn, only a metric counts it."""
        value = bounded_reward(reward)
        if value is None:
            raise UsageError(f"invalid reward of role {role.name}", got=repr(reward), expected=A_REWARD)
        own = [turn for turn in self.turns.trajectory.turns if turn.role == role.name]
        chosen = own[-1:] if number is None else [turn for turn in own if turn.index == number]
        if number is not None and not chosen:
            expected = ", ".join(str(turn.index) for turn in own) or "none: it has not answered yet"
            raise UsageError(f"turn {number} is not a turn of role {role.name}", got=number, expected=expected)
        self.turns.add_metric(f"reward_of/{base_role(role.name)}", value)
        if role.trained and chosen:
            chosen[0].reward += value
            chosen[0].own_reward += value

    def _reward_players(self, rewards: object) -> None:
        """Add the rewards of players to the roles that play them."""
        if not isinstance(rewards, Mapping):
            raise EnvironmentFailure(
                f'info["rewards"] of environment {self.spec.name} cannot be used',
                got=repr(rewards),
                expected="a reward for each player, by name",
            )
        for player, reward in rewards.items():
            if player in self._environment_roles.roles:
                continue
            value = bounded_reward(reward)
            if value is None:
                raise EnvironmentFailure(
                    f"environment {self.spec.name} gave player {player} an invalid reward",
                    got=repr(reward),
                    expected=A_REWARD,
                )
            self._reward_role(self._find_role(self.players.get(player, player)), value, None)

    async def close(self) -> None:
        """Release what policies and tools keep for the episode."""
        for policy in self._role_policies.values():
            await self._end_policy(policy)
        await super().close()


class RoleConversation(Conversation):
    """Conversation whose turns have the name and the settings of a role."""

    def __init__(self, conversation: Conversation, role: AgentRole) -> None:
        self._conversation = conversation
        self._role = role

    def add(self, *messages: Message) -> None:
        """Append messages."""
        self._conversation.add(*messages)

    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Let the role take a turn."""
        role = self._role
        limits = [limit for limit in (options.max_tokens, role.max_answer_tokens) if limit is not None]
        trained = options.trained and role.trained
        options = replace(options, role=role.name, trained=trained, max_tokens=min(limits, default=None))
        return await self._conversation.generate(prefill=prefill, options=options)

    def fork(self, messages: Sequence[Message]) -> Conversation:
        """Return a conversation of the role with a rewritten history."""
        return RoleConversation(self._conversation.fork(messages), self._role)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSetup:
    """One role of a run with its tools and policy."""

    role: AgentRole
    tools: Sequence[Tool | Toolset] | None = None
    """Tools of the role; ``None`` for the episode's tools."""
    policy: EpisodePolicy | None = None
    """Policy that answers in place of the run's policy; such a role does not train."""
    as_tool: RoleTool | None = None
    """Tool that other roles use to call it; ``None`` for a role of the loop."""


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
        """Tools that roles use to call other roles."""
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


async def _make_role(name: str, setup: RoleSetup | None, *, trained: bool = True) -> AgentRole:
    """Return a role with the tools that it may call; `trained` applies to a role without a setup."""
    if setup is None:
        return AgentRole(name=name, trained=trained)
    if setup.tools is None:
        return setup.role
    return replace(setup.role, tools={tool.name: tool for tool in await list_tools(setup.tools)})
