"""Renderer of conversations to token ids, turn by turn.

The first prompt is rendered and encoded as a whole. After that, no earlier message is rendered again: the text after an
answer is the difference of two renderings of a short stand-in conversation, one that ends with a stand-in answer and
one that continues with the new messages. The cost of a turn therefore does not grow with the history. Before a run
starts, `agentrl.render.template_check` verifies that the difference does not depend on the history. Sampled tokens are
never decoded and encoded again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat, takewhile
from typing import TYPE_CHECKING, TypeVar

from agentrl.agent_loop import Answer, AnswerForm, UnsupportedOption
from agentrl.engine import StopReason
from agentrl.errors import LedgerError, TemplateError
from agentrl.message import Message, ToolCall, encodable, system, user
from agentrl.message.image import PlacedImage
from agentrl.render.answers import AnswerReader
from agentrl.render.call_form import PROBE_NAME, PROBE_TOOL, reads_json_arguments
from agentrl.render.chat_template import ChatTemplate, TextEncoder, ToolSchema, shipped_chat_templates
from agentrl.render.content_guard import ContentGuard, unbroken
from agentrl.render.families import Family, ThinkingMarks, detect_family
from agentrl.render.images import ImageProcessor, counts, images_of, place_images
from agentrl.render.named_templates import choose_chat_template
from agentrl.render.skeleton import SHAPES, ContentSpans, Skeleton, Span, shape_of, source_of
from agentrl.render.structured_output import structure_of
from agentrl.render.tool_parsers.values import first_of
from agentrl.trajectory import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MAX_SHOWN_CHARS = 300


class OmittedText(TemplateError):
    """Error of a chat template that leaves out the text or the thinking of an answer."""


@dataclass(frozen=True, slots=True)
class TurnBoundary:
    """Rule for joining an answer and the text after it."""

    end_id: int
    """Token that the template writes at the end of an answer."""
    end_ids: frozenset[int]
    """Tokens that end an answer when the model writes them; the template's own end is then omitted."""
    stop_ids: frozenset[int]
    """Tokens at which sampling stops."""
    opens_message: bool = False
    """True if the end of an answer is the head of the next message; it is omitted only if both tokens are equal."""

    def is_written(self, last_id: int | None, following: int) -> bool:
        """Return True if an answer that ends with `last_id` already has its end, which `following` would repeat."""
        return last_id == following if self.opens_message else last_id in self.end_ids


def find_boundary(after_answer: str, encoder: TextEncoder, family: Family) -> TurnBoundary:
    """Return the family's boundary rule if the template follows it, or else derive the rule from the template.

    `after_answer` is the template's text after an answer, up to and including the next answer's header.

    Raises:
        TemplateError: The text after an answer does not begin with an added token.
    """
    first = encoder.encode(after_answer)[:1]
    if family.ends_open_messages and (heads := _ids(encoder, family.end_of_turn)):
        (end,) = _ids(encoder, family.end_of_turn[:1])
        return TurnBoundary(end, heads, heads | _ids(encoder, family.stop_tokens), opens_message=True)
    if family.end_of_turn and after_answer.startswith(family.end_of_turn[0] + family.after_end):
        ends = _ids(encoder, family.end_of_turn)
        if first and first[0] in ends:
            stops = ends - _ids(encoder, family.continues_after)
            return TurnBoundary(first[0], ends, stops | _ids(encoder, family.stop_tokens))
    if not first or not encoder.is_added(first[0]):
        raise TemplateError(
            "the chat template does not mark the end of an answer",
            got=repr(after_answer[:60]),
            expected="a special token right after the assistant's content, such as <|im_end|>",
            hint="add the token that ends a turn to the tokenizer as a special token, and to its chat template",
        )
    return TurnBoundary(first[0], frozenset(first), frozenset(first))


def _ids(encoder: TextEncoder, tokens: tuple[str, ...]) -> frozenset[int]:
    return frozenset(i for token in tokens if (i := encoder.added_id(token)) is not None)


STAND_IN = "@@STAND-IN@@"
"""Text of an answer whose messages are rendered; with a number if a message contains it."""
KNOWN_SUFFIXES = 4096
"""Maximum number of cached renderings of new messages; the members of a group often get the same messages."""
MAX_CACHED_CHARS = 500
"""Maximum number of characters of a cached message; longer ones rarely repeat."""
_BEFORE = "x"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RenderedTokens:
    """Tokens to append to a ledger, with the source of each."""

    ids: list[int]
    sources: bytes
    """Values of `Source`."""
    images: tuple[PlacedImage, ...] = ()
    """Images, with positions relative to the first id."""


class Renderer:
    """Renderer of messages to tokens for one model.

    Args:
        tokenizer: Fast tokenizer of the model with its chat template.
        enable_thinking: Switch for templates that support thinking.
        tool_parser: Registry name of the parser for tool calls; ``auto`` chooses it by the family.
        images: Image processor; ``None`` for a model that reads only text.

    Raises:
        TemplateError: The template is missing, or does not mark the end of a turn.
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
        """True to render a conversation again whenever the template shows earlier turns differently."""
        self.omits_text_beside_calls = False
        """True to do so after answers with text and tool calls, because the template leaves out the text."""
        self.keeps_contexts = False
        """True to keep the messages of each turn with the episode, for a teacher with another tokenizer."""
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
        self.template.json_arguments = reads_json_arguments(self._render_call, self.call_id("look", 0))
        self.results_follow_calls = family.results_follow_calls
        """True if the template shows a tool's result correctly only after its call."""
        self._end_of_text = str(tokenizer.eos_token or "")
        self.header: str = self.template.render([user(_BEFORE)], generation_prompt=True)
        """Short prompt that ends with the template's header of an answer."""
        self.boundary: TurnBoundary = find_boundary(self._after_history(), self.encoder, self.family)
        self.results_follow_calls = self.results_follow_calls or self._results_need_calls()
        eos = tokenizer.eos_token_id
        self.stop_token_ids: frozenset[int] = self.boundary.stop_ids | ({eos} if isinstance(eos, int) else set())
        self._before_ids = self.encoder.encode(_BEFORE)
        self._skeletons = functools.lru_cache(SHAPES)(self._find_skeleton)
        self._known_suffix = functools.lru_cache(KNOWN_SUFFIXES)(self._suffix)
        self._markup = _ids(self.encoder, family.markup)
        self.thinking: ThinkingMarks = self._find_thinking()
        """Marks of the model's thinking, in the form in which the template shows a thought."""
        self.guard = self.template.guard = self._make_guard()
        self._spans = ContentSpans(self.after_answer, self.guard.text)
        self._reader = AnswerReader(self.family, self.template.source, tool_parser, self.header)
        self.template.in_trial = False

    def _render_call(self, call: ToolCall, json_arguments: bool) -> str:
        """Render a conversation that ends with a call, with its arguments as JSON text or as a mapping."""
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

    def _make_guard(self) -> ContentGuard:
        """Make the guard against special tokens and other added tokens that separate messages.

        The marks of thinking and tool calls are allowed, because prompts use them to explain the answer format. They
        do not begin messages, except in families that mark whole answers with them.
        """
        family, encoder = self.family, self.encoder
        marks = set() if family.marks_answers else {*family.markup, family.thinking.open, family.thinking.close}
        between = [self.header, self.template.render([system("x"), user("x")]), self.after_answer([user("x")])]
        with contextlib.suppress(TemplateError):
            between.append(self.after_answer([Message(role="tool", content="x", name="x")]))
            marks -= (encoder.added_in(between[-1]) & encoder.special_tokens) - encoder.added_in(self.header)
        separators = {token for token in encoder.added_in("".join(between)) if _is_separator(token)}
        control = {token for token in encoder.special_tokens | separators if token.strip()} - marks
        return ContentGuard(
            control,
            is_text=encoder.is_text,
            normalize=encoder.normalize if control & encoder.normalized_tokens else None,
        )

    def _find_thinking(self) -> ThinkingMarks:
        """Return the family's marks in the template's form, which differs within a family: GLM 4.5 and 4.7."""
        marks, thought, text = self.family.thinking, "@@THOUGHT@@", "@@TEXT@@"
        if self.thinks and not self.family.marks_answers:
            with contextlib.suppress(TemplateError):
                answer = Message(role="assistant", content=text, reasoning=thought)
                shown = self.template.render([user(_BEFORE), answer])
                return marks.in_form_of(shown, header=self.header, thought=thought, text=text)
        return marks

    @property
    def thinks(self) -> bool:
        """True if answers contain thinking: the template supports it, and it is on or cannot be switched off."""
        switched_on = self.enable_thinking or self.family.thinking.always or self.opens_thinking
        return self.family.thinking.close in self.template.source and switched_on

    @property
    def opens_thinking(self) -> bool:
        """True if the template opens the thinking of an answer."""
        return self.header.rstrip().endswith(self.family.thinking.open)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> RenderedTokens:
        """Render the first prompt of a sequence, with the header of the answer.

        Raises:
            TemplateError: The template refuses the messages.
            LedgerError: The template does not show every image.
            EnvironmentFailure: An image cannot be read.
        """
        ids = self.encoder.encode(self.template.render(messages, tools=tools, generation_prompt=True))
        return self._with_images(RenderedTokens(ids, bytes([Source.PROMPT]) * len(ids)), messages)

    def hint(self, text: str) -> list[int]:
        """Render a message before a conversation, the system's or (if the template refuses it) the user's: token ids.

        Raises:
            TemplateError: the template shows neither.
        """
        probe = "@@HINT@@"
        for role in ("system", "user"):
            with contextlib.suppress(TemplateError):
                if probe in self.template.render([Message(role=role, content=probe)]):
                    return self.encoder.encode(self.template.render([Message(role=role, content=text)]))
        raise TemplateError("the chat template shows no system or user message", expected="another model.chat_template")

    def suffix(self, messages: Sequence[Message], *, last_id: int | None) -> RenderedTokens:
        """Render the text after an answer: the end of its turn unless the model wrote it, messages, the next header.

        `last_id` is the last token of the answer; ``None`` if the answer is empty.

        Raises:
            TemplateError: The template refuses the messages.
            LedgerError: The new text would change tokens before it, or the template does not show every image.
            EnvironmentFailure: An image cannot be read.
        """
        appended = tuple(messages)
        known = self._known_suffix(appended) if all(map(_is_short, appended)) else self._suffix(appended)
        start = bool(known.ids) and self.boundary.is_written(last_id, known.ids[0])
        rendered = RenderedTokens(known.ids[start:], known.sources[start:])
        if known.images:
            return replace(rendered, images=tuple(image.shift(-start) for image in known.images))
        return rendered

    def _suffix(self, messages: tuple[Message, ...]) -> RenderedTokens:
        """Render the text after an answer that lacks only the end of its turn."""
        text, spans = self._write_after_answer(messages)
        shift, known = len(_BEFORE), len(self._before_ids)
        ids, ranges = self.encoder.encode_with_ranges(
            _BEFORE + text, [(span.start + shift, span.end + shift) for span in spans]
        )
        if ids[:known] != self._before_ids:
            raise LedgerError(
                "the tokens of new messages merge with the answer before them",
                got=self.encoder.decode(ids[: known + 4]),
                expected="an end of turn that is a separate token",
            )
        sources = bytearray([Source.TEMPLATE]) * len(ids)
        for span, (first, after) in zip(spans, ranges, strict=True):
            sources[first:after] = bytes([span.source]) * (after - first)
        return self._with_images(RenderedTokens(ids[known:], bytes(sources[known:])), messages)

    def _write_after_answer(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return the text that follows an answer, with the ranges of the messages' contents."""
        contents = [message.content for message in messages if isinstance(message.content, str)]
        if len(contents) == len(messages) and not any(message.tool_calls for message in messages):
            skeleton = self._skeletons(tuple(map(shape_of, messages)))
            filled = None if skeleton is None else skeleton.fill([*map(self.guard.text, contents)])
            if filled is not None:
                text, ranges = filled
                return text, [Span(*part, source_of(one)) for part, one in zip(ranges, messages, strict=True)]
        text = self.after_answer(messages)
        return text, self._spans.find(text, messages)

    def _find_skeleton(self, shape: tuple[Message, ...]) -> Skeleton | None:
        """Return the text around the contents of messages after an answer; ``None`` if it depends on the contents."""
        answer = self._stand_in_answer(shape, STAND_IN, calls=self.results_follow_calls)
        found = self.template.find_skeleton([user(_BEFORE), answer, *shape], first=2)
        if found is None or not isinstance(found.parts[0], str):
            return None
        before = self._after_stand_in(found.parts[0], answer)
        skeleton = Skeleton((before, *found.parts[1:]), found.conditions)
        with contextlib.suppress(TemplateError):
            if [part for part in skeleton.parts if isinstance(part, str)] == self._spans.around(shape):
                return skeleton
        return None

    def _with_images(self, rendered: RenderedTokens, messages: Sequence[Message]) -> RenderedTokens:
        """Expand the placeholders of the messages' images."""
        images = images_of(messages)
        if not images or self.images is None:
            return rendered
        placed = place_images(rendered.ids, images, self.images)
        times = list(counts(len(rendered.ids), placed))
        ids, sources = _repeat_items(rendered.ids, times), bytes(_repeat_items(rendered.sources, times))
        return RenderedTokens(ids, sources, tuple(placed))

    def after_answer(self, messages: Sequence[Message]) -> str:
        """Return the text that follows an answer: the end of its turn, the messages, the header of the next answer.

        Raises:
            TemplateError: The template refuses the messages, or omits the assistant's content.
        """
        return self._after_answer(messages, calls=self.results_follow_calls)

    def _after_history(self) -> str:
        """Return the text after an answer before a message: some templates end the last answer differently, or not."""
        text = self.after_answer(())
        is_end_of_text = bool(self._end_of_text) and text.startswith(self._end_of_text)
        is_header = self.header.endswith(text) and not self.family.ends_open_messages
        return self.after_answer([user(_BEFORE)]) if is_end_of_text or is_header else text

    def _after_answer(self, messages: Sequence[Message], *, calls: bool) -> str:
        """Render the text after an answer; with `calls`, the answer made the calls of the leading tool results."""
        numbers = itertools.count(1)
        stand_in = STAND_IN
        while any(stand_in in message.text for message in messages):
            stand_in = f"@@STAND-IN-{next(numbers)}@@"
        answer = self._stand_in_answer(messages, stand_in, calls=calls)
        text = self.template.render([user(_BEFORE), answer, *messages], generation_prompt=True)
        return self._after_stand_in(text, answer)

    def _stand_in_answer(self, messages: Sequence[Message], stand_in: str, *, calls: bool) -> Message:
        """Return an answer; with `calls`, one that made the calls of the leading tool results in `messages`."""
        answered = takewhile(lambda message: message.role == "tool", messages if calls else ())
        made = [
            ToolCall(
                name=message.name or "tool",
                arguments={"value": stand_in},
                id=message.tool_call_id or self.call_id(message.name or "tool", index),
            )
            for index, message in enumerate(answered)
        ]
        content = "" if made and self.family.text_after_results else stand_in
        return Message(role="assistant", content=content, tool_calls=tuple(made))

    def _after_stand_in(self, text: str, answer: Message) -> str:
        """Return the text after an answer from `_stand_in_answer`."""
        _, found, after = text.rpartition(answer.text or answer.tool_calls[-1].arguments["value"])
        if not found:
            raise TemplateError("the chat template omits the assistant's content", got=text)
        return after[first_of(after, self._ends()) :] if answer.tool_calls else after

    def call_id(self, name: str, index: int) -> str:
        """Return the id of a conversation's call with number `index`, from 0 on, in the family's format."""
        return self.family.call_id.format(name=name, index=index, number=index + 1)

    def _ends(self) -> list[str]:
        """Return the texts that end a turn."""
        if any(map(self.encoder.added_id, self.family.end_of_turn)):
            return list(self.family.end_of_turn)
        return [self.encoder.decode([self.boundary.end_id])]

    def prefill(self, text: str) -> list[int]:
        """Return the tokens of a text that begins the policy's answer."""
        return self.encoder.encode(text)

    def answer_text(self, message: Message, *, earlier_calls: int = 0) -> str:
        """Return `message` as the model would write it, including tool calls, in the template's form.

        Calls get ids in the family's format, which count on from `earlier_calls`.

        Raises:
            OmittedText: The template leaves out the message's text or thinking.
            TemplateError: The template refuses the message, omits a call, or does not write the message directly after
                the header of an answer.
        """
        header = self.header
        numbered = enumerate(message.tool_calls, start=earlier_calls)
        calls = tuple(replace(call, id=self.call_id(call.name, index)) for index, call in numbered)
        given = self.template.render([user(_BEFORE), replace(message, tool_calls=calls)])
        if self.thinking.open in header and not given.startswith(header):
            given = self._with_empty_thought(given)
        text = given.removeprefix(header)
        end = max(map(text.rfind, self._ends()))
        if self.boundary.opens_message and text[end:].strip() not in self._ends():
            end = len(text)
        if end < 0 and self._end_of_text:
            end = text.rfind(self._end_of_text)
        if end < 0 and message.text and text.endswith(message.text):  # Apertus writes the end before the next message
            end = len(text)
        if not given.startswith(header) or end < 0:
            raise TemplateError(
                "the chat template begins a past answer differently from a new one",
                got=repr(given),
                expected=f"a text that starts with {header!r}",
                hint="set agent.enable_thinking to match the answers, or use another chat template",
            )
        for call in calls:
            if not all(part in text for part in (call.name, *filter(str.isidentifier, call.arguments))):
                raise self.call_not_shown(call, text)
        self._check_text_shown(message, text[:end])
        return text[:end]

    def _check_text_shown(self, message: Message, shown: str) -> None:
        """Raise `OmittedText` if a rendered answer lacks the message's text or thinking, apart from white space."""
        found = without_space(unbroken(shown))
        for what, part in (("text", message.text), ("thinking", message.reasoning or "")):
            if without_space(part) not in found:
                beside = " next to tool calls" if message.tool_calls else ""
                into = "write the thinking into the text, or set model.chat_template to a template that shows it"
                raise OmittedText(
                    f"the chat template leaves out the {what} of an answer{beside}",
                    got=repr(_shorten(shown)),
                    expected=f"an answer with the {what} {_shorten(part)!r}",
                    hint=into if what == "thinking" else f"set model.chat_template={self._complete_template}",
                )

    def call_not_shown(self, call: ToolCall, text: str) -> TemplateError:
        """Make the error about a text that omits a call of the answer."""
        return TemplateError(
            f"the chat template does not show the call of {call.name}, so the model would not see its own calls",
            got=f"{_shorten(text)!r} for an answer that calls {call.name}",
            expected=f"a text with the tool's name and the arguments {dict(call.arguments)}",
            hint=self.ways_around_tools,
        )

    @property
    def ways_around_tools(self) -> str:
        """Hint for users whose template does not show tools or calls."""
        return (
            f"set model.chat_template={self._complete_template}; or use an agent loop without tool calls: "
            "agent.loop=react_text"
        )

    @property
    def _complete_template(self) -> str:
        """Shipped template for the model, or a description of a file with one, that shows all parts of an answer."""
        names = [self.family.name, *(["chatml"] if "<|im_start|>" in self.family.template_marks else [])]
        shipped = shipped_chat_templates()
        described = "FILE, a template of the model's family that shows tools, calls, and the text next to them"
        return next((name for name in names if name in shipped), described)

    def _with_empty_thought(self, given: str) -> str:
        """Return the rendering of an answer without thinking, with the empty thought that the header opens or has."""
        before, _, opened = self.header.rpartition(self.thinking.open)
        answer = given.removeprefix(before)
        if not given.startswith(before):
            return given
        answer = answer.removeprefix(self.thinking.open)
        if self.thinking.close in opened:
            return self.header + answer.removeprefix(self.thinking.close)
        closed = self.thinking.write("", self.header)
        return self.header + (answer if answer.startswith(self.thinking.close) else closed + answer)

    def plain_answer(self, text: str, *, thought: str | None = None) -> str:
        """Return `text` as the model would write it, after an optional thought and without calls."""
        if self.family.marks_answers:
            text = self.answer_text(Message(role="assistant", content=text))
        else:
            text = self.guard.text(text)
        if thought is None and not self.opens_thinking:
            return text
        return self.thinking.write(self.guard.text(thought or ""), self.header) + text

    def demonstration(self, text: str) -> list[int]:
        """Encode a complete answer that the policy did not sample, with the end of its turn."""
        return [*self.encoder.encode(text), self._demonstrated_end(text)]

    def _demonstrated_end(self, text: str) -> int:
        """Return the token that should end an answer."""
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
        """Parse tokens to an answer with separate content, thinking, tool calls and problems. Never raises."""
        text = self.plain_text(token_ids)
        return self._reader.read(text, stop_reason, tools, repairs_calls=repairs_calls)

    def plain_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer's tokens without special tokens, except those that mark its parts."""
        return self.encoder.decode_plain(token_ids, keep=self._markup)

    def read_beginning(self, text: str, tools: Sequence[ToolSchema] = ()) -> tuple[str, str]:
        """Return the thinking and the content of an unfinished answer that no later text can change."""
        return self._reader.read_beginning(text, tools)

    def structure(self, form: AnswerForm, tools: Sequence[ToolSchema]) -> str:
        """Return the structure that an engine enforces, for `agentrl.engine.SamplingParams.structure`.

        Raises:
            UnsupportedOption: The model's notation of such an answer is unknown.
        """
        if self.family.marks_answers:
            raise UnsupportedOption(
                "answers in channels cannot have a required format", option="form", got=f"family {self.family.name}"
            )
        thinking = self.thinking if self.thinks else None
        return structure_of(form, tools, parser=self._reader.parser_name, thinking=thinking, header=self.header)

    @property
    def parser_name(self) -> str | None:
        """Registry name of the parser for tool calls; ``None`` if the model's notation is unknown."""
        return self._reader.parser_name

    def require_tools(self) -> None:
        """Check that the model can use tools: its prompts show them, and its calls can be read.

        Raises:
            TemplateError: The family's notation of calls is unknown, or the chat template omits tools.
        """
        self._reader.require_parser()
        if not self._shows_tools:
            raise self.tool_not_shown(PROBE_NAME)

    @functools.cached_property
    def _shows_tools(self) -> bool:
        return PROBE_NAME in self.template.render([user("x")], tools=[PROBE_TOOL], generation_prompt=True)

    def tool_not_shown(self, name: str) -> TemplateError:
        """Make the error about a prompt that omits a tool."""
        return TemplateError(
            "the chat template does not show tools, so the model would not know what it can call",
            got=f"a prompt without the name of the tool {name}",
            expected="a prompt that names each offered tool",
            hint=self.ways_around_tools,
        )

    def cut(self, text: str, max_tokens: int) -> str:
        """Cut `text` to at most `max_tokens` tokens, with a visible mark (see `TextEncoder.cut`)."""
        text = encodable(text)
        guarded = self.guard.text(text)
        kept = self.encoder.cut(guarded, max_tokens)
        return text if kept == guarded else unbroken(kept)

    def split(self, text: str, max_tokens: int) -> list[str]:
        """Split `text` into parts of at most `max_tokens` tokens (see `TextEncoder.split`)."""
        return [unbroken(part) for part in self.encoder.split(self.guard.text(text), max_tokens)]


def _is_separator(token: str) -> bool:
    """Return True if an added token looks like a separator of messages, not like a word or white space.

    >>> [_is_separator(token) for token in ("<start_of_turn>", "assistant", chr(10), "▁▁")]
    [True, False, False, False]
    """
    letters = sum(letter.isalnum() for letter in token)
    return letters > 0 and any(not (letter.isalnum() or letter.isspace() or letter == "_") for letter in token)


def without_space(text: str) -> str:
    """Return a text without white space, which templates add and trim."""
    return "".join(text.split())


def _shorten(text: str) -> str:
    """Return the beginning and the end of a text that is too long for an error message."""
    return (
        text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS // 2]} … {text[-_MAX_SHOWN_CHARS // 2 :]}"
    )


def _is_short(message: Message) -> bool:
    return isinstance(message.content, str) and len(message.content) <= MAX_CACHED_CHARS and not message.tool_calls


def _repeat_items(items: Sequence[T], times: Sequence[int]) -> list[T]:
    return [item for item, count in zip(items, times, strict=True) for item in repeat(item, count)]
