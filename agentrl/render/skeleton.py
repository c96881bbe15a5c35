"""Skeletons of renderings: the text that a chat template writes around the contents of messages.

Rendering a template takes longer than everything else that is done with a short message. Most templates only insert
contents, perhaps after a look at them ("does it begin with <tool_response>?"), so the text around them is the same each
time. To learn it, a template is rendered once with `ContentProbe` values, which record what the template does with
them:

- what it writes: the content, or the content without white space at its ends;
- the tests on which it decides, each with its result. A skeleton is used only for contents with the same results.

A template that does anything else with a content has no skeleton, and is rendered each time; `ContentSpans` then finds
the contents in the text.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.message import Message
from agentrl.trajectory import Source

MARK = "@@CONTENT-{}@@"
"""Text of a probe; it has nothing that a template could strip or escape except as a content."""


class Inserted(NamedTuple):
    """A content in a rendering."""

    number: int
    """Number of the content, from 0 on."""
    form: Callable[[str], str] = str
    """Function that the template applies to it: `str` or one of the strip methods of `str`."""


class Condition(NamedTuple):
    """A test of a content on which a template decides."""

    content: Inserted
    test: Callable[[str], bool]
    result: bool


Part: TypeAlias = str | Inserted


_MARKS = re.compile(r"@@CONTENT-\d+@@")
SHAPES = 512
"""Maximum number of shapes of messages whose renderings are cached."""
_FILTERS = """trim string safe tojson default d length count first last list map select reject selectattr rejectattr
items dictsort join replace upper lower title capitalize sort unique reverse batch"""
"""Filters that call methods of a text, so that a probe notices them, or do not read it."""


class ContentInspected(Exception):
    """A template did something with a content that a skeleton cannot repeat."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Text around contents, and the conditions under which a template writes it."""

    parts: tuple[Part, ...]
    conditions: tuple[Condition, ...] = ()

    def fill(self, contents: Sequence[str]) -> tuple[str, list[tuple[int, int]]] | None:
        """Return the rendering, and the range of characters of each content in it.

        ``None`` if the template writes another text around these contents.
        """
        for (number, form), test, result in self.conditions:
            if test(form(contents[number])) is not result:
                return None
        texts, spans, end = [], [], 0
        for part in self.parts:
            text = part if isinstance(part, str) else part.form(contents[part.number])
            texts.append(text)
            if not isinstance(part, str):
                spans.append((end, end + len(text)))
            end += len(text)
        return "".join(texts), spans


class _Record:
    """Record of what a template did with the contents of one rendering."""

    def __init__(self) -> None:
        self.conditions: list[Condition] = []
        self.inspected = False

    def inspect(self) -> NoReturn:
        self.inspected = True
        raise ContentInspected


class ContentProbe(str):
    """Text with a content in it, which records what a template does with it."""

    _record: _Record
    _parts: tuple[Part, ...]

    def __new__(cls, record: _Record, parts: tuple[Part, ...]) -> ContentProbe:
        """Make the probe of a text that consists of `parts`."""
        text = "".join(part if isinstance(part, str) else MARK.format(part.number) for part in parts)
        probe = super().__new__(cls, text)
        probe._record, probe._parts = record, parts
        return probe

    def __str__(self) -> str:
        """Return the probe itself to the template only; other callers would make a plain text of it."""
        if sys._getframe(1).f_code.co_filename != "<template>":
            self._record.inspect()
        return self

    def __add__(self, other: str) -> str:
        return ContentProbe(self._record, (*self._parts, *parts_of(other)))

    def __radd__(self, other: str) -> str:
        return ContentProbe(self._record, (*parts_of(other), *self._parts))

    def __bool__(self) -> bool:
        return self._test(bool, True)

    def __contains__(self, text: object) -> bool:
        plain = self._plain(text)
        return self._test(lambda content: plain in content, False)

    def __eq__(self, other: object) -> bool:
        plain = self._plain(other)
        return isinstance(other, str) and self._test(lambda content: content == plain, False)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def startswith(self, *arguments: Any) -> bool:
        """Record the test."""
        plain = [*map(self._plain, arguments)]
        return self._test(lambda content: content.startswith(*plain), False)

    def endswith(self, *arguments: Any) -> bool:
        """Record the test."""
        plain = [*map(self._plain, arguments)]
        return self._test(lambda content: content.endswith(*plain), False)

    def strip(self, *arguments: Any) -> str:
        """Return the probe of a stripped content."""
        return self._strip(str.strip, *arguments)

    def lstrip(self, *arguments: Any) -> str:
        """Return the probe of a stripped content."""
        return self._strip(str.lstrip, *arguments)

    def rstrip(self, *arguments: Any) -> str:
        """Return the probe of a stripped content."""
        return self._strip(str.rstrip, *arguments)

    def __iter__(self) -> Iterator[str]:
        return _Untouched(self._record)

    def _plain(self, value: object) -> Any:
        """Return a value that is not the probe of another content."""
        if isinstance(value, ContentProbe):
            self._record.inspect()
        return value

    def _strip(self, form: Callable[[str], str], *arguments: Any) -> str:
        content = self._content()
        if any(argument is not None for argument in arguments) or content.form not in (str, form):
            self._record.inspect()
        return ContentProbe(self._record, (Inserted(content.number, form),))

    def _test(self, test: Callable[[str], bool], result: bool) -> bool:
        self._record.conditions.append(Condition(self._content(), test, result))
        return result

    def _content(self) -> Inserted:
        """Return the content, if there is no other text."""
        (first, *others) = self._parts
        if others or isinstance(first, str):
            self._record.inspect()
        return first


class _Untouched(Iterator[str]):
    """Iterator that only shows that a content can be iterated."""

    def __init__(self, record: _Record) -> None:
        self._record = record

    def __next__(self) -> str:
        self._record.inspect()


def _refuse(probe: ContentProbe, *_arguments: Any, **_options: Any) -> NoReturn:
    probe._record.inspect()


_KEPT = """__class__ __new__ __init__ __init_subclass__ __subclasshook__ __getattribute__ __setattr__ __delattr__
__dir__ __reduce__ __reduce_ex__ __getstate__ __getnewargs__ __sizeof__ __repr__"""
for _name in dir(str):  # later versions of Python may add others
    if _name not in _KEPT.split() and _name not in vars(ContentProbe) and callable(getattr(str, _name)):
        setattr(ContentProbe, _name, _refuse)
ContentProbe.__hash__ = _refuse  # type: ignore[assignment,method-assign]  # a class with __eq__ has none
ContentProbe.__rmod__ = _refuse  # type: ignore[attr-defined]  # of "%s" % content


def parts_of(text: str) -> tuple[Part, ...]:
    """Return the parts of a text."""
    return text._parts if isinstance(text, ContentProbe) else (str(text),)


def _join(texts: Iterable[str]) -> str:
    """Join texts; the environment's replacement of ``"".join``."""
    found = list(texts)
    record = next((text._record for text in found if isinstance(text, ContentProbe)), None)
    if record is None:
        return "".join(found)
    return ContentProbe(record, tuple(part for text in found for part in parts_of(text)))


class _Generation(jinja2.ext.Extension):
    """The tag around answers in some templates; it writes what it contains."""

    tags = {"generation"}  # noqa: RUF012  # as in the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ProbingEnvironment(ImmutableSandboxedEnvironment):
    """Environment of Transformers for chat templates, in which probes stay probes when texts are joined."""

    concat = staticmethod(_join)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    _refuse_probes(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse_probes(value: Any) -> None:
    if isinstance(value, ContentProbe):
        value._record.inspect()
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        _refuse_probes(inner)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


class SkeletonFinder:
    """Finder of the skeletons of one chat template.

    Args:
        source: The template.
    """

    def __init__(self, source: str) -> None:
        self._template: jinja2.Template | None = None
        environment = _ProbingEnvironment()
        try:
            if _keeps_probes(environment.parse(source)):
                self._template = environment.from_string(source)
        except jinja2.TemplateError:
            pass

    def find(self, rows: Sequence[Mapping[str, Any]], probed: Sequence[int], **variables: Any) -> Skeleton | None:
        """Return the skeleton of a conversation.

        Args:
            rows: Messages in the form for templates.
            probed: Indices of the messages whose contents vary; the template has to write each of them once, in order.
            variables: Other variables of the template.

        Returns:
            ``None`` if the template does something with a content that a skeleton cannot repeat, or fails.
        """
        if self._template is None:
            return None
        record = _Record()
        probes = {at: ContentProbe(record, (Inserted(number),)) for number, at in enumerate(probed)}
        messages = [{**row, "content": probes[at]} if at in probes else row for at, row in enumerate(rows)]
        try:
            text = self._template.render(messages=messages, **variables)
        except Exception:  # rendering raises the template's own errors again, with an explanation
            return None
        parts = _merge(parts_of(text))
        inserted = [part.number for part in parts if not isinstance(part, str)]
        marks = [MARK.format(number) for number in range(len(probes))]
        is_lost = any(mark in part for mark in marks for part in parts if isinstance(part, str))
        if record.inspected or is_lost or inserted != list(range(len(probes))):
            return None
        return Skeleton(tuple(parts), tuple(record.conditions))


def _keeps_probes(template: jinja2.nodes.Template) -> bool:
    """Return False if a template has operations that would copy a probe as plain text."""
    formats = (node.left for node in template.find_all(jinja2.nodes.Mod))
    is_formatted = any(isinstance(left, jinja2.nodes.Const) and isinstance(left.value, str) for left in formats)
    return not is_formatted and {node.name for node in template.find_all(jinja2.nodes.Filter)} <= {*_FILTERS.split()}


def _merge(parts: Iterable[Part]) -> list[Part]:
    """Join neighbouring texts."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@dataclass(frozen=True, slots=True)
class Span:
    """Range of characters that does not come from the template."""

    start: int
    end: int
    source: Source


class ContentSpans:
    """Locator of message contents in a rendering.

    Messages of each shape are rendered once with marks as contents; the text between the marks is the template's.

    Args:
        render: Returns the text of messages that follow an answer.
        shown: Returns a message's text as it appears in the rendering.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str], shown: Callable[[str], str]) -> None:
        self._render = render
        self._shown = shown
        self._pieces = functools.lru_cache(SHAPES)(self._split_by_marks)

    def find(self, text: str, messages: Sequence[Message]) -> list[Span]:
        """Return the spans of the messages' contents in `text`, in order."""
        pieces = self._pieces(tuple(map(shape_of, messages)))
        if len(pieces) != len(messages) + 1 or not text.startswith(pieces[0]):
            return [Span(0, len(text), Source.OBSERVATION)]
        spans: list[Span] = []
        cursor = len(pieces[0])
        for message, after in zip(messages, pieces[1:], strict=True):
            end = _content_end(text, cursor, self._shown(message.text), after)
            spans.append(Span(cursor, end, source_of(message)))
            cursor = end + len(after)
        return spans

    def around(self, shape: tuple[Message, ...]) -> list[str]:
        """Return the template's texts before, between and after the contents of messages of a shape."""
        return self._pieces(shape)

    def _split_by_marks(self, shape: tuple[Message, ...]) -> list[str]:
        marked = [replace(message, content=MARK.format(i)) for i, message in enumerate(shape)]
        return _MARKS.split(self._render(marked))


def shape_of(message: Message) -> Message:
    """Return the parts of a message on which its skeleton depends."""
    return replace(message, content="", tool_calls=(), reasoning=None)


def source_of(message: Message) -> Source:
    """Return the source of the tokens of a message's content."""
    return Source.FORCED if message.role == "assistant" else Source.OBSERVATION


def _content_end(text: str, start: int, content: str, after: str) -> int:
    for candidate in (content, content.strip()):
        if text.startswith(candidate + after, start):
            return start + len(candidate)
    found = text.find(after, start) if after else -1
    return found if found >= 0 else len(text)
