"""Turns conversations into token ids, a turn at a time.

The first prompt is rendered and encoded whole. After that nothing is rendered again: what must follow an answer is the
difference of two renderings of a short stand-in conversation, one that ends with a stand-in answer and one that goes
on with the new messages, so the cost of a turn does not grow with the history. That the difference does not depend on
the history is checked before a run starts (`agentrl.render.check`). What the policy sampled is never decoded and
encoded again.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat, takewhile
from typing import TYPE_CHECKING, TypeVar

from agentrl.agent_loop import Answer, AnswerForm, UnsupportedOption
from agentrl.engine import StopReason
from agentrl.errors import LedgerError, TemplateError
from agentrl.image import PlacedImage
from agentrl.message import Message, ToolCall, encodable, system, user
from agentrl.render.answers import AnswerReader
from agentrl.render.call_form import PROBE_NAME, PROBE_TOOL, reads_json_arguments
from agentrl.render.content_guard import ContentGuard, unbroken
from agentrl.render.families import Family, ThinkingMarks, detect_family
from agentrl.render.images import ImageProcessor, counts, images_of, placed_images
from agentrl.render.named_templates import choose_chat_template
from agentrl.render.structure import structure_of
from agentrl.render.tokens import ChatTemplate, TextEncoder, ToolSchema, shipped_chat_templates
from agentrl.render.tool_parsers.values import first_of
from agentrl.trajectory import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MARK = "@@CONTENT-{}@@"
_MARKS = re.compile(r"@@CONTENT-\d+@@")
_SHAPES = 512
_LONGEST_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Span:
    """A range of characters that does not come from the template."""

    start: int
    end: int
    source: Source


class ContentSpans:
    """Finds the contents of messages in their rendering.

    The same messages are rendered once per shape with marks as contents; what is left between the marks is the
    template's.

    Args:
        render: Gives the text of messages that follow an answer.
        shown: Gives a message's text as it stands there.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str], shown: Callable[[str], str]) -> None:
        self._render = render
        self._shown = shown
        self._pieces = functools.lru_cache(_SHAPES)(self._split_by_marks)

    def find(self, text: str, messages: Sequence[Message]) -> list[Span]:
        """Return the spans of the messages' contents in `text`, in order."""
        shape = tuple(_shape(message) for message in messages)
        pieces = self._pieces(shape)
        if len(pieces) != len(messages) + 1 or not text.startswith(pieces[0]):
            return [Span(0, len(text), Source.OBSERVATION)]
        spans: list[Span] = []
        cursor = len(pieces[0])
        for message, after in zip(messages, pieces[1:], strict=True):
            end = _content_end(text, cursor, self._shown(message.text), after)
            spans.append(Span(cursor, end, _source(message)))
            cursor = end + len(after)
        return spans

    def _split_by_marks(self, shape: tuple[Message, ...]) -> list[str]:
        marked = [replace(message, content=_MARK.format(i)) for i, message in enumerate(shape)]
        return _MARKS.split(self._render(marked))


def _shape(message: Message) -> Message:
    return replace(message, content="", tool_calls=(), reasoning=None)


def _source(message: Message) -> Source:
    return Source.FORCED if message.role == "assistant" else Source.OBSERVATION


def _content_end(text: str, start: int, content: str, after: str) -> int:
    for candidate in (content, content.strip()):
        if text.startswith(candidate + after, start):
            return start + len(candidate)
    found = text.find(after, start) if after else -1
    return found if found >= 0 else len(text)


@dataclass(frozen=True, slots=True)
class TurnBoundary:
    """The rule by which answers and what follows them are joined."""

    end_id: int
    """The token that the template writes at the end of an answer."""
    end_ids: frozenset[int]
    """Tokens that close an answer when the model writes them; the template's own is then left out."""
    stop_ids: frozenset[int]
    """Tokens at which sampling stops."""
    opens_message: bool = False
    """The end of an answer is the head of the next message: it is left out only where it is that message's own."""

    def is_written(self, last_id: int | None, following: int) -> bool:
        """Return True if an answer that ends with `last_id` holds its end already, which `following` would repeat."""
        return last_id == following if self.opens_message else last_id in self.end_ids


def find_boundary(after_answer: str, encoder: TextEncoder, family: Family) -> TurnBoundary:
    """Return the boundary rule: the family's where the template follows it, else derived from the template.

    Args:
        after_answer: What the template writes after an answer, up to and with the next answer's header.
        encoder: The model's tokenizer.
        family: The family found in the template.

    Raises:
        TemplateError: The text after an answer does not begin with a token of its own.
    """
    first = encoder.encode(after_answer)[:1]
    if family.ends_open_messages and (heads := _ids(encoder, family.end_of_turn)):
        (end,) = _ids(encoder, family.end_of_turn[:1])
        return TurnBoundary(end, heads, heads | _ids(encoder, family.stop_tokens), opens_message=True)
    if family.end_of_turn and after_answer.startswith(family.end_of_turn[0] + family.after_end):
        ends = _ids(encoder, family.end_of_turn)
        if first and first[0] in ends:
            stops = ends - _ids(encoder, family.goes_on_after)
            return TurnBoundary(first[0], ends, stops | _ids(encoder, family.stop_tokens))
    if not first or not encoder.is_added(first[0]):
        raise TemplateError(
            "nothing in the chat template tells where an answer ends",
            got=repr(after_answer[:60]),
            expected="a special token right after the assistant's content, such as <|im_end|>",
            hint="add the token that ends a turn to the tokenizer as a special token, and to its chat template",
        )
    return TurnBoundary(first[0], frozenset(first), frozenset(first))


def _ids(encoder: TextEncoder, tokens: tuple[str, ...]) -> frozenset[int]:
    return frozenset(i for token in tokens if (i := encoder.added_id(token)) is not None)


STAND_IN = "@@STAND-IN@@"
KNOWN_SUFFIXES = 4096
"""Renderings of new messages that are kept: the members of a group often get the same ones."""
LONGEST_KNOWN = 500
"""Characters of a message that is kept; long ones seldom come twice."""
_BEFORE = "x"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Tokens to append to a ledger, and where each came from."""

    ids: list[int]
    sources: list[Source]
    images: tuple[PlacedImage, ...] = ()
    """Counted from the first of the ids."""


class Renderer:
    """Messages to tokens for one model.

    Args:
        tokenizer: The model's fast tokenizer, with its chat template.
        enable_thinking: Passed to templates that know it.
        tool_parser: Registry name of the way in which tool calls are written; ``auto`` asks the family.
        images: Prepares images; ``None`` for a model that reads text only.

    Raises:
        TemplateError: The template is missing, or nothing in it tells where a turn ends.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        enable_thinking: bool = False,
        tool_parser: str = "auto",
        images: ImageProcessor | None = None,
    ) -> None:
        self.images = images
        self.rewrites_history = False
        """Conversations are rendered anew where the template shows earlier turns differently."""
        self.enable_thinking = enable_thinking
        self.encoder = TextEncoder(tokenizer)
        source = choose_chat_template(tokenizer)
        self.family = family = detect_family(source)
        options = {"enable_thinking": enable_thinking, **family.template_options}
        self.template = ChatTemplate(
            tokenizer,
            {**options, family.thinking_option: enable_thinking},
            images=images is not None,
            reasoning_key=family.thinking.key,
            opening=family.template_opening,
            source=source,
        )
        self.template.json_arguments = reads_json_arguments(self._rendered_call, self.call_id("look", 0))
        self.results_follow_calls = family.results_follow_calls
        """The template shows a tool's result rightly only after the call that it answers."""
        self.boundary: TurnBoundary = find_boundary(self.after_answer(()), self.encoder, self.family)
        self.results_follow_calls = self.results_follow_calls or self._results_need_calls()
        eos = tokenizer.eos_token_id
        self.stop_token_ids: frozenset[int] = self.boundary.stop_ids | ({eos} if isinstance(eos, int) else set())
        self._before_ids = self.encoder.encode(_BEFORE)
        self._known_suffix = functools.lru_cache(KNOWN_SUFFIXES)(self._suffix)
        self._markup = _ids(self.encoder, family.markup)
        self.header: str = self.template.render([user("x")], generation_prompt=True)
        """A short prompt, up to and with what the template writes before an answer."""
        self.guard = self.template.guard = self._made_guard()
        self._spans = ContentSpans(self.after_answer, self.guard.text)
        self._reader = AnswerReader(self.family, self.template.source, tool_parser, self.header)

    def _rendered_call(self, call: ToolCall, json_arguments: bool) -> str:
        """Return a conversation that ends with a call, whose arguments are passed as JSON text or as a mapping."""
        self.template.json_arguments = json_arguments
        return self.template.render([user("x"), Message(role="assistant", tool_calls=(call,))])

    def _results_need_calls(self) -> bool:
        """Return True if the template refuses a tool's result after a plain answer, or shows it differently there."""
        result = [Message(role="tool", content="x", tool_call_id=self.call_id("look", 0), name="look")]
        with contextlib.suppress(TemplateError):
            after_call = self._after_answer(result, calls=True)
            try:
                return after_call != self._after_answer(result, calls=False)
            except TemplateError:
                return True
        return False

    def _made_guard(self) -> ContentGuard:
        """Return the guard against the special tokens, and the other added ones that stand between messages.

        The marks of thinking and of calls are left alone, for prompts explain with them how to answer. They begin no
        message, but in a family that marks whole answers with them.
        """
        family, encoder = self.family, self.encoder
        marks = set() if family.marks_answers else {*family.markup, family.thinking.open, family.thinking.close}
        between = [self.header, self.template.render([system("x"), user("x")]), self.after_answer([user("x")])]
        with contextlib.suppress(TemplateError):
            between.append(self.after_answer([Message(role="tool", content="x", name="x")]))
        separators = {token for token in encoder.added_in("".join(between)) if _is_separator(token)}
        control = {token for token in encoder.special_tokens | separators if token.strip()} - marks
        return ContentGuard(
            control,
            is_text=encoder.is_text,
            normalize=encoder.normalize if control & encoder.normalized_tokens else None,
        )

    @property
    def thinking(self) -> ThinkingMarks:
        """How the model thinks."""
        return self.family.thinking

    @property
    def thinks(self) -> bool:
        """Return True if answers hold thinking: the template knows it, and it is on or cannot be switched off."""
        switched_on = self.enable_thinking or self.thinking.always or self._opened
        return self.thinking.close in self.template.source and switched_on

    @property
    def _opened(self) -> bool:
        """Return True if the template opens the thinking of an answer."""
        return self.header.rstrip().endswith(self.thinking.open)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Rendered:
        """Return the first prompt of a sequence, with the header of the answer.

        Raises:
            TemplateError: The template refuses the messages.
            LedgerError: The template does not show every image.
            EnvironmentFailure: An image cannot be read.
        """
        ids = self.encoder.encode(self.template.render(messages, tools=tools, generation_prompt=True))
        return self._with_images(Rendered(ids, [Source.PROMPT] * len(ids)), messages)

    def suffix(self, messages: Sequence[Message], *, last_id: int | None) -> Rendered:
        """Render what follows an answer: the end of its turn if the model did not write it, messages, the next header.

        Args:
            messages: The new messages.
            last_id: The last token of the answer; ``None`` when the answer is empty.

        Raises:
            TemplateError: The template refuses the messages.
            LedgerError: The new text would change tokens before it, or the template does not show every image.
            EnvironmentFailure: An image cannot be read.
        """
        appended = tuple(messages)
        known = self._known_suffix(appended) if all(map(_is_short, appended)) else self._suffix(appended)
        start = bool(known.ids) and self.boundary.is_written(last_id, known.ids[0])
        rendered = Rendered(known.ids[start:], known.sources[start:])
        if known.images:
            return replace(rendered, images=tuple(image.shift(-start) for image in known.images))
        return rendered

    def _suffix(self, messages: tuple[Message, ...]) -> Rendered:
        """Render what follows an answer that lacks nothing but the end of its turn."""
        text = self.after_answer(messages)
        encoded = self.encoder.encode_with_offsets(_BEFORE + text)
        known = len(self._before_ids)
        if encoded.ids[:known] != self._before_ids:
            raise LedgerError(
                "the tokens of new messages merge with the answer before them",
                got=self.encoder.decode(encoded.ids[: known + 4]),
                expected="an end of turn that is a token of its own",
            )
        sources = [Source.TEMPLATE] * len(encoded.ids)
        for span in self._spans.find(text, messages):
            first, after = encoded.token_span(span.start + len(_BEFORE), span.end + len(_BEFORE))
            sources[first:after] = [span.source] * (after - first)
        return self._with_images(Rendered(encoded.ids[known:], sources[known:]), messages)

    def _with_images(self, rendered: Rendered, messages: Sequence[Message]) -> Rendered:
        """Write out the placeholders of the messages' images."""
        images = images_of(messages)
        if not images or self.images is None:
            return rendered
        placed = placed_images(rendered.ids, images, self.images)
        times = list(counts(len(rendered.ids), placed))
        return Rendered(_written_out(rendered.ids, times), _written_out(rendered.sources, times), tuple(placed))

    def after_answer(self, messages: Sequence[Message]) -> str:
        """Return the text that follows an answer: the end of its turn, the messages, the header of the next answer.

        Raises:
            TemplateError: The template refuses the messages, or leaves out what the assistant said.
        """
        return self._after_answer(messages, calls=self.results_follow_calls)

    def _after_answer(self, messages: Sequence[Message], *, calls: bool) -> str:
        """Render what follows an answer; with `calls`, one that made the calls whose results come first."""
        answer = Message(role="assistant", content=STAND_IN)
        if calls:
            answer = replace(answer, tool_calls=tuple(self._answered_calls(messages)))
        text = self.template.render([user(_BEFORE), answer, *messages], generation_prompt=True)
        _, found, after = text.rpartition(STAND_IN)
        if not found:
            raise TemplateError("the chat template leaves out what the assistant said", got=text)
        return after[first_of(after, self._ends()) :] if answer.tool_calls else after

    def _answered_calls(self, messages: Sequence[Message]) -> Iterator[ToolCall]:
        """Stand-ins for the calls that the leading tool results among `messages` answer."""
        for index, message in enumerate(takewhile(lambda message: message.role == "tool", messages)):
            name = message.name or "tool"
            call_id = message.tool_call_id or self.call_id(name, index)
            yield ToolCall(name=name, arguments={"value": STAND_IN}, id=call_id)

    def call_id(self, name: str, index: int) -> str:
        """Return the id of a conversation's call number `index`, from 0 on, in the family's form."""
        return self.family.call_id.format(name=name, index=index, number=index + 1)

    def _ends(self) -> list[str]:
        """Return the texts that end a turn."""
        if any(map(self.encoder.added_id, self.family.end_of_turn)):
            return list(self.family.end_of_turn)
        return [self.encoder.decode([self.boundary.end_id])]

    def prefill(self, text: str) -> list[int]:
        """Tokens of text that is put in the policy's mouth at the start of its answer."""
        return self.encoder.encode(text)

    def answer_text(self, message: Message, *, earlier_calls: int = 0) -> str:
        """Return the text with which the model would say `message`, tool calls included, as the template shows it.

        Args:
            message: Its calls get ids in the family's form.
            earlier_calls: Tool calls that the conversation holds already.

        Raises:
            TemplateError: The template refuses the message, leaves out a call, or does not write the message right
                after the header of an answer.
        """
        asked = self.header
        numbered = enumerate(message.tool_calls, start=earlier_calls)
        calls = tuple(replace(call, id=self.call_id(call.name, index)) for index, call in numbered)
        given = self.template.render([user(_BEFORE), replace(message, tool_calls=calls)])
        if self._opened and not given.startswith(asked):
            given = self._with_empty_thought(given)
        text = given.removeprefix(asked)
        end = len(text) if self.boundary.opens_message else max(map(text.rfind, self._ends()))
        if not given.startswith(asked) or end < 0:
            raise TemplateError(
                "the chat template begins an answer in another way when it is given than when it is asked for",
                got=repr(given),
                expected=f"a text that starts with {asked!r}",
                hint="set agent.enable_thinking to what the answers hold, or use another chat template",
            )
        for call in calls:
            if not all(part in text for part in (call.name, *filter(str.isidentifier, call.arguments))):
                raise self.call_not_shown(call, text)
        return text[:end]

    def call_not_shown(self, call: ToolCall, text: str) -> TemplateError:
        """Make the error about a text that leaves out a call of the answer."""
        return TemplateError(
            f"the chat template does not show the call of {call.name}, so the model would not see its own calls",
            got=f"{_shortened(text)!r} for an answer that calls {call.name}",
            expected=f"a text with the tool's name and the arguments {dict(call.arguments)}",
            hint=self.ways_around_tools,
        )

    @property
    def ways_around_tools(self) -> str:
        """What the user can do if the template does not show tools or calls."""
        shipped = self.family.name in shipped_chat_templates()
        template = self.family.name if shipped else "FILE, a template of the model's family that shows tools and calls"
        return f"set model.chat_template={template}; or use an agent loop without tool calls: agent.loop=react_text"

    def _with_empty_thought(self, given: str) -> str:
        """A conversation whose answer has no thinking, as if the thinking that the header opens were closed at once."""
        closed = self.thinking.written("", self.header)
        before = self.header[: self.header.rindex(self.thinking.open)]
        answer = given.removeprefix(before)
        if not given.startswith(before):
            return given
        return self.header + (answer if answer.startswith(self.thinking.close) else closed + answer)

    def plain_answer(self, text: str, *, thought: str | None = None) -> str:
        """Return the text with which the model would say `text` only, after a thought if there is one."""
        if self.family.marks_answers:
            text = self.answer_text(Message(role="assistant", content=text))
        else:
            text = self.guard.text(text)
        if thought is None and not self._opened:
            return text
        return self.thinking.written(self.guard.text(thought or ""), self.header) + text

    def demonstration(self, text: str) -> list[int]:
        """Encode a whole answer that the policy did not sample, with the end of its turn."""
        return [*self.encoder.encode(text), self._demonstrated_end(text)]

    def _demonstrated_end(self, text: str) -> int:
        """Return the token with which the model should end an answer."""
        family = self.family
        calls = family.call_end is not None and family.call_mark in text
        end = self.encoder.added_id((family.call_end if calls else family.answer_end) or "")
        return self.boundary.end_id if end is None else end

    def read(
        self,
        token_ids: Sequence[int],
        *,
        stop_reason: StopReason = StopReason.STOP,
        tools: Sequence[ToolSchema] = (),
        repairs_calls: bool = False,
    ) -> Answer:
        """The answer that tokens stand for: content, thinking and tool calls apart, problems in words. Never raises."""
        text = self.plain_text(token_ids)
        return self._reader.read(text, stop_reason, tools, repairs_calls=repairs_calls)

    def plain_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer's tokens, special tokens left out but for those that mark its parts."""
        return self.encoder.decode_plain(token_ids, keep=self._markup)

    def read_beginning(self, text: str, tools: Sequence[ToolSchema] = ()) -> tuple[str, str]:
        """Return the thinking and the content of an answer of which this is the beginning, as far as they are certain.

        Args:
            text: The `plain_text` of its tokens so far.
            tools: Those that were offered.
        """
        return self._reader.read_beginning(text, tools)

    def structure(self, form: AnswerForm, tools: Sequence[ToolSchema]) -> str:
        """Return what an engine holds an answer to, as `agentrl.engine.SamplingParams` has it.

        Raises:
            UnsupportedOption: It is not known how the model writes such an answer.
        """
        if self.family.marks_answers:
            raise UnsupportedOption(
                "answers in channels cannot be held to a form", option="form", got=f"family {self.family.name}"
            )
        thinking = self.thinking if self.thinks else None
        return structure_of(form, tools, parser=self._reader.parser_name, thinking=thinking, header=self.header)

    @property
    def parser_name(self) -> str | None:
        """Registry name of the parser of tool calls; ``None`` where the model has no known way to call tools."""
        return self._reader.parser_name

    def require_tools(self) -> None:
        """Check that the model can be offered tools: its prompts show them, and its calls can be read.

        Raises:
            TemplateError: Its family has no known way to call tools, or the chat template leaves tools out.
        """
        self._reader.require_parser()
        if not self._shows_tools:
            raise self.tool_not_shown(PROBE_NAME)

    @functools.cached_property
    def _shows_tools(self) -> bool:
        return PROBE_NAME in self.template.render([user("x")], tools=[PROBE_TOOL], generation_prompt=True)

    def tool_not_shown(self, name: str) -> TemplateError:
        """Make the error about a prompt that leaves out a tool."""
        return TemplateError(
            "the chat template does not show tools, so the model would not know what it can call",
            got=f"a prompt without the name of the tool {name}",
            expected="a prompt that names each tool that is offered",
            hint=self.ways_around_tools,
        )

    def cut(self, text: str, max_tokens: int) -> str:
        """`text` cut to a token budget, with a visible mark (see `TextEncoder.cut`)."""
        text = encodable(text)
        guarded = self.guard.text(text)
        kept = self.encoder.cut(guarded, max_tokens)
        return text if kept == guarded else unbroken(kept)

    def split(self, text: str, max_tokens: int) -> list[str]:
        """`text` in parts of at most so many tokens (see `TextEncoder.split`)."""
        return [unbroken(part) for part in self.encoder.split(self.guard.text(text), max_tokens)]


def _is_separator(token: str) -> bool:
    """Return True if an added token looks like a mark between messages, and not like a word or blanks of any text.

    >>> [_is_separator(token) for token in ("<start_of_turn>", "assistant", chr(10), "▁▁")]
    [True, False, False, False]
    """
    letters = sum(letter.isalnum() for letter in token)
    return letters > 0 and any(not (letter.isalnum() or letter.isspace() or letter == "_") for letter in token)


def _shortened(text: str) -> str:
    """Return the beginning and the end of a text that is too long for an error message."""
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN // 2]} … {text[-_LONGEST_SHOWN // 2 :]}"


def _is_short(message: Message) -> bool:
    return isinstance(message.content, str) and len(message.content) <= LONGEST_KNOWN and not message.tool_calls


def _written_out(items: Sequence[T], times: Sequence[int]) -> list[T]:
    return [item for item, count in zip(items, times, strict=True) for item in repeat(item, count)]
