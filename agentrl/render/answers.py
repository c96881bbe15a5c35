"""Reader of a model's answers: thinking, tool calls and problems, of complete answers or during sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from agentrl.agent_loop import Answer
from agentrl.engine import StopReason
from agentrl.errors import TemplateError
from agentrl.message import Message
from agentrl.registry import Kind, lookup
from agentrl.render.chat_template import ToolSchema
from agentrl.render.families import THINK_TAGS, Family, ThinkingMarks
from agentrl.render.tool_parsers import ParsedCalls, ToolParser, harmony, repair_of

CALL_MARKS = "<[{`"
"""First characters of all notations of tool calls; a backtick begins a code fence, which may contain calls."""
_PARSER_MARKS = {"qwen3_coder": "<function=", "hermes": "<tool_call>"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Text of an answer, split into its thinking and the rest."""

    reasoning: str | None
    rest: str
    closed: bool = True


def split_thinking(text: str, marks: ThinkingMarks = THINK_TAGS, *, opened: bool = False) -> Thinking:
    """Split the thinking from the start of `text`; `opened` if the prompt already contains the opening mark."""
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
    """Split the messages of the analysis channel from an answer in harmony's notation."""
    thoughts: list[harmony.ChannelMessage] = []
    others: list[str] = []
    for message in harmony.split_messages(text):
        if harmony.is_thinking(message):
            thoughts.append(message)
        else:
            others.append(message.text)
    reasoning = "\n".join(message.body.strip() for message in thoughts) if thoughts else None
    return Thinking(reasoning=reasoning, rest="".join(others), closed=not thoughts or bool(thoughts[-1].end))


def without_beginning_of(marks: Sequence[str], text: str) -> str:
    """Return `text` without a suffix that may become one of `marks`.

    >>> without_beginning_of(["</think>"], "so it is</th"), without_beginning_of(["</think>"], "so it is</b")
    ('so it is', 'so it is</b')
    """
    longest = max((len(mark) for mark in marks), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length]
    return text


class AnswerReader:
    """Reader of one model's answers.

    Args:
        family: Family of the model.
        chat_template: Chat template, which determines the notation of tool calls if the family is unknown.
        tool_parser: Registry name of the parser, or ``auto``.
        header: Text that the template writes before an answer; it may open the thinking.
    """

    def __init__(self, family: Family, chat_template: str, tool_parser: str, header: str) -> None:
        name: str | None = tool_parser
        if tool_parser == "auto":
            marked = (parser for parser, mark in _PARSER_MARKS.items() if mark in chat_template)
            name = family.tool_parser or next(marked, None)
        self.parser_name = name
        """Registry name of the parser for the model's tool calls; ``None`` if the notation is unknown."""
        self._parser = None if name is None else cast(ToolParser, lookup(Kind.TOOL_PARSER, name))
        self._repair = repair_of(name)
        self._marks = family.thinking
        self._channels = family.marks_answers
        self._opened = header.rstrip().endswith(self._marks.open)
        self._opening = header[header.rindex(self._marks.open) :] if self._opened else ""

    def read(
        self, text: str, stop_reason: StopReason, tools: Sequence[ToolSchema], *, repairs_calls: bool = False
    ) -> Answer:
        """Return the parts of an answer.

        Args:
            text: Complete answer without special tokens, except those of the family's thinking and tool calls.
            stop_reason: Reason why the engine stopped.
            tools: Tools offered to the policy; without tools, no calls are read.
            repairs_calls: Also read calls with small deviations from the model's notation.
        """
        thinking = split_channels(text) if self._channels else split_thinking(text, self._marks, opened=self._opened)
        parsed = ParsedCalls(content=thinking.rest.strip())
        if tools or self._channels:
            offered = {tool["function"]["name"]: tool for tool in tools}
            parse, repair = self.require_parser(), self._repair
            if repair is not None and repairs_calls and thinking.closed:
                parsed = repair(thinking.rest, offered, is_whole=stop_reason is StopReason.STOP)
            else:
                parsed = parse(thinking.rest, offered)
        unclosed = () if thinking.closed else (f"The thinking was not closed with {self._marks.close}.",)
        message = Message(
            role="assistant", content=parsed.content, tool_calls=parsed.calls, reasoning=thinking.reasoning
        )
        return Answer(
            message=message,
            raw_text=text,
            after_thinking=None if thinking.reasoning is None else thinking.rest,
            problems=unclosed + parsed.problems,
            repairs=parsed.repairs,
            opening="" if text.lstrip().startswith(self._marks.open) else self._opening,
            stop_reason=stop_reason,
        )

    def read_beginning(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, str]:
        """Return the thinking and the content of an unfinished answer, as far as no later text can change them.

        In a notation that marks the parts of an answer, both are empty.
        """
        stripped = text.lstrip()
        if self._channels or (self._marks.open.startswith(stripped) and not self._opened):
            return "", ""
        inside = stripped.removeprefix(self._marks.open)
        reasoning, closing, rest = "", "", text
        if self._opened or inside != stripped:
            reasoning, closing, rest = (inside if inside != stripped else text).partition(self._marks.close)
            if not closing:
                return without_beginning_of([self._marks.close], reasoning).strip(), ""
        content = rest.lstrip()
        if tools:
            content = content[: min((at for mark in CALL_MARKS if (at := content.find(mark)) >= 0), default=None)]
        return reasoning.strip(), content.rstrip()

    def require_parser(self) -> ToolParser:
        """Return the parser of tool calls.

        Raises:
            TemplateError: The family has no known notation of tool calls.
        """
        if self._parser is None:
            raise TemplateError(
                "the model's family has no known notation of tool calls",
                expected="a chat template with tool calls",
                hint="use an agent loop without tool calls (agent.loop=react_text), a chat template with tool calls "
                "(model.chat_template=chatml), or set the parser of its notation (agent.tool_parser)",
            )
        return self._parser
