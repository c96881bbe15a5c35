"""One episode: what an agent loop may use, with budgets, deadlines and bookkeeping behind it."""

from __future__ import annotations

import asyncio
import difflib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from agentrl.agent_loop import AgentLoop, Conversation, Episode, EpisodeEnd
from agentrl.env import EnvironmentSpec, StepResult
from agentrl.errors import AgentRLError, Outcome, ToolError, UsageError
from agentrl.message import Content, ContentPart, Message, TextPart, ToolCall, tool_result
from agentrl.rollout.environments import HostedEnvironment
from agentrl.rollout.speaker import Speaker
from agentrl.rollout.stall import WaitKind
from agentrl.rollout.turns import TurnLog
from agentrl.task import Task
from agentrl.tool import Tool


class RuntimeEpisode(Episode):
    """The runtime's `Episode`.

    Args:
        task: What it is about.
        spec: The environment's entry, with the instructions that the config may have replaced.
        environment: Borrowed for this episode.
        speaker: Who answers.
        loop: The loop that will run.
        tools: The configured tools.
        turns: The episode's turns and budgets.
        stack: Closes stateful tools at the end.
    """

    def __init__(
        self,
        *,
        task: Task,
        spec: EnvironmentSpec,
        environment: HostedEnvironment,
        speaker: Speaker,
        loop: AgentLoop,
        tools: Sequence[Tool],
        turns: TurnLog,
        stack: AsyncExitStack,
    ) -> None:
        self.task = task
        self.spec = spec
        self.environment = environment
        self.loop = loop
        self.turns = turns
        self._configured = {tool.name: tool for tool in tools}
        self.tools = self._configured
        self.action_hint = ""
        self.goal: str | None = None
        self.observation: Content = ""
        self.last_result: StepResult | None = None
        """What the latest step led to."""
        self.info: dict[str, Any] = {}
        """Everything that reset and steps told, newest values."""
        self._speaker = speaker
        self._stack = stack
        self._bound: dict[str, Callable[..., Any]] = {}

    async def reset(self) -> Content:
        """Reset the environment for the task.

        Raises:
            UsageError: the environment brings a tool of a configured one's name.
        """
        result = await self.environment.reset(self.task)
        self.tools = {**self._configured, **self._own_tools(result.tools)}
        self.action_hint = result.action_hint
        self.goal = result.info.get("goal")
        self.turns.state_key = result.state_key
        self.info.update(result.info)
        self.observation = result.observation
        return _after_prompt(self.task.prompt, self._cut(result.observation))

    async def step(self, action: str) -> StepResult:
        """Take an action."""
        turn = self.turns.require_latest()
        self.turns.budget.check_time()
        clock = self.turns.recorders.waits.clock
        began = clock()
        stepped = await self.environment.step(action)
        turn.timings.env += clock() - began
        result = stepped.result
        turn.reward += result.reward
        refused = not result.info.get("valid", True)
        if refused:
            turn.valid = False
            self.turns.recorders.counters.invalid_actions += 1
            self.turns.add_metric("invalid_actions", 1)
        for name, value in result.info.get("reward_components", {}).items():
            components = self.turns.trajectory.reward_components
            components[name] = components.get(name, 0.0) + float(value)
        self.turns.state_key = stepped.state_key
        self.info.update(result.info)
        self.observation = result.observation
        self.last_result = StepResult(
            observation=self._cut(result.observation),
            reward=result.reward,
            terminated=result.terminated,
            truncated=result.truncated,
            info=result.info,
        )
        if refused and not result.done:
            self.turns.budget.count_refused()
        return self.last_result

    async def call_tool(self, call: ToolCall) -> Message:
        """Call a tool; what the policy can mend comes back as text."""
        turn = self.turns.require_latest()
        self.turns.budget.check_time()
        clock = self.turns.recorders.waits.clock
        began = clock()
        self.turns.recorders.counters.tool_calls += 1
        self.turns.add_metric("tool_calls", 1)
        failed = False
        try:
            text = await self._tool_text(call)
        except ToolError as error:
            text, failed = f"Error: {error}", True
            self.turns.recorders.counters.tool_errors += 1
            self.turns.add_metric("tool_errors", 1)
        finally:
            turn.timings.tool += clock() - began
        if not failed and self.tools[call.name].stop:
            raise EpisodeEnd(Outcome.STOPPED_BY_TOOL)
        self.turns.state_key = None  # the state that a configured tool leads to is what it says
        if call.name in self.tools and call.name not in self._configured:
            self.observation = text
            self.turns.state_key = await self.environment.state_key()
        return tool_result(call, self._cut_text(text))

    def open(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Conversation:
        """Start a conversation."""
        return self._speaker.open(self, messages, tools)

    def invalid(self, reason: str) -> None:
        """Count an answer that could not be used."""
        self.turns.count_invalid()

    async def admissible_actions(self) -> list[str] | None:
        """What the environment accepts now."""
        return await self.environment.admissible_actions()

    def _own_tools(self, tools: Sequence[Tool]) -> dict[str, Tool]:
        own = {tool.name: tool for tool in tools}
        if twice := sorted(own.keys() & self._configured.keys()):
            raise UsageError(
                f"two tools of one name in environment {self.spec.name}",
                got=f"{', '.join(twice)} from the environment, and in agent.tools",
                expected="one tool of a name",
                hint="leave it out of agent.tools, or give your tool another name",
            )
        return own

    async def _tool_text(self, call: ToolCall) -> str:
        tool = self.tools.get(call.name)
        if tool is None:
            near = difflib.get_close_matches(call.name, self.tools, n=1)
            hint = f"did you mean {near[0]}?" if near else None
            raise ToolError(f"there is no tool {call.name!r}", expected=", ".join(self.tools), hint=hint)
        limit = self.turns.limits.tool_timeout_s
        deadline = asyncio.timeout(limit)
        try:
            with self.turns.recorders.waits.on(WaitKind.TOOL, self.turns.trajectory.id, call.name):
                async with deadline:
                    if call.name not in self._bound:
                        self._bound[call.name] = await tool.open(self._stack)
                    return await tool.call(self._bound[call.name], call.arguments)
        except (AgentRLError, EpisodeEnd):
            raise
        except Exception as error:
            failed = f"did not answer in {limit:g} s" if deadline.expired() else f"failed ({type(error).__name__})"
            raise ToolError(f"{call.name} {failed}") from error

    def _cut(self, content: Content) -> Content:
        if isinstance(content, str):
            return self._cut_text(content)
        text = "".join(part.text for part in content if isinstance(part, TextPart))
        shortened = self._cut_text(text)
        if shortened == text:
            return content
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, shortened, strict=False))
        return _shortened(content, shortened, kept=sum(1 for _ in same))

    def _cut_text(self, text: str) -> str:
        return self._speaker.cut(text, self.turns.limits.max_observation_tokens)


def _shortened(content: tuple[ContentPart, ...], text: str, kept: int) -> Content:
    """Parts whose texts together are `text`: the first `kept` characters of theirs, then a mark."""
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


def _after_prompt(prompt: str | None, observation: Content) -> Content:
    if prompt is None:
        return observation
    if isinstance(observation, str):
        return f"{prompt}\n\n{observation}" if observation else prompt
    return (TextPart(text=f"{prompt}\n\n"), *observation)
