"""The runtime's episode: what an agent loop uses, with budgets, deadlines and records."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.agent_loop import (
    PLAIN_TURN,
    AgentLoop,
    Answer,
    Conversation,
    Episode,
    EpisodeEnd,
    TurnOptions,
    unknown_role,
)
from agentrl.env import EnvironmentSpec, StepResult
from agentrl.errors import (
    A_REWARD,
    AgentRLError,
    EngineError,
    EnvironmentFailure,
    Outcome,
    ToolError,
    UsageError,
    bounded_reward,
    shorten,
)
from agentrl.errors.deadlines import async_boundary
from agentrl.errors.foreign import await_or_abandon
from agentrl.message import Content, ContentPart, Message, TextPart, ToolCall, encodable, system, text_of, tool_result
from agentrl.remote.env_methods import (
    ADMISSIBLE_ACTIONS,
    FINAL_REWARD,
    RESTORE,
    SNAPSHOT,
    STATE_KEY,
    STEP,
    StepReply,
)
from agentrl.render.chat_template import CUT_MARK
from agentrl.rollout.env_pool import EnvHandle
from agentrl.rollout.policies import EpisodePolicy
from agentrl.rollout.tools import CallTool, EpisodeTools, ToolCallResult, batches, gather_in_order
from agentrl.rollout.turns import TurnLog
from agentrl.rollout.waits import WaitKind
from agentrl.task import Task
from agentrl.tool import Tool
from agentrl.trajectory import SOLE_ROLE, Trajectory, Turn

_log = logging.getLogger(__name__)
SESSION_END_S = 30.0
"""Deadline for ending an episode's sessions in the engine."""


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
        tools: EpisodeTools,
        turns: TurnLog,
    ) -> None:
        self.task = task
        self.spec = spec
        self.environment = environment
        self.loop = loop
        self.turns = turns
        self._episode_tools = tools
        self.carry_out: CallTool = tools.carry_out
        """Calls a tool."""
        tools.act = self._act_for_tool
        self._configured = tools.configured
        self.tools = self._configured
        self._stepping = asyncio.Lock()
        self.action_hint = ""
        self.goal: str | None = None
        self.observation: Content = ""
        self.last_result: StepResult | None = None
        self.info: dict[str, Any] = {}
        """Latest value of each key in the infos of `reset` and `step`."""
        self.tool_reward = 0.0
        """Sum of the rewards of configured tools, without those of the environment's own tools."""
        self._ended_by_tool: Outcome | None = None
        self._ended_by_own_tool = False
        """True if a tool of the environment ended the episode."""
        self._was_reset = False
        self._has_state_keys = False
        self._policy = policy
        self._history = task.messages[:-1] if task.messages and loop.opens_with_task else None
        """Messages of the task except the last one, with which every conversation begins."""

    @property
    def has_own_tools(self) -> bool:
        """True if the environment, which has been reset, has tools of its own."""
        return self.tools.keys() > self._configured.keys()

    async def reset(self) -> Content:
        """Reset the environment for the task."""
        observation = await self._reset_environment()
        self._check_instructions(self.info.get("instructions"))
        return _after_prompt(self._prompt(), self._cut(observation))

    def _prompt(self) -> Content | None:
        """Return the task's prompt without the messages that begin the conversations."""
        if self._history is not None:
            return self.task.messages[-1].content
        if any(not isinstance(message.content, str) for message in self.task.messages):
            raise UsageError(
                f"agent loop {type(self.loop).__name__} reads tasks as text only",
                got=f"task {self.task.id}, which has images",
                expected="an agent loop that opens the conversation itself, such as single_turn",
            )
        return self.task.prompt

    async def _reset_environment(self) -> Content:
        """Reset the environment, store its info, and return the agent's first observation."""
        result = await self.environment.reset(self.task)
        self._was_reset = True
        self.tools = {**self._configured, **self._check_tool_names(result.tools)}
        self.action_hint = self._cut_text(result.action_hint)
        if not (self.action_hint or self.spec.answer_format or self.task.prompt or result.tools):
            _warn_without_instructions(self.spec.name)
        goal = result.info.get("goal")
        self.goal = None if goal is None else self._cut_text(str(goal))
        self.turns.state_key = result.state_key
        self._has_state_keys = result.state_key is not None
        self.info.update(result.info)
        self.player_names = tuple(result.info.get("players", ()))
        self.player = result.info.get("player")
        self.observation = result.observation
        return result.observation

    def _check_instructions(self, found: object) -> None:
        """Check that the environment gives no private instructions to players without a policy."""
        if found and isinstance(found, Mapping):
            names = ", ".join(map(str, found))
            raise UsageError(
                f"environment {self.spec.name} has instructions for {names}, which the runtime does not play",
                got='info["instructions"] of reset',
                expected=f"roles_of in its EnvironmentSpec to include {names}",
            )

    async def step(self, action: str) -> StepResult:
        """Take an action."""
        async with self._stepping:
            if not self._was_reset:  # the environment may still be in the state of another episode
                raise UsageError(
                    f"agent loop {type(self.loop).__name__} acts before the environment is reset",
                    got=f"the action {shorten(action)}",
                    expected="await episode.reset() at the beginning of run()",
                )
            if self.is_over:
                raise UsageError(
                    f"agent loop {type(self.loop).__name__} acts after the end of the episode",
                    got=f"the action {shorten(action)} after a result with done=True",
                    expected="run() to return when a result is done",
                )
            return await self._step(action)

    @property
    def is_over(self) -> bool:
        """True if the environment's last step ended the episode."""
        return self.last_result is not None and self.last_result.done

    async def _step(self, action: str) -> StepResult:
        turn = self.turns.require_latest()
        self.turns.budget.check_time()
        result = await self._take_action(action, turn)
        shown = self._cut(result.observation)
        self.last_result = result if shown is result.observation else replace(result, observation=shown)
        if not (result.done or result.info.get("valid", True)):
            self.turns.budget.count_rejected()
        return self.last_result

    async def _take_action(self, action: str, turn: Turn) -> StepResult:
        """Take the agent's action; count it if the environment rejects it."""
        began = self.turns.waits.clock()
        result = self._record_step(await self.environment.step(encodable(action)), turn, began)
        if not result.info.get("valid", True):
            (self.turns.acting or turn).valid = False
            self.turns.counters.invalid_actions += 1
            self.turns.add_metric("invalid_actions", 1)
        return result

    async def add_final_reward(self) -> None:
        """Add the environment's reward for an episode that something else has ended, if the environment gives one."""
        turn = self.turns.latest or self.turns.acting
        if turn is None or not self._was_reset or self.is_over or self._ended_by_own_tool:
            return
        began = self.turns.waits.clock()
        found = await self.environment.call(FINAL_REWARD)
        turn.timings.env += self.turns.waits.clock() - began
        if found is not None:
            self.turns.trajectory.add_reward(turn, "environment/final_reward", found.reward)
            self._add_info(found.info)

    async def try_action(self, action: str) -> StepResult:
        """Take an action, and restore the environment's state."""
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

    def _record_step(self, stepped: StepReply, turn: Turn, began: float) -> StepResult:
        """Record a step that began at `began`; `turn` gets the reward and the seconds."""
        result = stepped.result
        turn.timings.env += self.turns.waits.clock() - began
        self.turns.trajectory.add_reward(turn, "environment/step", result.reward)
        self._add_info(result.info)
        self.turns.state_key = stepped.state_key
        self.player = result.info.get("player")
        self.observation = result.observation
        return result

    def _add_info(self, info: Mapping[str, Any]) -> None:
        for name, value in info.get("reward_components", {}).items():
            self._add_component(name, float(value))
        self.info.update(info)

    async def call_tool(self, call: ToolCall) -> Message:
        """Call a tool; errors that the policy can fix are returned as text."""
        (message,) = await self.call_tools([call])
        return message

    async def call_tools(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Call tools, parallel ones concurrently; the results are in the order of the calls."""
        tools = self._callable_tools()
        return [message for batch in batches(calls, tools) for message in await self._call_together(batch, tools)]

    def _callable_tools(self) -> Mapping[str, Tool]:
        """Return the tools that the latest answer may call."""
        return self.tools

    def tools_of(self, role: str = SOLE_ROLE) -> Mapping[str, Tool]:
        """Return the tools of the agent."""
        if role != SOLE_ROLE:
            raise unknown_role(self.loop, role)
        return self.tools

    async def _call_together(self, calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> list[Message]:
        turn = self.turns.require_latest()
        self.turns.budget.check_time()
        self.turns.counters.tool_calls += len(calls)
        self.turns.add_metric("tool_calls", len(calls))
        called = await self._carry_out(calls, tools, turn)
        return [await self._record_call(turn, call, one) for call, one in zip(calls, called, strict=True)]

    async def _carry_out(
        self, calls: Sequence[ToolCall], tools: Mapping[str, Tool], turn: Turn
    ) -> list[ToolCallResult]:
        """Call tools concurrently; `turn` gets the seconds."""
        clock = self.turns.waits.clock
        began = clock()
        try:
            return await gather_in_order([self.carry_out(call, tools) for call in calls])
        finally:
            turn.timings.tool += clock() - began

    async def _record_call(self, turn: Turn, call: ToolCall, called: ToolCallResult) -> Message:
        """Record the result of a call and return its message; raise `EpisodeEnd` if it ends the episode."""
        result = called.result
        if called.failed:
            self.turns.counters.tool_errors += 1
            self.turns.add_metric("tool_errors", 1)
        if called.tool is not None:
            self._add_tool_metrics(called.tool.name, called)
            self.turns.counters.incidents.count_call(called.tool.name, *called.own_error)
        if result.reward:
            self.turns.trajectory.add_reward(turn, f"tool/{call.name}", result.reward)
            if call.name in self._configured:  # rewards of the environment's own tools are part of the task
                self.tool_reward += result.reward
            self._add_component(f"tool/{call.name}", result.reward)
        if self._ended_by_tool is not None:
            raise EpisodeEnd(self._ended_by_tool)
        if result.success is not None:
            self._decide_success(call.name, result.success)
        ends = called.tool is not None and not called.failed and (called.tool.stop or result.stop)
        if ends or result.truncated:
            self._ended_by_own_tool = call.name not in self._configured
            raise EpisodeEnd(Outcome.STOPPED_BY_TOOL if ends else Outcome.TRUNCATED_TURNS)
        self.turns.state_key = None  # a configured tool may lead to any state
        if call.name in self.tools and call.name not in self._configured:
            self.observation = result.content
            if self._has_state_keys:
                self.turns.state_key = await self.environment.call(STATE_KEY)
        whole = result.content if self._policy.reads_images else result.text
        shown = self._cut_result(whole, None if called.tool is None else called.tool.rules.max_tokens)
        if called.tool is not None and shown != whole:
            self.turns.add_metric(f"tool/{call.name}/cut", 1)
        return tool_result(call, shown)

    def _decide_success(self, tool: str, success: bool) -> None:
        if tool in self._configured:
            raise UsageError(
                f"tool {tool} decides whether the task is solved",
                got=f"a ToolResult with success={success}",
                expected="success=None; only the environment and its own tools decide",
            )
        self.info["success"] = success

    def _add_tool_metrics(self, name: str, called: ToolCallResult) -> None:
        counts = {"calls": 1.0, "errors": float(called.failed), "kept": float(called.was_cached)}
        for metric, value in {**counts, "seconds": called.seconds, **called.result.metrics}.items():
            if value or metric in called.result.metrics:
                self.turns.add_metric(f"tool/{name}/{metric}", value)

    async def _act_for_tool(self, action: str) -> str:
        """Take an action for a tool; if the environment is done, the episode ends with the tool's call."""
        if self.is_over:
            raise ToolError("the episode has ended")
        result = await self.step(action)
        if result.done:
            self._ended_by_tool = outcome_of(result)
        return text_of(result.observation)

    def open(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None, role: str = SOLE_ROLE
    ) -> Conversation:
        """Start a conversation; its messages are kept until the episode is scored."""
        if role != SOLE_ROLE:
            raise unknown_role(self.loop, role)
        if tools is None and self.loop.offers_tools and self.tools:
            name = type(self.loop).__name__
            raise UsageError(
                f"agent loop {name} offers tools but opens a conversation without them",
                got=f"episode.open(messages), with {', '.join(self.tools)} in episode.tools",
                expected="episode.open(messages, tools=list(episode.tools.values()))",
                hint=f"pass tools=() for a conversation without tools, or set {name}.offers_tools = False",
            )
        messages = with_history(check_messages(messages), self._history)
        opened = self._policy.open(self, messages, tools or ())
        return RecordedConversation(opened, self.turns.trajectory, messages, history=self._history)

    def write_answer(self, message: Message) -> str:
        """Return an answer as the policy's model writes it."""
        return self._policy.write_answer(message)

    async def close(self) -> None:
        """Release what the policy and the tools keep for the episode; a failure of a tool is logged."""
        try:
            await self._end_policy(self._policy)
        finally:
            await self._close_tools()

    async def _end_policy(self, policy: EpisodePolicy) -> None:
        trajectory_id = self.turns.trajectory.id
        what = f"ending the sessions of {trajectory_id}"
        with self.turns.waits.on(
            WaitKind.SESSION_END, trajectory_id, "the end of its sessions in the engine", SESSION_END_S
        ):
            async with async_boundary(EngineError, what, deadline_s=SESSION_END_S):
                await await_or_abandon(policy.end(self), what)

    async def _close_tools(self) -> None:
        turns, trajectory_id = self.turns, self.turns.trajectory.id
        what = f"closing the tools of {trajectory_id}"
        try:
            deadline_s = turns.limits.tool_timeout_s
            with turns.waits.on(WaitKind.TOOL, trajectory_id, what, deadline_s):
                async with async_boundary(EnvironmentFailure, what, deadline_s=deadline_s):
                    await self._episode_tools.close()
        except AgentRLError as error:
            _log.warning("%s", error)

    def count_invalid(self, reason: str) -> None:
        """Count an unusable answer."""
        self.turns.count_invalid()

    def count_tokens(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]] = ()) -> int:
        """Return the number of tokens of a conversation's first prompt."""
        return self._policy.count(messages, schemas)

    def split_text(self, text: str, max_tokens: int) -> list[str]:
        """Split a text into parts of at most `max_tokens` tokens of the policy."""
        return self._policy.split(text, max_tokens)

    def give_reward(
        self, reward: float, *, turn: int | None = None, role: str | None = None, success: bool | None = None
    ) -> None:
        """Add to the reward of a turn."""
        if role is not None:
            raise unknown_role(self.loop, role)
        turns = self.turns.trajectory.turns
        found = [self.turns.require_latest()] if turn is None else [one for one in turns if one.index == turn]
        if not found:
            got = f"turn {turn}"
            raise UsageError("a reward for an unknown turn", got=got, expected=f"one of {len(turns)} turns")
        number = bounded_reward(reward)
        if number is None:
            raise UsageError("invalid reward", got=repr(reward), expected=A_REWARD)
        self.turns.trajectory.add_reward(found[0], "agent_loop", number)
        if success is not None:
            self.info["success"] = success

    def keep_log(self, text: str) -> None:
        """Store text with the trajectory."""
        self.turns.trajectory.log = text

    async def admissible_actions(self) -> list[str] | None:
        """Return the actions that the environment accepts now."""
        return await self.environment.call(ADMISSIBLE_ACTIONS)

    def _check_tool_names(self, tools: Sequence[Tool]) -> dict[str, Tool]:
        own = {tool.name: tool for tool in tools}
        if twice := sorted(own.keys() & self._configured.keys()):
            raise UsageError(
                f"two tools with the same name in environment {self.spec.name}",
                got=f"{', '.join(twice)} from the environment and in agent.tools",
                expected="unique names",
                hint="remove it from agent.tools, or give your tool another name",
            )
        return own

    def _cut(self, content: Content, max_tokens: int | None = None) -> Content:
        if isinstance(content, str):
            return self._cut_text(content, max_tokens)
        content = tuple(TextPart(text=encodable(p.text)) if isinstance(p, TextPart) else p for p in content)
        text = "".join(part.text for part in content if isinstance(part, TextPart))
        shortened = self._cut_text(text, max_tokens)
        if shortened == text:
            return content
        return _cut_parts(content, shortened, kept=_common_length(text, shortened))

    def _cut_text(self, text: str, max_tokens: int | None = None) -> str:
        most = self.turns.limits.max_observation_tokens
        return self._policy.cut(text, most if max_tokens is None else min(most, max_tokens))

    def _cut_result(self, content: Content, max_tokens: int | None) -> Content:
        """Cut a tool's result; a text loses its middle, because errors, summaries and exit codes are at the end."""
        if not isinstance(content, str):
            return self._cut(content, max_tokens)
        shortened = self._cut_text(content, max_tokens)
        if shortened == content:
            return content
        size = _common_length(content, shortened) // 2
        begin = content[:size]
        while size:
            shown = f"{begin}{CUT_MARK.format(len(content) - len(begin) - size)}\n{content[-size:]}"
            if self._cut_text(shown, max_tokens) == shown:
                return shown
            size = size * 7 // 8
        return shortened

    def _add_component(self, name: str, value: float) -> None:
        components = self.turns.trajectory.reward_components
        components[name] = components.get(name, 0.0) + value


class RecordedConversation(Conversation):
    """Conversation whose messages are kept on the trajectory for the episode's scorer."""

    def __init__(
        self,
        conversation: Conversation,
        trajectory: Trajectory,
        messages: Sequence[Message],
        history: Sequence[Message] | None = None,
    ) -> None:
        self._conversation = conversation
        self._history = history
        self._trajectory = trajectory
        self._messages = list(messages)
        self._is_answering = False
        trajectory.conversations.append(self._messages)

    def add(self, *messages: Message) -> None:
        """Append messages."""
        self._messages.extend(check_messages(messages))
        self._conversation.add(*messages)

    async def generate(self, *, prefill: str = "", options: TurnOptions = PLAIN_TURN) -> Answer:
        """Let the policy take a turn."""
        if self._is_answering:
            raise UsageError(
                "the agent loop asks for two answers of one conversation at the same time",
                expected="one answer after the other",
                hint="open or fork a conversation for each concurrent answer",
            )
        self._is_answering = True
        try:
            answer = await self._conversation.generate(prefill=prefill, options=options)
        finally:
            self._is_answering = False
        if not options.trained:
            self._hide()
            return answer
        self._messages.append(answer.message)
        self._trajectory.answers.append(answer.message)
        self._trajectory.completions.append(answer.opening + answer.raw_text)
        return answer

    def fork(self, messages: Sequence[Message]) -> Conversation:
        """Return a conversation with a rewritten history."""
        messages = with_history(check_messages(messages), self._history)
        forked = self._conversation.fork(messages)
        if list(messages[: len(self._messages)]) == self._messages:  # the fork contains this conversation
            self._hide()
        return RecordedConversation(forked, self._trajectory, messages, history=self._history)

    def _hide(self) -> None:
        """Hide this conversation from scorers: another one contains its messages, or it is not the agent's."""
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


def outcome_of(result: StepResult | None) -> Outcome:
    """Return the outcome of an episode whose latest step returned `result`."""
    truncated = result is not None and result.truncated and not result.terminated
    return Outcome.TRUNCATED_TURNS if truncated else Outcome.FINISHED


def _common_length(text: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
    return sum(1 for _ in same)


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


def check_messages(messages: object) -> Sequence[Message]:
    """Check what an agent loop puts into a conversation.

    Raises:
        UsageError: it is not a list of messages.
    """
    listed: Sequence[Any] = messages if isinstance(messages, Sequence) and not isinstance(messages, str) else [messages]
    for message in listed:
        if not isinstance(message, Message):
            raise UsageError(
                "the agent loop puts something else than messages into a conversation",
                got=f"{type(message).__name__} {shorten(message)}",
                expected="messages of agentrl.message: user(text), system(text), or those of call_tools()",
            )
    return listed


def with_history(messages: Sequence[Message], history: Sequence[Message] | None) -> Sequence[Message]:
    """Prepend a task's messages to a conversation's first messages; merge two system messages."""
    if not history:
        return messages
    own = [message for message in messages[:1] if message.role == "system"]
    given = [message for message in history[:1] if message.role == "system"]
    text = "\n\n".join(message.text for message in (*given, *own))
    return [*([system(text)] if text else []), *history[len(given) :], *messages[len(own) :]]


def _after_prompt(prompt: Content | None, observation: Content) -> Content:
    if prompt is None or not observation:
        return observation if prompt is None else prompt
    if isinstance(prompt, str) and isinstance(observation, str):
        return f"{prompt}\n\n{observation}"
    first = (TextPart(text=f"{prompt}\n\n"),) if isinstance(prompt, str) else (*prompt, TextPart(text="\n\n"))
    return (*first, *((TextPart(text=observation),) if isinstance(observation, str) else observation))
