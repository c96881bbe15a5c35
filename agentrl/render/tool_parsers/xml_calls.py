"""Tool calls as XML-like tags: Qwen3-Coder, Seed-OSS, GLM 4.5 to 4.7, MiniMax M2, and DeepSeek V3.2 and V4."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentrl.message import ToolCall
from agentrl.render.tool_parsers import (
    UNCLOSED_TAG,
    CollectedCalls,
    MalformedCall,
    ParsedCalls,
    ToolParser,
    ToolSchemas,
    collect_blocks,
    make_call,
    parameters_of,
    shows_example,
)
from agentrl.render.tool_parsers.tolerant_tags import CallTags, with_tolerant_fallback
from agentrl.render.tool_parsers.untagged import read_untagged
from agentrl.render.tool_parsers.values import after_block, first_of, skip_space, typed_value, whole_json
from agentrl.tool.json_schema import fits

OPEN, CLOSE = "<tool_call>", "</tool_call>"
GLM_FORM = f"Write {OPEN}tool\n<arg_key>argument</arg_key>\n<arg_value>value</arg_value>\n{CLOSE}."
_NAME = re.compile(r"\s*([^<\n]*)")
_ARGUMENT = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_NEXT_CALL = re.compile(rf"{CLOSE}\s*{OPEN}")
_GLM_TAGS = CallTags(
    call=re.compile(r"<tool_call>\s*([^<\n]*)"),
    ends=(CLOSE,),
    argument=re.compile(r"<arg_key>([^<]*)</arg_key>\s*+(?:<arg_value>|(?!<))"),
    argument_end="</arg_value>",
    marks=re.compile("</?tool_call>"),
)
_FUNCTION = re.compile(r"\s*<function=([^>\s]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]*)>")
_BROKEN_END = re.compile(r"<(?:/[^<>]*)?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class InvokeMarks:
    """Tags of a notation."""

    block: str
    """Name of the tag around all calls."""
    prefix: str = ""
    """Prefix of the names of tags, ``｜DSML｜`` or empty."""
    string: str = ""
    """Attribute of ``parameter`` in the description for the model; true if the value is text, false if it is JSON."""

    @property
    def open(self) -> str:
        """Mark that opens the calls."""
        return f"<{self.prefix}{self.block}>"

    @property
    def close(self) -> str:
        """Mark that closes the calls."""
        return f"</{self.prefix}{self.block}>"

    def end_of(self, tag: str) -> str:
        """Return the closing tag of a name."""
        return f"</{self.prefix}{tag}>"

    @property
    def form(self) -> str:
        """Sentence that shows the model how to write calls."""
        p = self.prefix
        return (
            f'Write {self.open}\n<{p}invoke name="tool">\n<{p}parameter name="argument"{self.string}>value'
            f"</{p}parameter>\n</{p}invoke>\n{self.close}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentEnd:
    """End of an argument's value in a notation that does not escape its tags within values."""

    tag: str
    """Closing tag, such as ``</parameter>``."""
    before: re.Pattern[str]
    """Text after a closing tag that ends the value: the next argument or the end of the call."""
    opening: re.Pattern[str]
    """Opening tag of an argument."""

    def find(self, text: str, start: int) -> int:
        """Return the index of the closing tag of the value that begins at `start`; -1 if there is none.

        It is the first one. If neither an argument nor the end of the call follows it, the value itself contains the
        tag, as files in XML do, and ends at the first tag that one of them follows.
        """
        first = place = text.find(self.tag, start)
        while place >= 0 and not self.before.match(text, place + len(self.tag)):
            place = text.find(self.tag, place + 1)
        return place if place >= 0 and self._is_one_value(text[start:place]) else first

    def _is_one_value(self, value: str) -> bool:
        """Return False if a text with closing tags is several arguments, or one whose closing tag is doubled."""
        opened = value.count(self.tag.replace("/", "", 1).rstrip(">"))
        is_doubled = value.rstrip().endswith(self.tag) and opened < value.count(self.tag)
        return self.opening.search(value) is None and not is_doubled


class InvokeTagParser:
    """Parser of a notation with invoke tags; see `agentrl.render.tool_parsers`."""

    def __init__(self, marks: InvokeMarks) -> None:
        self._marks = marks
        tag = re.escape(f"<{marks.prefix}")
        self._invoke = re.compile(rf'\s*{tag}invoke\s+name="([^"]*)"\s*>')
        self._parameter = re.compile(rf'\s*{tag}parameter\s+name="([^"]*)"(?:\s+string="(true|false)")?\s*>')
        self._end = ArgumentEnd(
            tag=marks.end_of("parameter"),
            before=re.compile(rf"\s*(?:{tag}parameter\s|{re.escape(marks.end_of('invoke'))})"),
            opening=re.compile(rf"{tag}parameter\s+name="),
        )
        self._opens_again = re.compile(rf"\s*{tag}parameter\s")
        self._next_call = re.compile(rf"{re.escape(marks.end_of('invoke'))}\s*{tag}invoke\s")
        self._tags = CallTags(
            call=re.compile(rf'{tag}invoke\s+name="([^"<>]*)"\s*>'),
            ends=(marks.end_of("invoke"), marks.close),
            argument=re.compile(rf'{tag}parameter\s+name="([^"<>]*)"(?:\s+string="(true|false)")?[^<>]*>'),
            argument_end=marks.end_of("parameter"),
            marks=re.compile("|".join(map(re.escape, (marks.open, marks.close, marks.end_of("invoke"))))),
        )

    @property
    def form(self) -> str:
        """Sentence that shows the model how to write calls."""
        return self._marks.form

    @property
    def ending(self) -> str:
        """Closing tags after the value of a call's last argument."""
        marks = self._marks
        return f"{marks.end_of('parameter')}\n{marks.end_of('invoke')}\n{marks.close}"

    def __call__(self, text: str, tools: ToolSchemas) -> ParsedCalls:
        """Return calls, problems and the remaining text; never raise."""
        if shows_example(text, f"<{self._marks.prefix}invoke "):
            return ParsedCalls(content=text.strip())

        def read(opening: re.Match[str], written: str, name: str, number: int) -> Any:
            return self._value(written, opening[2], opening[1], name, tools, number)

        return with_tolerant_fallback(self._strict(text, tools), self._tags, text, tools, read)

    def _strict(self, text: str, tools: ToolSchemas) -> ParsedCalls:
        marks = self._marks
        found = collect_blocks(text, marks.open, partial(self._read_block, text, tools))
        stray = f"<{marks.prefix}invoke name="
        if stray in found.content[-1] or marks.close in found.content[-1]:
            found.problems.append(f"Parts of a tool call are outside {marks.open} and {marks.close}. {marks.form}")
            found.content[-1] = found.content[-1].replace(marks.close, "")
        return found.result()

    def _read_block(self, text: str, tools: ToolSchemas, cursor: int, found: CollectedCalls) -> int:
        marks, before = self._marks, found.number
        while invoke := self._invoke.match(text, cursor):
            cursor = self._read_invoke(text, invoke, tools, found)
        cursor = skip_space(text, cursor)
        if text.startswith(marks.close, cursor):
            if found.number == before:
                found.problems.append(f"{marks.open} contains no call. {marks.form}")
            return cursor + len(marks.close)
        extra = "was not closed" if cursor == len(text) else "contains something other than calls"
        found.problems.append(f"{marks.open} {extra}. {marks.form}")
        return min(first_of(text, [marks.close], cursor) + len(marks.close), len(text))

    def _read_invoke(self, text: str, invoke: re.Match[str], tools: ToolSchemas, found: CollectedCalls) -> int:
        """Collect one call, and return the index after it."""
        number, end = found.number, invoke.end()
        closing = self._marks.end_of("invoke")

        def read() -> ToolCall:
            nonlocal end
            written: dict[str, tuple[str, str | None]] = {}
            while parameter := self._parameter.match(text, end):
                if (stop := self._end.find(text, parameter.end())) < 0:
                    break
                key, value, end = parameter[1], text[parameter.end() : stop], stop + len(self._end.tag)
                if key in written:
                    raise MalformedCall(f"Tool call {number} gives {key!r} twice.")
                if self._opens_again.match(value) or self._next_call.search(value):
                    raise MalformedCall(f"{key!r} (tool call {number}) was not closed. {self._marks.form}")
                written[key] = value, parameter[2]
            end = skip_space(text, end)
            if not text.startswith(closing, end):
                extra = "was not closed" if end == len(text) else "has text outside its parameter tags"
                raise MalformedCall(f"Tool call {number} {extra}. {self._marks.form}")
            call = make_call(invoke[1] or None, {}, tools, number)
            arguments = {key: self._value(*parts, key, call.name, tools, number) for key, parts in written.items()}
            return make_call(call.name, arguments, tools, number)

        found.take(read)
        return self._after_invoke(text, end)

    def _after_invoke(self, text: str, start: int) -> int:
        """Return the index after the call's closing tag, or else that of the next call or of the end of the block."""
        closing = self._marks.end_of("invoke")
        close = text.find(closing, start)
        following = self._invoke.search(text, start)
        if close >= 0 and (following is None or close < following.start()):
            return close + len(closing)
        if following is not None:
            return following.start()
        return first_of(text, [self._marks.close], start)

    def _value(self, text: str, string: str | None, key: str, name: str, tools: ToolSchemas, number: int) -> Any:
        if not self._marks.string or string is None:
            return typed_value(text, key, name, tools, number)
        return text if string == "true" else whole_json(text.strip(), f"{key!r} of {name} (tool call {number})")


def parse_glm(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read every ``<tool_call>`` block; see `agentrl.render.tool_parsers`."""
    if shows_example(text, OPEN):
        return ParsedCalls(content=text.strip())
    found = collect_blocks(text, OPEN, partial(_read_glm_block, text, tools))
    found.refuse_stray([CLOSE], OPEN, GLM_FORM)
    return with_tolerant_fallback(found.result(), _GLM_TAGS, text, tools, partial(_tolerant_value, tools))


def _tolerant_value(tools: ToolSchemas, opening: re.Match[str], written: str, name: str, number: int) -> Any:
    return typed_value(written, opening[1].strip(), name, tools, number)


def _read_glm_block(text: str, tools: ToolSchemas, start: int, found: CollectedCalls) -> int:
    number, end = found.number, start

    def read() -> ToolCall:
        nonlocal end
        head = _NAME.match(text, start)
        arguments: dict[str, str] = {}
        end = start if head is None else head.end()
        while argument := _ARGUMENT.match(text, end):
            key, end = argument[1].strip(), argument.end()
            if key in arguments:
                raise MalformedCall(f"Tool call {number} gives {key!r} twice.")
            if _NEXT_CALL.search(argument[2]):
                raise MalformedCall(f"{key!r} (tool call {number}) was not closed. {GLM_FORM}")
            arguments[key] = argument[2]
        end = skip_space(text, end)
        if not text.startswith(CLOSE, end):
            extra = "was not closed" if end == len(text) else "has text outside its argument tags"
            raise MalformedCall(f"Tool call {number} {extra}. {GLM_FORM}")
        return _call(head[1].strip() if head else "", arguments, tools, number)

    found.take(read)
    return after_block(text, end, OPEN, CLOSE)


def _call(name: str, written: dict[str, str], tools: ToolSchemas, number: int) -> ToolCall:
    call = make_call(name or None, {}, tools, number)
    arguments: dict[str, Any] = {
        key: typed_value(value, key, call.name, tools, number) for key, value in written.items()
    }
    return make_call(call.name, arguments, tools, number)


_PARAMETER_END = ArgumentEnd(
    tag="</parameter>", before=re.compile(r"\s*(?:<parameter=|\Z)"), opening=re.compile("<parameter=[^>]")
)


class FunctionTagParser:
    """Parser of a notation with a tag per function and parameter; see `agentrl.render.tool_parsers`."""

    def __init__(self, opening: str = OPEN, closing: str = CLOSE) -> None:
        self._open, self._close = opening, closing
        self.form = (
            f"Write {opening}\n<function=tool>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n{closing}, "
            "with one parameter tag per argument."
        )
        self._tags = CallTags(
            call=re.compile(r"<function=([^>\s<]*)>"),
            ends=("</function>", closing),
            argument=re.compile(r"<parameter=([^>\s<]*)>"),
            argument_end="</parameter>",
            marks=re.compile(f"{opening}|{closing}|</function>"),
        )
        self._end = re.compile(rf"</function>\s*{closing}")
        self.ending = f"\n</parameter>\n</function>\n{closing}"

    def __call__(self, text: str, tools: ToolSchemas) -> ParsedCalls:
        """Return calls, problems and the remaining text; never raise."""
        if shows_example(text, "<function="):
            return ParsedCalls(content=text.strip())

        def read(start: int, found: CollectedCalls) -> int:
            following = first_of(text, [self._open], start)
            ending = self._end.search(text, start, following)  # an argument may contain the closing mark
            end = text.find(self._close, start, following) if ending is None else ending.end() - len(self._close)
            body = text[start : end if end >= 0 else following]
            found.take(partial(self._read_block, body, tools, found.number, closed=end >= 0))
            return end + len(self._close) if end >= 0 else following

        found = collect_blocks(text, self._open, read)
        rest = "".join(found.content)
        if self._close in rest or "<function=" in rest:
            found.problems.append(f"Parts of a tool call are outside {self._open} and {self._close}. {self.form}")
            found.content = [rest.replace(self._close, "")]

        def read_value(opening: re.Match[str], written: str, name: str, number: int) -> Any:
            value = written.removeprefix("\n").removesuffix("\n")
            return typed_value(value, opening[1], name, tools, number)

        return with_tolerant_fallback(found.result(), self._tags, text, tools, read_value)

    def _read_block(self, body: str, tools: ToolSchemas, number: int, *, closed: bool) -> ToolCall:
        if not closed:
            raise MalformedCall(f"Tool call {number} was not closed. {self.form}")
        function = _FUNCTION.fullmatch(body)
        if function is None:
            raise MalformedCall(f"Tool call {number} is not one function tag. {self.form}")
        call = make_call(function[1] or None, {}, tools, number)
        arguments = self._read_parameters(function[2], call.name, tools, number)
        return make_call(call.name, arguments, tools, number)

    def _read_parameters(self, body: str, name: str, tools: ToolSchemas, number: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        cursor = 0
        while parameter := _PARAMETER.match(body, cursor):
            if (stop := _PARAMETER_END.find(body, parameter.end())) < 0:
                break
            key, value = parameter[1], body[parameter.end() : stop].removeprefix("\n").removesuffix("\n")
            if key in arguments:
                raise MalformedCall(f"Tool call {number} gives {key!r} of {name} twice.")
            if value.startswith(f"<parameter={key}>"):
                raise MalformedCall(f"{key!r} of {name} (tool call {number}) is opened twice. {self.form}")
            arguments[key] = typed_value(value, key, name, tools, number)
            cursor = stop + len(_PARAMETER_END.tag)
        if body[cursor:].strip():
            raise MalformedCall(f"Tool call {number} has text outside its parameter tags. {self.form}")
        return arguments


parse_qwen3_coder = FunctionTagParser()
parse_seed_oss = FunctionTagParser("<seed:tool_call>", "</seed:tool_call>")
parse_minimax_m2 = InvokeTagParser(InvokeMarks(block="minimax:tool_call"))
_DSML = InvokeMarks(block="function_calls", prefix="｜DSML｜", string=' string="true|false"')
parse_deepseek_v32 = InvokeTagParser(_DSML)
parse_deepseek_v4 = InvokeTagParser(replace(_DSML, block="tool_calls"))


def _complete_tags(
    parse: ToolParser, form: str, ending: str, text: str, tools: ToolSchemas, *, is_whole: bool
) -> ParsedCalls:
    """Read calls in tags, whose last argument may end with the answer, or JSON if there are none."""
    served = parse(text, tools)
    if is_whole and served.problems:
        completed = parse(_BROKEN_END.sub("", text).rstrip() + ending, tools)
        if len(completed.calls) > len(served.calls) and not completed.problems and _all_fit(completed, tools):
            return completed if completed.repairs else replace(completed, repairs=(UNCLOSED_TAG,))
    if served.calls:
        return served
    return read_untagged(text, tools, form, is_whole=is_whole) or served


def _all_fit(parsed: ParsedCalls, tools: ToolSchemas) -> bool:
    return all(fits(dict(call.arguments), root := parameters_of(call.name, tools), root) for call in parsed.calls)


repair_qwen3_coder, repair_seed_oss = (
    partial(_complete_tags, parse, parse.form, parse.ending) for parse in (parse_qwen3_coder, parse_seed_oss)
)
repair_glm = partial(_complete_tags, parse_glm, GLM_FORM, "</arg_value>\n</tool_call>")
repair_minimax_m2 = partial(_complete_tags, parse_minimax_m2, parse_minimax_m2.form, parse_minimax_m2.ending)
repair_deepseek_v32 = partial(_complete_tags, parse_deepseek_v32, parse_deepseek_v32.form, parse_deepseek_v32.ending)
repair_deepseek_v4 = partial(_complete_tags, parse_deepseek_v4, parse_deepseek_v4.form, parse_deepseek_v4.ending)
