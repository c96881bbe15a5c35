"""Messages and tool calls; the environment's actions are also a tool."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from agentrl.agent_loop import AgentLoop, Answer, Conversation, Episode, example_call
from agentrl.errors import ConfigError, ToolError, UsageError
from agentrl.message import Content, Message, ToolCall, tool_result, user
from agentrl.tool import Tool

from .compaction import Compaction, with_compaction
from .prompting import READ_NEXT, ActionHint, action_list, goal_of, opening, with_lines


@functools.lru_cache(maxsize=256)
def action_tool(name: str, hint: str) -> Tool:
    """Return the tool that stands for the environment's `step`; the loop itself executes it."""

    def act(action: str) -> str:
        return action

    shape = ActionHint.parse(hint)
    what = f"The action, as text: {shape.what}." if shape.what else "The action, as text."
    act.__doc__ = f"Take an action in the environment.\n\nArgs:\n    action: {what}"
    return Tool(act, name=name, inline=True)


class ToolCalling(AgentLoop):
    """The policy calls tools, one or several per turn, until the environment or a tool ends the episode.

    The actions of a text-action environment are calls of one tool. An environment that brings its own tools and has no
    ``action_hint`` is played through those; an answer without a call is then passed to the environment, which judges
    it or replies.

    Args:
        action_name: The name of the tool that takes actions.
        list_actions: List the admissible actions after each observation, if the environment reports them.
        restate_goal: Repeat the goal after each observation (see `ReactText`).
        offer: Names of the environment's own tools that the policy gets; all if left out. Fewer tools make the prompt
            shorter and the task easier.
        prefill: Begin each answer with a call of the tool that takes actions, for a model that does not call tools by
            itself; the prefilled tokens are not trained.
        compact: See `ReactText`.
        calls: ``repaired`` also reads calls that differ slightly from the model's notation, such as one without its
            tags, if they are unambiguous: an offered tool with valid arguments. ``as_served`` reads only what the
            parsers of inference servers read.
    """

    offers_tools = True
    follow_ups = ("tool",)
    text_loop = "react_text"

    def __init__(
        self,
        *,
        action_name: str = "act",
        list_actions: bool = False,
        restate_goal: bool = False,
        offer: Sequence[str] | None = None,
        prefill: bool = False,
        compact: Mapping[str, Any] | None = None,
        calls: Literal["as_served", "repaired"] = "repaired",
    ) -> None:
        if calls not in ("as_served", "repaired"):
            raise ConfigError("agent.options.calls is not known", got=repr(calls), expected="as_served or repaired")
        if not isinstance(prefill, bool):
            raise ConfigError("agent.options.prefill is not a boolean", got=repr(prefill), expected="true or false")
        self.action_name = action_name
        self.list_actions = list_actions
        self.restate_goal = restate_goal
        self.offer = offer
        self.prefill = prefill
        self.repairs_calls = calls == "repaired"
        self.compaction = Compaction.from_option(compact)

    @classmethod
    def answer_forms(cls, answer_format: str) -> Sequence[Mapping[str, Any]]:
        """Return the options without and with the start of a call."""
        return ({}, {"prefill": True})

    async def run(self, episode: Episode) -> None:
        """Play one episode.

        Raises:
            UsageError: a tool has the name of the one that takes actions, or a tool to offer does not exist.
        """
        configured = set(episode.tools)
        first = await episode.reset()
        if self.offer is not None:
            self._withhold(episode, configured)
        has_actions = bool(episode.action_hint) or set(episode.tools) == configured
        act = action_tool(self.action_name, episode.action_hint) if has_actions else None
        if act is not None:
            self.check_tool_names(episode.tools)
        tools = [*episode.tools_of().values(), *([act] if act else [])]
        instructions = [_instructions(episode), self._rule(episode, act), _helpers(episode)]
        messages = opening(instructions, await self._show(episode, first))
        conversation = with_compaction(episode, episode.open(messages, tools=tools), messages, self.compaction)
        goal = goal_of(episode, first) if self.restate_goal else ""
        prefill = self._begun_call(episode, act) if self.prefill and act else ""
        while True:
            answer = await conversation.generate(prefill=prefill)
            if not answer.tool_calls and not answer.problems and act is None:
                result = await episode.step(answer.text)
                if result.done:
                    return
                conversation.add(user(await self._show(episode, result.observation, goal)))
                continue
            if await self._take_turn(episode, conversation, answer, act, goal):
                return

    def check_tool_names(self, names: Collection[str]) -> None:
        """Check that no tool has the name of the one that takes actions.

        Raises:
            UsageError: a tool has this name.
        """
        if self.action_name in names:
            raise UsageError(
                "a tool has the name of the tool that takes actions",
                got=self.action_name,
                expected="a unique name",
                hint="set agent.options={action_name: …}",
            )

    def _withhold(self, episode: Episode, configured: set[str]) -> None:
        """Remove from the episode the environment's tools that are not offered."""
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
        """Execute an answer's calls, tool calls between actions together; return True if the episode has ended."""
        for acts, calls in itertools.groupby(answer.tool_calls, lambda call: act is not None and call.name == act.name):
            if not acts or act is None:
                conversation.add(*await episode.call_tools(list(calls)))
            elif await self._act(episode, conversation, calls, act, goal):
                return True
        if problem := self._problem(episode, answer, act):
            episode.count_invalid(problem)
            conversation.add(user(problem))
        return False

    async def _act(
        self, episode: Episode, conversation: Conversation, calls: Iterable[ToolCall], act: Tool, goal: str
    ) -> bool:
        """Take actions; return True if one of them ended the episode."""
        for call in calls:
            try:
                action = act.validate(call.arguments)["action"]
            except ToolError as error:
                episode.count_invalid(str(error))
                conversation.add(tool_result(call, f"Error: {error}"))
                continue
            result = await episode.step(action)
            if result.done:
                return True
            conversation.add(tool_result(call, await self._show(episode, result.observation, goal)))
        return False

    async def _show(self, episode: Episode, observation: Content, goal: str = "") -> Content:
        actions = await action_list(episode) if self.list_actions else ""
        return with_lines(observation, [actions, goal])

    def _rule(self, episode: Episode, act: Tool | None) -> str:
        """Return the instructions for acting through the tool that takes actions."""
        if act is None:
            return ""
        what = ActionHint.parse(episode.action_hint).sentence
        example = self._example(episode, act)
        return f"How to act: call the tool {act.name} with one action.{what} For example:\n{example}\n{READ_NEXT}"

    def _example(self, episode: Episode, act: Tool | None) -> str:
        """Return a call as the model writes it: of the tool that takes actions, or of the first tool."""
        if act is not None:
            return episode.write_answer(self.demonstrate(ActionHint.parse(episode.action_hint).example))
        first = next(iter(episode.tools_of().values()))
        return episode.write_answer(Message(role="assistant", tool_calls=(example_call(first),)))

    def _begun_call(self, episode: Episode, act: Tool) -> str:
        """Return a call of the tool that takes actions, up to the action."""
        return self._example(episode, act).partition(ActionHint.parse(episode.action_hint).example)[0]

    def _problem(self, episode: Episode, answer: Answer, act: Tool | None) -> str:
        if answer.tool_calls and not answer.problems:
            return ""  # the form below takes longer to render than the rest of a turn
        form = f"in this form:\n{self._example(episode, act)}"
        if answer.problems:
            found = " ".join(answer.problems)
            return f"Your tool call could not be read, so it was not executed. {found} Write a tool call {form}"
        return f"Your last answer called no tool, so nothing happened. Answer again with a tool call, {form}"

    def demonstrate(self, action: str) -> Message:
        """Return the call that takes `action`."""
        call = ToolCall(name=self.action_name, arguments={"action": action})
        return Message(role="assistant", tool_calls=(call,))


def _instructions(episode: Episode) -> str:
    return episode.spec.tool_instructions or episode.spec.instructions


def _helpers(episode: Episode) -> str:
    """Return the instructions for calling other agents; empty if there are none."""
    helpers = [tool for name, tool in episode.tools_of().items() if name in episode.roles]
    if not helpers:
        return ""
    example = episode.write_answer(Message(role="assistant", tool_calls=(example_call(helpers[0]),)))
    return (
        f"Other agents can help you: {', '.join(tool.name for tool in helpers)}. To ask one, call the tool with its"
        f" name. It sees only your call, so write everything that it needs to know. For example:\n{example}\n"
        "Its answer is the result of the call."
    )
