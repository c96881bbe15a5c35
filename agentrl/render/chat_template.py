"""Encoding and decoding of text with the tokenizer's fast backend, and rendering of its chat template."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, normalizers

from agentrl.errors import LedgerError, TemplateError, UsageError
from agentrl.message import ImagePart, Message, TextPart, user
from agentrl.render.call_form import with_json_arguments
from agentrl.render.content_guard import BREAK, REPLACEMENT, ContentGuard
from agentrl.render.named_templates import choose_chat_template
from agentrl.render.skeleton import Skeleton, SkeletonFinder
from agentrl.render.trial import EndlessTemplate, render_in_time
from agentrl.trajectory import Source, TokenSequence, id_array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CUT_MARK = "… [cut: {} characters left out]"
"""Text that replaces the end of a cut text."""
CHARACTERS_PER_TOKEN = 16
"""Number of characters per token of the budget that are encoded first; ordinary text has about four per token."""
UNSTABLE_TOKENS = 8
"""Number of last tokens of a prefix that may differ from those of the whole text."""
_SEGMENT_CACHE = 2048
LONG_TEXT = 1 << 14
"""Minimum number of characters of a text that is encoded by a function that lets other threads run."""
ToolSchema = Mapping[str, Any]
"""Schema of a tool for chat templates: ``{"type": "function", "function": {...}}``."""
CHAT_TEMPLATES = Path(__file__).parent / "chat_templates"
_NEIGHBOURS = 6
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""Name of a token of one byte, in sentencepiece's vocabularies."""


class TextEncoder:
    """Encoder of text, which adds no tokens.

    Texts between added tokens (such as ``<|im_end|>``) are encoded separately if the tokenizer allows it, so that
    repeated pieces, such as system prompts, are encoded once. A `BREAK` in a text prevents an added token there, and is
    dropped.

    Raises:
        TemplateError: the tokenizer has no fast backend.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if not tokenizer.is_fast:
            raise TemplateError(
                f"{type(tokenizer).__name__} is a slow tokenizer",
                expected="one with a tokenizer.json",
                hint="save it with AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(...)",
            )
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._added: dict[str, int] = {t.content: i for i, t in added.items()}
        self._added_ids = frozenset(added)
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._unknown: int | None = tokenizer.unk_token_id
        self.special_tokens: frozenset[str] = frozenset(token.content for token in added.values() if token.special)
        """Added tokens that are not part of ordinary text."""
        self.normalized_tokens: frozenset[str] = frozenset(t.content for t in added.values() if t.normalized)
        """Added tokens that the tokenizer looks for in normalized text."""
        names = sorted(self._added, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._segment = functools.lru_cache(_SEGMENT_CACHE)(self._encode_whole)
        if not self._pieces_are_independent():
            self._split = None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        if self._split is None:
            return list(self._segment(text))
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece in self._added:
                ids.append(self._added[piece])
            elif piece:
                ids.extend(self._segment(piece))
        return ids

    def encode_with_ranges(
        self, text: str, ranges: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of `text`, and the range of tokens (start, end) for each range of characters.

        The ranges of characters are in order and do not overlap; one without a token gets an empty range.
        """
        ids: list[int] = []
        found: list[tuple[int, int] | None] = [None] * len(ranges)
        start, number = 0, 0
        for piece in self._pieces(text):
            while number < len(ranges) and ranges[number][1] <= start:
                number += 1
            before, end = len(ids), start + len(piece)
            touched = [at for at in range(number, len(ranges)) if max(start, ranges[at][0]) < min(end, ranges[at][1])]
            token_at = self._extend(ids, piece, with_offsets=bool(touched))
            for at in touched:
                low, high = (min(max(place - start, 0), len(piece)) for place in ranges[at])
                first = next((t for i in range(low, high) if (t := token_at(i)) is not None), None)
                if first is not None:
                    last = next(t for i in range(high - 1, low - 1, -1) if (t := token_at(i)) is not None)
                    known = found[at]
                    found[at] = (before + first if known is None else known[0], before + last + 1)
            start = end
        return ids, [(0, 0) if one is None else one for one in found]

    def _pieces(self, text: str) -> list[str]:
        """Split a text at tokens that were added to the vocabulary."""
        return [text] if self._split is None else self._split.split(text)

    def _extend(self, ids: list[int], piece: str, *, with_offsets: bool) -> Callable[[int], int | None]:
        """Append the tokens of a piece, and return the mapping from its characters to them if it is asked for."""
        if self._split is not None and piece in self._added:
            ids.append(self._added[piece])
        elif not with_offsets:
            ids += self._segment(piece) if piece else ()
        else:
            encoding = self._backend_for(piece).encode(piece, add_special_tokens=False)
            ids += encoding.ids
            token_at: Callable[[int], int | None] = encoding.char_to_token
            return token_at
        return lambda _character: 0

    def added_id(self, token: str) -> int | None:
        """Return the id of an added token; ``None`` if the vocabulary does not have it."""
        return self._added.get(token)

    def added_in(self, text: str) -> frozenset[str]:
        """Return the added tokens that occur in a text."""
        return frozenset(token for token in self._added if token in text)

    def is_text(self, broken: str) -> bool:
        """Return True if a text is encoded without added tokens."""
        return not any(map(self.is_added, self._encode_whole(broken)))

    def normalize(self, text: str) -> str:
        """Return a text after the tokenizer's normalization, such as lower-casing."""
        normalizer = self._backend.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def is_added(self, token_id: int) -> bool:
        """Return True for the id of an added token, which never merges with text."""
        return token_id in self._added_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the exact text of token ids."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def decode_plain(self, ids: Sequence[int], *, keep: frozenset[int] = frozenset()) -> str:
        """Return the text of token ids without special tokens, except those in `keep`."""
        left_out = self._special - keep
        return self.decode([i for i in ids if i not in left_out])

    def decode_parts(self, ids: Sequence[int], *, is_cut: bool = False) -> list[str | None]:
        """Return the text that each token adds to that of the tokens before it; ``None`` within a character.

        Each token is decoded together with those before it, because some tokenizers drop the space at the start of a
        text. Bytes that form no character become replacement characters of their last token. If the text is cut,
        those at its end are ``None``, because more bytes may have followed.
        """
        found: list[str | None] = []
        start, read, before, open_text = 0, 0, "", ""
        for end in range(1, len(ids) + 1):
            text = self.decode(ids[start:end])
            if text.endswith(REPLACEMENT):
                found.append(None)
                open_text = text
                continue
            if open_text.startswith(before) and text.startswith(open_text) and open_text:
                found[-1] = open_text[len(before) :]
                before = open_text
            # `tokenizers` decodes bytes before an invalid one differently than without it.
            found.append(text[len(before) :] if text.startswith(before) else self.decode(ids[read:end]))
            start, read, open_text = read, end, ""
            before = self.decode(ids[start:read])
        if open_text and not is_cut:
            found[-1] = open_text[len(before) :] if open_text.startswith(before) else self.decode(ids[read:])
        return found

    def byte_sizes(self, ids: Sequence[int]) -> list[int | None]:
        """Return the number of bytes that each token of text has; ``None`` for those of some tokenizers."""
        pieces = [self._backend.id_to_token(token) or "" for token in ids]
        if self._is_byte_level:
            return [*map(len, pieces)]
        return [1 if _BYTE.fullmatch(piece) else None for piece in pieces]

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        """True if each letter of a token's name stands for one byte."""
        return b'"ByteLevel"' in self._backend.decoder.__getstate__() if self._backend.decoder else False

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the result of `encode`, and the range of characters (start, end) that each token covers.

        Ranges refer to the text before the tokenizer's normalization. Tokens that split a character all cover it.
        """
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        for piece in self._pieces(text):
            if self._split is not None and piece in self._added:
                ids.append(self._added[piece])
                offsets.append((start, start + len(piece)))
            elif piece:
                encoding = self._backend_for(piece).encode(piece, add_special_tokens=False)
                ids += encoding.ids
                offsets += [(start + first, start + end) for first, end in encoding.offsets]
            start += len(piece)
        return ids, offsets

    @functools.cached_property
    def unknown_id(self) -> int | None:
        """Id of the token for text that the vocabulary lacks; ``None`` if every text can be encoded."""
        name = getattr(self._backend.model, "unk_token", None)
        found: int | None = self._backend.token_to_id(name) if name is not None else self._unknown
        return found

    def cut(self, text: str, max_tokens: int) -> str:
        """Cut `text` to a token budget, with a mark that states the number of omitted characters.

        A text that fits is returned unchanged. If not even the mark fits, only the mark is returned. The cost depends
        on the budget and not on the length of the text: only as much is encoded as the budget can contain.
        """
        if text.isascii() and len(text) < max_tokens:
            return text
        encoding, is_whole = self._beginning(text, max_tokens)
        total = len(encoding.ids)
        if is_whole and total <= max_tokens:
            return text
        kept = min(max_tokens, total)
        while kept > 0:
            end = encoding.offsets[kept][0] if kept < total else encoding.offsets[kept - 1][1]
            shortened = text[:end] + CUT_MARK.format(len(text) - end - text.count(BREAK, end))
            excess = len(self._encode_whole(shortened)) - max_tokens
            if excess <= 0:
                return shortened
            kept -= excess
        return CUT_MARK.format(len(text) - text.count(BREAK))

    def split(self, text: str, max_tokens: int) -> list[str]:
        """Split `text` into parts of at most `max_tokens` tokens, after a space or a newline if possible.

        The concatenated parts are the text. A part has more tokens only if a single character has more.
        """
        found: list[str] = []
        while True:
            encoding, is_whole = self._beginning(text, max_tokens)
            if is_whole and len(encoding.ids) <= max_tokens:
                return [*found, text]
            end = max(1, encoding.offsets[min(max_tokens, len(encoding.ids) - 1)][0])
            end = 1 + max(text.rfind(" ", 0, end), text.rfind("\n", 0, end)) or end
            found.append(text[:end])
            text = text[end:]

    def _beginning(self, text: str, max_tokens: int) -> tuple[Any, bool]:
        """Encode a beginning of `text` that exceeds a budget; return it, and True if it is the whole text."""
        most = (max_tokens + UNSTABLE_TOKENS) * self.longest_token
        size = CHARACTERS_PER_TOKEN * (max_tokens + UNSTABLE_TOKENS)
        while True:
            encoding = self._backend_for(text).encode(text[:size], add_special_tokens=False)
            if size >= min(len(text), most) or len(encoding.ids) >= max_tokens + UNSTABLE_TOKENS:
                return encoding, size >= len(text)
            size = min(4 * size, most)

    @functools.cached_property
    def longest_token(self) -> int:
        """Maximum number of characters of one token."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def _encode_whole(self, text: str) -> tuple[int, ...]:
        backend = self._backend_for(text)
        if len(text) >= LONG_TEXT:
            return tuple(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return tuple(backend.encode(text, add_special_tokens=False).ids)

    def _backend_for(self, text: str) -> Any:
        return self._breaking_backend if BREAK in text else self._backend

    @functools.cached_property
    def _breaking_backend(self) -> Any:
        """Copy of the tokenizer that drops breaks after it has looked for added tokens; made on first use."""
        backend = Tokenizer.from_str(self._backend.to_str())
        others = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Replace(BREAK, ""), *others])
        return backend

    def _pieces_are_independent(self) -> bool:
        """Return True if added tokens do not affect the encoding of text around them (by prefix spaces or strips)."""
        if self._split is None:
            return False
        probes = [f"{left}{name}{right}" for name in self._added for left, right in (("a\n", "\nb "), ("a ", " b\n"))]
        whole = [list(self._encode_whole(probe)) for probe in probes]
        return whole == [self.encode(probe) for probe in probes]


def find_chat_template(name: str) -> str:
    """Return the name of a shipped chat template unchanged, or the absolute path of a file.

    Raises:
        UsageError: the template does not exist or cannot be read.
    """
    read_chat_template(name)
    return name if (CHAT_TEMPLATES / f"{name}.jinja").is_file() else str(Path(name).expanduser().resolve())


def shipped_chat_templates() -> list[str]:
    """Return the names of the shipped chat templates."""
    return sorted(path.stem for path in CHAT_TEMPLATES.glob("*.jinja"))


def read_chat_template(name: str) -> str:
    """Read a shipped chat template by its name, or a file.

    Raises:
        UsageError: the template does not exist or cannot be read.
    """
    shipped = shipped_chat_templates()
    path = CHAT_TEMPLATES / f"{name}.jinja" if name in shipped else Path(name).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "chat template not found",
            got=f"model.chat_template {name} ({error})",
            expected=f"a Jinja file, or one of {', '.join(shipped)}",
        ) from error


class ChatTemplate:
    """Chat template, which renders messages as text.

    Args:
        tokenizer: Tokenizer that renders the template.
        options: Variables for the template, such as ``enable_thinking``.
        images: The model reads images, so the template gets the parts of a message's content.
        reasoning_key: Field of a message in which the template looks for its thinking.
        opening: Text before the template.
        source: Template; the tokenizer's by default.

    Raises:
        TemplateError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        options: Mapping[str, Any],
        *,
        images: bool = False,
        reasoning_key: str = "reasoning_content",
        opening: str = "",
        source: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._images = images
        self._reasoning_key = reasoning_key
        self._options = dict(options)
        self.source: str = source if source is not None else choose_chat_template(tokenizer)
        self._whole = opening + self.source
        self.guard: ContentGuard | None = None
        """Guard of all texts for the template; set once the control tokens are known."""
        self.json_arguments = False
        """True to pass arguments of tool calls as JSON text; the renderer, which knows the call ids, sets it."""
        self.in_trial = True
        """True while the template is tried, before anything is played: each rendering then has a deadline."""
        self._no_tools: list[Any] | None = None
        """Value for a conversation without tools; an empty list for templates that only read a list."""
        if self._refuses([user("x")]):
            self._no_tools = []
            if self._refuses([user("x")]):
                self._no_tools = None
        self._has_system_role = self._accepts_system()

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), generation_prompt: bool = False
    ) -> str:
        """Render the text of a conversation, with the header of the next answer if `generation_prompt`.

        Control tokens in the messages contain a `BREAK`: encode the text with it, and use `unbroken` to read it.

        Raises:
            TemplateError: the template refuses these messages.
        """
        if not self._has_system_role:
            messages = fold_system(messages)
        return self._apply(messages, tools, generation_prompt)

    def find_skeleton(self, messages: Sequence[Message], first: int) -> Skeleton | None:
        """Return the text around the contents of the messages from index `first` on, up to the next answer's header.

        The first message must not be the system's. ``None`` if the text depends on the contents in ways that a skeleton
        cannot express.
        """
        find = functools.partial(
            self._skeletons.find,
            self._rows(messages),
            range(first, len(messages)),
            tools=self._no_tools,
            documents=None,
            add_generation_prompt=True,
            **{**self._tokenizer.special_tokens_map, **self._options},
        )
        return render_in_time(find, _roles_of(messages)) if self.in_trial else find()

    @functools.cached_property
    def _skeletons(self) -> SkeletonFinder:
        return SkeletonFinder(self._whole)

    def _rows(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        rows = [_row(message, images=self._images) for message in messages]
        if self.guard is not None:
            rows = [*map(self.guard.message, rows)]
        if self.json_arguments:
            rows = [*map(with_json_arguments, rows)]
        for row in rows:
            if "reasoning_content" in row:
                row[self._reasoning_key] = row.pop("reasoning_content")
        return rows

    def _apply(self, messages: Sequence[Message], tools: Sequence[ToolSchema], generation_prompt: bool) -> str:
        rows, schemas = self._rows(messages), [dict(tool) for tool in tools]
        if self.guard is not None:
            schemas = [*map(self.guard.texts, schemas)]
        render = functools.partial(
            self._tokenizer.apply_chat_template,
            rows,
            chat_template=self._whole,
            tools=schemas or self._no_tools,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self._options,
        )
        try:
            text: str = render_in_time(render, _roles_of(messages)) if self.in_trial else render()
        except EndlessTemplate:
            raise
        except Exception as error:
            raise TemplateError(
                f"the chat template refuses messages with roles {_roles_of(messages)}",
                got=f"{type(error).__name__}: {error}",
                hint="use an agent loop whose messages the template accepts (react_text needs only user turns)",
            ) from error
        return text

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Give each rendering in the block a deadline, so that a template that never ends raises `EndlessTemplate`."""
        before, self.in_trial = self.in_trial, True
        try:
            yield
        finally:
            self.in_trial = before

    def _refuses(self, messages: Sequence[Message]) -> bool:
        try:
            self._apply(messages, (), generation_prompt=True)
        except TemplateError:
            return True
        return False

    def _accepts_system(self) -> bool:
        probe = Message(role="system", content="@@SYSTEM@@")
        try:
            return "@@SYSTEM@@" in self._apply([probe, user("x")], (), generation_prompt=True)
        except TemplateError:
            return False


def _roles_of(messages: Sequence[Message]) -> str:
    return ", ".join(message.role for message in messages)


def fold_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Move a leading system message into the first user message, for templates without a system role."""
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return messages
    opening, content = f"{messages[0].text}\n\n", messages[1].content
    joined = opening + content if isinstance(content, str) else (TextPart(text=opening), *content)
    return [replace(messages[1], content=joined), *messages[2:]]


def _row(message: Message, *, images: bool) -> dict[str, Any]:
    if isinstance(message.content, str):
        return message.to_template()
    row = replace(message, content=message.text).to_template()
    if not any(isinstance(part, ImagePart) for part in message.content):
        return row
    if not images:
        raise TemplateError(
            "a message contains an image, but the model reads only text",
            expected="text",
            hint="give the environment text observations, or train a vision-language model (docs/concepts/vision.md)",
        )
    parts = [
        {"type": "text", "text": p.text} if isinstance(p, TextPart) else {"type": "image"} for p in message.content
    ]
    return {**row, "content": parts}


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the number of leading items (tokens, characters) that two sequences share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def require_prefix(sequence: TokenSequence, length: int, sent_ids: Sequence[int], encoder: TextEncoder) -> None:
    """Check that `sent_ids` are exactly the first `length` tokens of the ledger.

    Raises:
        LedgerError: They are not; the message has the first differing token, its neighbours and the cause.
    """
    prefix = sequence.ids_array()[:length]
    if id_array(sent_ids) == prefix:
        return
    expected, sent = prefix.tolist(), list(sent_ids)
    at = common_prefix(expected, sent)
    raise LedgerError(
        f"the tokens sent to the engine are not the ledger's prefix: token {at} differs ({_place(sequence, at)})",
        got=f"{_neighbours(sent, at, encoder)} in {len(sent)} tokens",
        expected=f"{_neighbours(expected, at, encoder)} in {length} tokens",
        hint=f"cause: {_cause(expected, sent, encoder)}",
    )


def _place(sequence: TokenSequence, at: int) -> str:
    if at >= len(sequence):
        return "past the ledger's end"
    turn = next((t for t in reversed(sequence.turns) if t.start <= at), None)
    source = Source(int(sequence.sources[at])).name.lower()
    if turn is None:
        return f"{source}, before the first answer"
    return f"{source}, {'in' if at < turn.end else 'after'} turn {turn.index}"


def _neighbours(ids: Sequence[int], at: int, encoder: TextEncoder) -> str:
    if at >= len(ids):
        return f"{encoder.decode(ids[max(0, at - _NEIGHBOURS) : at])!r} and then nothing"
    before, after = encoder.decode(ids[max(0, at - _NEIGHBOURS) : at]), encoder.decode(ids[at + 1 : at + _NEIGHBOURS])
    return f"{before!r} → {ids[at]} {encoder.decode([ids[at]])!r} → {after!r}"


def _cause(expected: Sequence[int], sent: Sequence[int], encoder: TextEncoder) -> str:
    if sent[: len(expected)] == expected:
        return "tokens were sent that the ledger does not contain; write them to the ledger first"
    if expected[: len(sent)] == sent:
        return "the end of the prompt is missing; was it cut to the engine's context?"
    if encoder.decode(sent) == encoder.decode(expected):
        return "the same text in other tokens: it was decoded and encoded again"
    return "another text: the history was rewritten, or another sequence was sent; use fork for a rewritten history"
