"""Messages and tool calls; the environment's actions are a tool, too."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

from agentrl.agent_loop import AgentLoop, Answer, Conversation, Episode
from agentrl.errors import ToolError, UsageError
from agentrl.message import Content, Message, ToolCall, tool_result, user
from agentrl.tool import Tool

from .prompting import action_list, goal_of, opening, with_lines


@functools.lru_cache(maxsize=256)
def action_tool(name: str, hint: str) -> Tool:
    """Return the tool that stands for the environment's `step`; the loop itself carries it out."""

    def act(action: str) -> str:
        return action

    act.__doc__ = f"Take an action in the environment. {hint}\n\nArgs:\n    action: The action, as text."
    return Tool(act, name=name, inline=True)


class ToolCalling(AgentLoop):
    """The policy calls tools, several per turn if it likes, until the environment or a tool ends the episode.

    A text-action environment's actions are called like a tool. An environment that brings tools of its own and has no
    ``action_hint`` is acted on through those; there, an answer without a call is said to the environment, which judges
    it or replies.

    Args:
        action_name: The name of the tool that takes actions.
        list_actions: List the admissible actions after each observation, where the environment tells them.
        restate_goal: Repeat the goal after each observation (see `ReactText`).
        offer: Names of the environment's own tools that the policy gets; all when left out. Fewer make a shorter
            prompt, and a smaller task.
    """

    offers_tools = True
    follow_ups = ("tool",)

    def __init__(
        self,
        *,
        action_name: str = "act",
        list_actions: bool = False,
        restate_goal: bool = False,
        offer: Sequence[str] | None = None,
    ) -> None:
        self.action_name = action_name
        self.list_actions = list_actions
        self.restate_goal = restate_goal
        self.offer = offer

    async def run(self, episode: Episode) -> None:
        """Play one episode.

        Raises:
            UsageError: a tool is called like the one that takes actions, or one to offer is not there.
        """
        configured = set(episode.tools)
        first = await episode.reset()
        if self.offer is not None:
            self._withhold(episode, configured)
        has_actions = bool(episode.action_hint) or set(episode.tools) == configured
        act = action_tool(self.action_name, episode.action_hint) if has_actions else None
        if act is not None and act.name in episode.tools:
            raise UsageError(
                "a tool has the name of the tool that takes actions",
                got=act.name,
                expected="a name of its own",
                hint="set agent.options={action_name: …}",
            )
        tools = [*episode.tools.values(), *([act] if act else [])]
        conversation = episode.open(opening([_instructions(episode)], await self._shown(episode, first)), tools=tools)
        goal = goal_of(episode, first) if self.restate_goal else ""
        while True:
            answer = await conversation.generate()
            if not answer.tool_calls and not answer.problems and act is None:
                result = await episode.step(answer.text)
                if result.done:
                    return
                conversation.add(user(await self._shown(episode, result.observation, goal)))
                continue
            if await self._take_turn(episode, conversation, answer, act, goal):
                return

    def _withhold(self, episode: Episode, configured: set[str]) -> None:
        """Leave the episode those of the environment's tools that are offered."""
        own = [name for name in episode.tools if name not in configured]
        offered = self.offer or ()
        if unknown := [name for name in offered if name not in own]:
            raise UsageError(
                f"environment {episode.spec.name} has no such tools to offer",
                got=", ".join(unknown),
                expected=f"some of {', '.join(own)}" if own else "an environment that brings tools",
                hint="change agent.options.offer",
            )
        episode.tools = {name: tool for name, tool in episode.tools.items() if name in configured or name in offered}

    async def _take_turn(
        self, episode: Episode, conversation: Conversation, answer: Answer, act: Tool | None, goal: str
    ) -> bool:
        """Carry out an answer's calls, tools between actions together; whether the environment ended the episode."""
        for acts, calls in itertools.groupby(answer.tool_calls, lambda call: act is not None and call.name == act.name):
            if not acts or act is None:
                conversation.add(*await episode.call_tools(list(calls)))
            elif await self._act(episode, conversation, calls, act, goal):
                return True
        if problem := self._problem(answer):
            episode.invalid(problem)
            conversation.add(user(problem))
        return False

    async def _act(
        self, episode: Episode, conversation: Conversation, calls: Iterable[ToolCall], act: Tool, goal: str
    ) -> bool:
        """Take actions; whether one of them ended the episode."""
        for call in calls:
            try:
                action = act.validate(call.arguments)["action"]
            except ToolError as error:
                episode.invalid(str(error))
                conversation.add(tool_result(call, f"Error: {error}"))
                continue
            result = await episode.step(action)
            if result.done:
                return True
            conversation.add(_answered(call, await self._shown(episode, result.observation, goal)))
        return False

    async def _shown(self, episode: Episode, observation: Content, goal: str = "") -> Content:
        actions = await action_list(episode) if self.list_actions else ""
        return with_lines(observation, [actions, goal])

    def _problem(self, answer: Answer) -> str:
        if answer.problems:
            return "Your tool call could not be read. " + " ".join(answer.problems)
        return "" if answer.tool_calls else f"Your answer calls no tool. Act with the tool {self.action_name}."

    def demonstrate(self, action: str) -> Message:
        """Return the call that takes `action`."""
        call = ToolCall(name=self.action_name, arguments={"action": action})
        return Message(role="assistant", tool_calls=(call,))


def _instructions(episode: Episode) -> str:
    return episode.spec.tool_instructions or episode.spec.instructions


def _answered(call: ToolCall, observation: Content) -> Message:
    return Message(role="tool", content=observation, tool_call_id=call.id, name=call.name)
