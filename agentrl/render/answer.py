"""From the text of an answer to its parts: content, thinking, tool calls, problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from agentrl.agent_loop import Answer
from agentrl.engine import StopReason
from agentrl.errors import TemplateError
from agentrl.message import Message
from agentrl.registry import Kind, lookup
from agentrl.render.families import THINK_TAGS, Family, ThinkingMarks
from agentrl.render.tokens import ToolSchema
from agentrl.render.tool_parsers import ParsedCalls, ToolParser, harmony

_PARSER_MARKS = {"qwen3_coder": "<function=", "hermes": "<tool_call>"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """An answer's text with its thinking apart."""

    reasoning: str | None
    rest: str
    closed: bool = True


def split_thinking(text: str, marks: ThinkingMarks = THINK_TAGS, *, opened: bool = False) -> Thinking:
    """Take the thinking off the front of `text`; `opened` when the prompt has already written its opening mark."""
    stripped = text.lstrip()
    if stripped.startswith(marks.open):
        inside = stripped.removeprefix(marks.open)
    elif opened:
        inside = text
    else:
        return Thinking(reasoning=None, rest=text)
    reasoning, closing, rest = inside.partition(marks.close)
    return Thinking(reasoning=reasoning.strip(), rest=rest, closed=bool(closing))


def split_channels(text: str) -> Thinking:
    """Take the messages of the analysis channel out of an answer in harmony's notation."""
    thoughts: list[harmony.ChannelMessage] = []
    others: list[str] = []
    for message in harmony.split_messages(text):
        if harmony.is_thinking(message):
            thoughts.append(message)
        else:
            others.append(message.text)
    reasoning = "\n".join(message.body.strip() for message in thoughts) if thoughts else None
    return Thinking(reasoning=reasoning, rest="".join(others), closed=not thoughts or bool(thoughts[-1].end))


class AnswerReader:
    """Reads answers of one model.

    Args:
        family: The model's family.
        chat_template: Consulted for the way of calling tools when the family is unknown.
        tool_parser: Registry name, or ``auto``.
        header: What the template writes before an answer; it may open the thinking.
    """

    def __init__(self, family: Family | None, chat_template: str, tool_parser: str, header: str) -> None:
        name = _parser_name(family, chat_template) if tool_parser == "auto" else tool_parser
        self._parser = None if name is None else cast(ToolParser, lookup(Kind.TOOL_PARSER, name))
        self._marks = THINK_TAGS if family is None else family.thinking
        self._channels = family is not None and family.marks_answers
        self._opened = header.rstrip().endswith(self._marks.open)

    def read(self, text: str, stop_reason: StopReason, tools: Sequence[ToolSchema]) -> Answer:
        """The parts of an answer.

        Args:
            text: The whole answer, special tokens left out but for those with which the family thinks and calls tools.
            stop_reason: Why the engine stopped.
            tools: The tools that the policy was offered; without any, calls are not looked for.
        """
        thinking = split_channels(text) if self._channels else split_thinking(text, self._marks, opened=self._opened)
        parsed = ParsedCalls(content=thinking.rest.strip())
        if tools or self._channels:
            parsed = self.require_parser()(thinking.rest, {tool["function"]["name"]: tool for tool in tools})
        unclosed = () if thinking.closed else (f"The thinking was not closed with {self._marks.close}.",)
        message = Message(
            role="assistant", content=parsed.content, tool_calls=parsed.calls, reasoning=thinking.reasoning
        )
        return Answer(message=message, raw_text=text, problems=unclosed + parsed.problems, stop_reason=stop_reason)

    def require_parser(self) -> ToolParser:
        """The parser of tool calls.

        Raises:
            TemplateError: The family has none.
        """
        if self._parser is None:
            raise TemplateError(
                "the model's family has no known way to call tools",
                expected="a chat template with tool calls",
                hint="set agent.tool_parser, or use an agent loop without tool calls such as react_text",
            )
        return self._parser


def _parser_name(family: Family | None, chat_template: str) -> str | None:
    if family is not None and family.tool_parser is not None:
        return family.tool_parser
    return next((name for name, mark in _PARSER_MARKS.items() if mark in chat_template), None)
