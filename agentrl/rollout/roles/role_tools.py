"""Roles that other roles call like tools: each call opens a conversation, and its final answer is the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.agent_loop import Conversation, Episode, EpisodeEnd, example_call
from agentrl.errors import Outcome, ToolError
from agentrl.message import Message, ToolCall, system, user
from agentrl.rollout.tools import ToolCallResult
from agentrl.tool import ForwardedTool, Tool, ToolResult, ToolRules


class RoleTool(ForwardedTool):
    """Tool that calls a role. The episode carries out its calls one after another.

    Args:
        role: Name of the role and of the tool.
        description: Purpose of the role, for the model that calls it.
        arguments: Description of each argument by name; all arguments are texts.
        max_turns: Maximum number of answers in one call.
    """

    def __init__(self, role: str, *, description: str, arguments: Mapping[str, str], max_turns: int) -> None:
        properties = {name: {"type": "string", "description": what} for name, what in arguments.items()}
        parameters = {"type": "object", "properties": properties, "required": list(arguments)}
        function = {"name": role, "description": description, "parameters": parameters}
        super().__init__(role, {"type": "function", "function": function}, ToolRules())
        self.max_turns = max_turns

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Check the arguments and return them; raise a `ToolError` that lists the wrong ones for the policy."""
        known = self.schema["function"]["parameters"]["properties"]
        problems = [f"unknown argument {name}" for name in arguments if name not in known]
        problems += [f"{name} is missing" for name in known if name not in arguments]
        problems += [f"{name} must be text" for name in known if not isinstance(arguments.get(name, ""), str)]
        problems += [f"{name} is empty" for name in known if arguments.get(name) == ""]
        if problems:
            raise ToolError(f"wrong arguments for {self.name}: {'; '.join(problems)}; it takes: {', '.join(known)}")
        return {name: arguments[name] for name in known}

    def request(self, arguments: Mapping[str, str]) -> str:
        """Return the message that the role reads: the text of the only argument, or all arguments with their names."""
        if len(arguments) == 1:
            return next(iter(arguments.values()))
        return "\n".join(f"{name}: {text}" for name, text in arguments.items())


async def ask_role(episode: Episode, tool: RoleTool, call: ToolCall, tools: Mapping[str, Tool]) -> ToolCallResult:
    """Let a role, which may call `tools`, answer a call; an error that the caller can fix becomes a failed call's text.

    Raises:
        EpisodeEnd: the turns or the time of the whole episode are used up, or a tool of the role ends it.
    """
    try:
        request = tool.request(tool.validate(call.arguments))
        opening = [system(_introduction(tool)), user(f"{request}\n\n{_rule(episode, tool, tools)}")]
        return ToolCallResult(tool=tool, result=ToolResult(await _final_answer(episode, tool, opening)))
    except ToolError as error:
        return ToolCallResult(tool=tool, result=ToolResult(f"Error: {error}"), failed=True)


def _introduction(tool: RoleTool) -> str:
    """Return the default system message of a role."""
    return f"You are {tool.name}, and you help another agent. {tool.schema['function']['description']}"


def _rule(episode: Episode, tool: RoleTool, tools: Mapping[str, Tool]) -> str:
    if not tools:
        return "How to answer: in plain text. Your whole answer is sent to the agent that asked you."
    example = episode.write_answer(Message(role="assistant", tool_calls=(example_call(next(iter(tools.values()))),)))
    return (
        f"How to answer: when you need a tool, call it. For example:\n{example}\n"
        "You then see the result and answer again. When you know enough, answer in plain text without a call: only this"
        f" answer is sent to the agent that asked you. You can answer at most {tool.max_turns} times."
    )


async def _final_answer(episode: Episode, tool: RoleTool, opening: list[Message]) -> str:
    try:
        conversation = episode.open(opening, role=tool.name)
        for _ in range(tool.max_turns):
            if (text := await _next_answer(episode, conversation)) is not None:
                break
        else:
            raise ToolError(f"{tool.name} gave no final answer in {tool.max_turns} turns")
    except EpisodeEnd as end:
        if end.outcome is not Outcome.TRUNCATED_TOKENS:
            raise
        raise ToolError(f"{tool.name} gave no final answer: its conversation became too long") from end
    if not text:
        raise ToolError(f"{tool.name} gave an empty answer")
    return text


async def _next_answer(episode: Episode, conversation: Conversation) -> str | None:
    """Let the role take a turn; return its final answer, or ``None`` while it calls tools."""
    answer = await conversation.generate()
    if answer.tool_calls:
        conversation.add(*await episode.call_tools(answer.tool_calls))
    if answer.problems:
        problem = f"Your tool call could not be read, so it was not executed. {' '.join(answer.problems)}"
        episode.count_invalid(problem)
        conversation.add(user(problem))
    return None if answer.tool_calls or answer.problems else answer.text.strip()
