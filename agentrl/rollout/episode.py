"""The runtime's episode: what an agent loop uses, with budgets, deadlines and records."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.agent_loop import (
    PLAIN_TURN,
    AgentLoop,
    AgentRole,
    Answer,
    Conversation,
    Episode,
    EpisodeEnd,
    TurnOptions,
)
from agentrl.env import EnvironmentSpec, StepResult
from agentrl.errors import (
    A_REWARD,
    AgentRLError,
    EngineError,
    EnvironmentFailure,
    Outcome,
    UsageError,
    bounded_reward,
    did_you_mean,
)
from agentrl.message import Content, ContentPart, Message, TextPart, ToolCall, encodable, system, text_of, tool_result
from agentrl.remote.env_methods import ADMISSIBLE_ACTIONS, RESTORE, SNAPSHOT, STATE_KEY, STEP
from agentrl.rollout.env_pool import EnvHandle
from agentrl.rollout.environment_roles import EnvironmentRoles
from agentrl.rollout.few_shot import with_shots
from agentrl.rollout.policies import EpisodePolicy
from agentrl.rollout.role_tools import RoleTool, ask_role
from agentrl.rollout.tools import EpisodeTools, ToolCallResult, ToolLimits, all_of, batches
from agentrl.rollout.turns import TurnLog
from agentrl.sandbox import Sandbox
from agentrl.task import Task
from agentrl.tool import Tool
from agentrl.trajectory import SOLE_ROLE, Trajectory, Turn

_log = logging.getLogger(__name__)


class RuntimeEpisode(Episode):
    """The runtime's `Episode`; the instructions in `spec` may come from the config."""

    def __init__(
        self,
        *,
        task: Task,
        spec: EnvironmentSpec,
        environment: EnvHandle,
        policy: EpisodePolicy,
        loop: AgentLoop,
        tools: Sequence[Tool],
        turns: TurnLog,
        tool_limits: ToolLimits,
        make_sandbox: Callable[[], Sandbox] | None = None,
        shots: Sequence[Message] = (),
        roles: Mapping[str, AgentRole] | None = None,
        role_policies: Mapping[str, EpisodePolicy] | None = None,
        environment_roles: Mapping[str, AgentRole] | None = None,
    ) -> None:
        self.task = task
        self.spec = spec
        self.environment = environment
        self.loop = loop
        self.turns = turns
        self._configured = {tool.name: tool for tool in tools}
        self.tools = self._configured
        self.roles = roles or {}
        self.player_names: Sequence[str] = ()
        self.player: str | None = None
        self.players: Mapping[str, str] = {}
        self._role_policies = role_policies or {}
        self._environment_roles = EnvironmentRoles(spec.name, environment_roles or {}, self._open_for_environment)
        self._role_error: EpisodeEnd | AgentRLError | None = None
        """Exception that kept a role of the environment from answering."""
        self._stepping = asyncio.Lock()
        self.action_hint = ""
        self.goal: str | None = None
        self.observation: Content = ""
        self.last_result: StepResult | None = None
        self.info: dict[str, Any] = {}
        """Newest values of the info of reset and steps."""
        self.tool_reward = 0.0
        """Sum of the rewards of configured tools, without those of the environment's own tools."""
        self._ended_by_tool: Outcome | None = None
        self._policy = policy
        self._shots = shots
        opens_with_task = task.messages and loop.opens_with_task and not self.roles
        self._history = task.messages[:-1] if opens_with_task else None
        """Messages of the task before its last one, if conversations begin with them."""
        self._episode_tools = EpisodeTools(
            turns, tool_limits, make_sandbox=make_sandbox, task_id=task.id, seed=task.seed, act=self._act_for_tool
        )

    async def reset(self) -> Content:
        """Reset the environment for the task."""
        result = await self.environment.reset(self.task)
        self.tools = {**self._configured, **self._own_tools(result.tools)}
        self.action_hint = self._cut_text(result.action_hint)
        if not (self.action_hint or self.spec.answer_format or self.task.prompt or result.tools):
            _warn_without_instructions(self.spec.name)
        goal = result.info.get("goal")
        self.goal = None if goal is None else self._cut_text(str(goal))
        self.turns.state_key = result.state_key
        self.info.update(self._environment_roles.take_instructions(result.info))
        players = result.info.get("players", ())
        self.player_names = tuple(name for name in players if name not in self._environment_roles.roles)
        self.player = result.info.get("player")
        self.observation = result.observation
        opened = StepResult(
            observation=result.observation, reward=0.0, terminated=False, truncated=False, info=result.info
        )
        first = await self._run_environment_roles(opened, None)
        prompt = self.task.messages[-1].text if self._history is not None else self.task.prompt
        return _after_prompt(prompt, self._cut(first.observation))

    async def step(self, action: str) -> StepResult:
        """Take an action."""
        async with self._stepping:
            return await self._step(action)

    async def _step(self, action: str) -> StepResult:
        if self.player in self._environment_roles.roles:  # the environment would take the action for this role's answer
            raise self._role_error or EngineError(f"role {self.player} has not answered yet", got=f"action {action!r}")
        turn = self.turns.require_latest()
        self.turns.budget.check_time()
        self._environment_roles.note_agent_turn()
        result = await self._take(action, turn)
        refused = not result.info.get("valid", True)
        if refused:
            (self.turns.acting or turn).valid = False
            self.turns.counters.invalid_actions += 1
            self.turns.add_metric("invalid_actions", 1)
        result = await self._run_environment_roles(result, turn)
        shown = self._cut(result.observation)
        self.last_result = result if shown is result.observation else replace(result, observation=shown)
        if refused and not result.done:
            self.turns.budget.count_refused()
        return self.last_result

    async def try_action(self, action: str) -> StepResult:
        """Take an action, and restore the environment's state."""
        if self._environment_roles.roles:
            roles = ", ".join(self._environment_roles.roles)
            raise UsageError(f"an action cannot be tried if roles of the environment answer it: {roles}")
        async with self._stepping:
            try:
                before = await self.environment.call(SNAPSHOT)
            except UsageError as error:
                raise UsageError(
                    f"environment {self.spec.name} cannot try an action",
                    got=str(error),
                    expected="an environment with snapshot() and restore()",
                ) from error
            stepped = await self.environment.call(STEP, encodable(action))
            await self.environment.call(RESTORE, before)
        return stepped.result

    async def _take(self, action: str, turn: Turn | None) -> StepResult:
        """Step the environment; `turn` gets the reward and the seconds."""
        clock = self.turns.waits.clock
        began = clock()
        stepped = await self.environment.step(encodable(action))
        result = stepped.result
        if turn is not None:
            turn.timings.env += clock() - began
            turn.reward += result.reward
        if self.roles and "rewards" in result.info:
            self._reward_players(result.info["rewards"])
        for name, value in result.info.get("reward_components", {}).items():
            self._add_component(name, float(value))
        self.turns.state_key = stepped.state_key
        self.info.update(result.info)
        self.player = result.info.get("player")
        self.observation = result.observation
        return result

    async def _run_environment_roles(self, result: StepResult, turn: Turn | None) -> StepResult:
        """Play the environment's roles until the agent's turn; return the latest result with the summed reward."""
        acting = self.turns.acting
        try:
            while not result.done and self.player in self._environment_roles.roles:
                words = await self._environment_roles.speak(str(self.player), self._cut(result.observation))
                answered = await self._take(words, turn)
                facts = {**answered.info, "valid": result.info.get("valid", True)}
                result = replace(answered, reward=result.reward + answered.reward, info=facts)
        except (EpisodeEnd, AgentRLError) as error:
            self._role_error = error
            if turn is None and isinstance(error, EpisodeEnd) and error.outcome is Outcome.TRUNCATED_TOKENS:
                raise UsageError(
                    f"role {self.player} of environment {self.spec.name} has no room for its first answer",
                    got=f"agent.max_tokens {self.turns.budget.limits.max_tokens}",
                    expected="more tokens: its instructions use all of them",
                ) from error
            raise
        finally:
            self.turns.acting = acting
        if turn is None and (result.done or result.reward):
            raise EnvironmentFailure(
                f"environment {self.spec.name} ended, or gave a reward, before the agent could act",
                got=f"reward {result.reward}, done {result.done}",
            )
        return result

    async def call_tool(self, call: ToolCall) -> Message:
        """Call a tool; errors that the policy can fix are returned as text."""
        (message,) = await self.call_tools([call])
        return message

    async def call_tools(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Call tools, parallel ones concurrently; the results are in the order of the calls."""
        tools = self._tools_of(self.turns.acting)
        return [message for batch in batches(calls, tools) for message in await self._call_together(batch, tools)]

    def _tools_of(self, turn: Turn | None) -> Mapping[str, Tool]:
        """Return the tools that the role of a turn may call."""
        return self.tools if turn is None or turn.role not in self.roles else self.tools_of(turn.role)

    def tools_of(self, role: str = SOLE_ROLE) -> Mapping[str, Tool]:
        """Return the tools of a role; a role that others call may call roles only if its own tools name them."""
        return self._tools_for(self._role(role)) if role != SOLE_ROLE or self.roles else self.tools

    def _tools_for(self, role: AgentRole) -> Mapping[str, Tool]:
        if role.tools is not None:
            return role.tools
        if not isinstance(self._configured.get(role.name), RoleTool):
            return self.tools
        return {name: tool for name, tool in self.tools.items() if not isinstance(tool, RoleTool)}

    async def _call_together(self, calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> list[Message]:
        turn = self.turns.require_latest()
        self.turns.budget.check_time()
        clock = self.turns.waits.clock
        began = clock()
        self.turns.counters.tool_calls += len(calls)
        self.turns.add_metric("tool_calls", len(calls))
        try:
            called = await all_of([self._carry_out(call, tools) for call in calls])
        finally:
            if not isinstance(tools.get(calls[0].name), RoleTool):  # the role's own turns count its seconds
                turn.timings.tool += clock() - began
        return [await self._record(turn, call, one) for call, one in zip(calls, called, strict=True)]

    async def _carry_out(self, call: ToolCall, tools: Mapping[str, Tool]) -> ToolCallResult:
        """Call a tool, or let a role answer; the calling turn is the acting one again afterwards."""
        tool = tools.get(call.name)
        if not isinstance(tool, RoleTool):
            return await self._episode_tools.carry_out(call, tools)
        caller = self.turns.acting
        try:
            return await ask_role(self, tool, call, self._tools_for(self.roles[tool.name]))
        finally:
            self.turns.acting = caller

    async def _record(self, turn: Turn, call: ToolCall, called: ToolCallResult) -> Message:
        """Record the result of a call and return its message; raise `EpisodeEnd` if it ends the episode."""
        result = called.result
        if called.failed:
            self.turns.counters.tool_errors += 1
            self.turns.add_metric("tool_errors", 1)
        if called.tool is not None:
            self._count(called.tool.name, called)
            self.turns.counters.incidents.count_call(called.tool.name, *called.own_error)
        if result.reward:
            turn.reward += result.reward
            if call.name in self._configured:  # rewards of the environment's own tools are part of the task
                self.tool_reward += result.reward
            self._add_component(f"tool/{call.name}", result.reward)
        if self._ended_by_tool is not None:
            raise EpisodeEnd(self._ended_by_tool)
        if called.tool is not None and not called.failed and (called.tool.stop or result.stop):
            raise EpisodeEnd(Outcome.STOPPED_BY_TOOL)
        self.turns.state_key = None  # a configured tool may lead to any state
        if call.name in self.tools and call.name not in self._configured:
            self.observation = result.text
            self.turns.state_key = await self.environment.call(STATE_KEY)
        text = self._cut_text(result.text, None if called.tool is None else called.tool.rules.max_tokens)
        if called.tool is not None and text != result.text:
            self.turns.add_metric(f"tool/{call.name}/cut", 1)
        return tool_result(call, text)

    def _count(self, name: str, called: ToolCallResult) -> None:
        counts = {"calls": 1.0, "errors": float(called.failed), "kept": float(called.was_kept)}
        for metric, value in {**counts, "seconds": called.seconds, **called.result.metrics}.items():
            if value or metric in called.result.metrics:
                self.turns.add_metric(f"tool/{name}/{metric}", value)

    async def _act_for_tool(self, action: str) -> str:
        """Take an action for a tool; if the environment is done, the episode ends with the tool's call."""
        result = await self.step(action)
        if result.done:
            self._ended_by_tool = outcome_of(result)
        return text_of(result.observation)

    def open(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None, role: str = SOLE_ROLE
    ) -> Conversation:
        """Start a conversation; its messages are kept until the episode is scored."""
        if role != SOLE_ROLE or self.roles:
            return self._open_for(self._role(role), messages, tools)
        if tools is None and self.loop.offers_tools and self.tools:
            name = type(self.loop).__name__
            raise UsageError(
                f"agent loop {name} offers tools but opens a conversation without them",
                got=f"episode.open(messages), with {', '.join(self.tools)} in episode.tools",
                expected="episode.open(messages, tools=list(episode.tools.values()))",
                hint=f"pass tools=() for a conversation without tools, or set {name}.offers_tools = False",
            )
        messages = with_history(messages, self._history)
        shown = with_shots(messages, self._shots)
        opened = self._policy.open(self, shown, tools or ())
        return RecordedConversation(opened, self.turns.trajectory, messages, self._shots, history=self._history)

    def _open_for(
        self, role: AgentRole, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> RecordedConversation:
        """Start a conversation of one of several roles, without the examples of ``agent.few_shot_turns``."""
        if role.system_prompt is not None:
            rest = messages[1:] if messages and messages[0].role == "system" else messages
            messages = [system(role.system_prompt), *rest]
        if tools is None:
            tools = list(self._tools_for(role).values()) if self.loop.offers_tools else ()
        policy = self._role_policies.get(role.name) or self._policy.of_role(role.name)
        opened = policy.open(self, messages, tools)
        return RecordedConversation(opened, self.turns.trajectory, messages, role=role)

    def _open_for_environment(self, role: AgentRole, messages: Sequence[Message]) -> RecordedConversation:
        """Start a conversation of one of the environment's roles."""
        policy = self._role_policies.get(role.name) or self._policy.of_environment_role(role.name)
        opened = policy.open(self, messages, ())
        return RecordedConversation(opened, self.turns.trajectory, messages, role=role, is_kept=False)

    def _role(self, name: str) -> AgentRole:
        if name not in self.roles:
            raise UsageError(
                f"agent loop {type(self.loop).__name__} has no role {name!r}",
                got=f"role={name!r}",
                expected=", ".join(self.roles) or "a loop whose `roles` names its roles",
                hint=did_you_mean(name, list(self.roles)),
            )
        return self.roles[name]

    def write_answer(self, message: Message) -> str:
        """Return an answer as the policy's model writes it."""
        return self._policy.write_answer(message)

    async def close_tools(self) -> None:
        """Close the tools and the sandbox that the episode opened."""
        await self._episode_tools.close()

    def invalid(self, reason: str) -> None:
        """Count an unusable answer."""
        self.turns.count_invalid()

    def count_tokens(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]] = ()) -> int:
        """Return the number of tokens of a conversation's first prompt."""
        return self._policy.count(messages, schemas)

    def parts(self, text: str, max_tokens: int) -> list[str]:
        """Split a text into parts of at most `max_tokens` tokens of the policy."""
        return self._policy.split(text, max_tokens)

    def give_reward(
        self, reward: float, *, turn: int | None = None, role: str | None = None, success: bool | None = None
    ) -> None:
        """Add to the reward of a turn."""
        turns = self.turns.trajectory.turns
        if role is not None:
            self._reward_role(self._role(role), reward, turn)
            reward = 0.0
            if success is None:
                return
        found = [self.turns.require_latest()] if turn is None else [one for one in turns if one.index == turn]
        if not found:
            got = f"turn {turn}"
            raise UsageError("a reward for an unknown turn", got=got, expected=f"one of {len(turns)} turns")
        number = bounded_reward(reward)
        if number is None:
            raise UsageError("invalid reward", got=repr(reward), expected=A_REWARD)
        found[0].reward += number
        if success is not None:
            self.info["success"] = success

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
        self.turns.add_metric(f"reward_of/{role.name}", value)
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
            self._reward_role(self._role(self.players.get(player, player)), value, None)

    def keep_log(self, text: str) -> None:
        """Store text with the trajectory."""
        self.turns.trajectory.log = text

    async def admissible_actions(self) -> list[str] | None:
        """Return the actions that the environment accepts now."""
        return await self.environment.call(ADMISSIBLE_ACTIONS)

    def _own_tools(self, tools: Sequence[Tool]) -> dict[str, Tool]:
        own = {tool.name: tool for tool in tools}
        if twice := sorted(own.keys() & self._configured.keys()):
            raise UsageError(
                f"two tools with the same name in environment {self.spec.name}",
                got=f"{', '.join(twice)} from the environment and in agent.tools",
                expected="unique names",
                hint="remove it from agent.tools, or give your tool another name",
            )
        return own

    def _cut(self, content: Content) -> Content:
        if isinstance(content, str):
            return self._cut_text(content)
        content = tuple(TextPart(text=encodable(p.text)) if isinstance(p, TextPart) else p for p in content)
        text = "".join(part.text for part in content if isinstance(part, TextPart))
        shortened = self._cut_text(text)
        if shortened == text:
            return content
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, shortened, strict=False))
        return _cut_parts(content, shortened, kept=sum(1 for _ in same))

    def _cut_text(self, text: str, max_tokens: int | None = None) -> str:
        most = self.turns.limits.max_observation_tokens
        return self._policy.cut(text, most if max_tokens is None else min(most, max_tokens))

    def _add_component(self, name: str, value: float) -> None:
        components = self.turns.trajectory.reward_components
        components[name] = components.get(name, 0.0) + value


class RecordedConversation(Conversation):
    """Conversation whose messages, without examples, are kept on the trajectory for the episode's scorer."""

    def __init__(
        self,
        conversation: Conversation,
        trajectory: Trajectory,
        messages: Sequence[Message],
        shots: Sequence[Message] = (),
        role: AgentRole | None = None,
        is_kept: bool = True,
        history: Sequence[Message] | None = None,
    ) -> None:
        self._conversation = conversation
        self._history = history
        self._is_kept = is_kept
        self._role = role
        self._shots = shots
        self._trajectory = trajectory
        self._messages = list(messages)
        if is_kept:
            trajectory.conversations.append(self._messages)

    def add(self, *messages: Message) -> None:
        """Append messages."""
        self._messages.extend(messages)
        self._conversation.add(*messages)

    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Let the policy take a turn."""
        if self._role is not None:
            options = _options_of_role(options, self._role)
        answer = await self._conversation.generate(prefill=prefill, options=options)
        if not options.trained:
            self._hide()
            return answer
        self._messages.append(answer.message)
        self._trajectory.answers.append(answer.message)
        self._trajectory.completions.append(answer.opening + answer.raw_text)
        return answer

    def fork(self, messages: Sequence[Message]) -> Conversation:
        """Return a conversation with a rewritten history."""
        messages = with_history(messages, self._history)
        forked = self._conversation.fork(with_shots(messages, self._shots))
        if list(messages[: len(self._messages)]) == self._messages:  # the fork contains this conversation
            self._hide()
        return RecordedConversation(
            forked, self._trajectory, messages, self._shots, self._role, self._is_kept, history=self._history
        )

    def _hide(self) -> None:
        """Hide this conversation from scorers: another one contains its messages, or the agent did not write them."""
        kept = self._trajectory.conversations
        kept[:] = [messages for messages in kept if messages is not self._messages]


@functools.cache
def _warn_without_instructions(name: str) -> None:
    """Warn once that the agent gets no instructions."""
    _log.warning(
        "environment %s does not describe its actions: give its class an action_hint, such as 'a whole number, for "
        "example: 50', and instructions (docs/environments.md)",
        name,
    )


def _options_of_role(options: TurnOptions, role: AgentRole) -> TurnOptions:
    limits = [limit for limit in (options.max_tokens, role.max_answer_tokens) if limit is not None]
    return replace(
        options, role=role.name, trained=options.trained and role.trained, max_tokens=min(limits, default=None)
    )


def outcome_of(result: StepResult | None) -> Outcome:
    """Return the outcome of an episode whose latest step returned `result`."""
    truncated = result is not None and result.truncated and not result.terminated
    return Outcome.TRUNCATED_TURNS if truncated else Outcome.FINISHED


def _cut_parts(content: tuple[ContentPart, ...], text: str, kept: int) -> Content:
    """Return parts whose joined texts are `text`: the first `kept` characters of the content's text, then a mark."""
    parts: list[ContentPart] = []
    start, marked = 0, False
    for part in content:
        if not isinstance(part, TextPart):
            parts.append(part)
            continue
        end = start + len(part.text)
        if not marked:
            marked = end >= kept
            parts.append(TextPart(text=text[start:] if marked else part.text))
        start = end
    return tuple(parts)


def with_history(messages: Sequence[Message], history: Sequence[Message] | None) -> Sequence[Message]:
    """Put the messages of a task before a conversation's first ones; two system messages become one."""
    if not history:
        return messages
    own = [message for message in messages[:1] if message.role == "system"]
    given = [message for message in history[:1] if message.role == "system"]
    text = "\n\n".join(message.text for message in (*given, *own))
    return [*([system(text)] if text else []), *history[len(given) :], *messages[len(own) :]]


def _after_prompt(prompt: str | None, observation: Content) -> Content:
    if prompt is None:
        return observation
    if isinstance(observation, str):
        return f"{prompt}\n\n{observation}" if observation else prompt
    return (TextPart(text=f"{prompt}\n\n"), *observation)
