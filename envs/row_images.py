"""Images in rows of data files: a column of images, ``<image>`` in texts, and image parts of messages.

An image is a path (relative to the file's folder), a ``data:`` URL, bytes, or a struct of Hugging Face datasets,
``{"bytes": …, "path": …}``; parts of messages may contain their image. Nothing is fetched from the network.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from agentrl.errors import UsageError
from agentrl.message import Content, ContentPart, ImagePart, Message, TextPart
from agentrl.message.data_file import TEXT_TYPES, Row, read_messages
from agentrl.message.image import IMAGE_FORMATS

COLUMNS = ("images", "image")
PLACEHOLDER = "<image>"
MAX_NAME_CHARS = 200
"""Characters of a path that an error shows."""
_FORMS = 'a path, a data: URL, bytes, or {"bytes": …, "path": …}'
_SOURCES = ("bytes", "path", "image", "image_url", "url")
_NO_SOURCES = ("type", "text", "detail")


def has_images(row: Row, prompt: Any) -> bool:
    """Return True if a row has images, in a column or in a message of its prompt."""
    contents = [m.get("content") for m in prompt if isinstance(m, Mapping)] if isinstance(prompt, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return bool(_column(row)) or any(map(_is_image_part, parts))


def messages_with_images(row: Row, messages: Sequence[Any], folder: Path) -> tuple[Message, ...]:
    """Read messages with the images of their row.

    The n-th ``<image>`` in the texts, or image part without data, stands for the n-th image of the column. Without any
    of these, the images precede the first user message, as in TRL. ``<image>`` is text if the row has no such column.

    Args:
        row: The row.
        messages: Messages as in a data file.
        folder: Folder of relative paths.

    Raises:
        UsageError: a message is not valid, an image cannot be read, or the numbers of images and placeholders differ.
    """
    reader = _ContentReader(row, folder)
    found = tuple(read_messages(messages, row.location, read_content=reader.read))
    return reader.finish(found)


class _ContentReader:
    """Reader of the messages of one row, which takes the images of its column in order."""

    def __init__(self, row: Row, folder: Path) -> None:
        self._row, self._folder = row, folder
        self._has_column = any(row.values.get(name) is not None for name in COLUMNS)
        self._column = [
            read_image(value, folder, f"image {number} of {row.location}")
            for number, value in enumerate(_column(row), start=1)
        ]
        self._placeholders = 0
        self._inline = 0

    def read(self, content: Any, location: str) -> Content:
        """Return the content of a message: text, or parts if it contains images."""
        if content is None or isinstance(content, str):
            parts = list(self._split(content or ""))
        else:
            found = content if isinstance(content, list) else [content]
            parts = [part for one in found for part in self._part(one, location)]
        if any(isinstance(part, ImagePart) for part in parts):
            return tuple(part for part in parts if not isinstance(part, TextPart) or part.text)
        return "".join(part.text for part in parts if isinstance(part, TextPart))

    def finish(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Check the number of placeholders, and return the messages with all images."""
        if self._placeholders not in (0, len(self._column)):
            raise UsageError(
                f"{self._row.location} does not have one {PLACEHOLDER} for each image",
                got=f"{self._placeholders} {PLACEHOLDER} for {len(self._column)} images",
                expected=f"equal numbers, or no {PLACEHOLDER}: the images then precede the first user message",
            )
        if self._placeholders or not self._column:
            return messages
        first = next((index for index, message in enumerate(messages) if message.role == "user"), None)
        if first is None:
            return messages  # refused by the caller: nothing to answer
        content = messages[first].content
        parts = (TextPart(text=content),) if isinstance(content, str) else content
        opened = Message(role="user", content=(*self._column, *parts))
        return (*messages[:first], opened, *messages[first + 1 :])

    def _split(self, text: str) -> Iterator[ContentPart]:
        if not self._has_column:
            yield TextPart(text=text)
            return
        first, *others = text.split(PLACEHOLDER)
        yield TextPart(text=first)
        for other in others:
            yield self._next_image()
            yield TextPart(text=other)

    def _next_image(self) -> ContentPart:
        self._placeholders += 1
        missing = self._placeholders > len(self._column)
        return TextPart(text="") if missing else self._column[self._placeholders - 1]  # `finish` refuses the row

    def _part(self, part: Any, location: str) -> Iterator[ContentPart]:
        if _is_image_part(part):
            source = _source(part)
            if source is None:
                yield self._next_image()
            else:
                self._inline += 1
                yield read_image(source, self._folder, f"image {self._inline} in the messages of {location}")
        elif isinstance(part, Mapping) and part.get("type") in TEXT_TYPES and isinstance(part.get("text"), str):
            yield from self._split(part["text"])
        else:
            got = str(part)[:80]
            raise UsageError(f"{location}: a part of a message is neither text nor an image", got=got, expected=_FORMS)


def read_image(value: Any, folder: Path, location: str) -> ImagePart:
    """Read an image of a data file, without decoding all of it.

    Args:
        value: Path, ``data:`` URL, bytes, or a struct that contains one of them.
        folder: Folder of relative paths.
        location: Description of the image, for messages.

    Raises:
        UsageError: the file is missing, the image is broken, or the value has another form.
    """
    if isinstance(value, Mapping):
        _check_struct(value, location)
        value = _source(value)
    if isinstance(value, str):
        data, name = (_decode(value, location), "") if value.startswith("data:") else _load(value, folder, location)
    elif isinstance(value, bytes):
        data, name = value, ""
    else:
        raise UsageError(f"{location} cannot be read", got=repr(value)[:80], expected=_FORMS)
    return ImagePart(data=data, media_type=_check(data, location), alternative=f"[image {name}]" if name else "[image]")


def _check_struct(value: Mapping[str, Any], location: str) -> None:
    """Check that a struct has no options for the image, such as its size, which would be ignored."""
    if isinstance(found := value.get("bytes"), str) and found:
        raise UsageError(f"{location} has bytes that are text", got=found[:40], expected="data:image/png;base64,…")
    known = (*_SOURCES, *_NO_SOURCES)
    if unknown := [name for name, setting in value.items() if name not in known and setting is not None]:
        raise UsageError(
            f"{location} has settings that are not supported",
            got=", ".join(unknown),
            expected=_FORMS,
            hint="the image processor of the model's folder sets the size",
        )


def _column(row: Row) -> list[Any]:
    """Return the values of the column of images; a null or an empty text is not an image."""
    if all(_is_filled(row.values.get(name)) for name in COLUMNS):
        raise UsageError(f"{row.location} has images in two columns", got=" and ".join(COLUMNS), expected="one of them")
    found: Any = next((row.values[name] for name in COLUMNS if _is_filled(row.values.get(name))), [])
    values = found if isinstance(found, list) else [found]
    return [value for value in values if _is_filled(value)]


def _is_filled(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_filled, value))
    return any(value.values()) if isinstance(value, Mapping) else bool(value)


def _is_image_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    return part.get("type") in ("image", "image_url", "input_image") or (
        part.get("type") is None and not isinstance(part.get("text"), str) and _source(part) is not None
    )


def _source(value: Mapping[str, Any]) -> Any:
    """Return where a struct has its image: bytes before a path; ``None`` if it has none."""
    found = next((value[name] for name in _SOURCES if value.get(name)), None)
    return _source(found) if isinstance(found, Mapping) else found


def _decode(url: str, location: str) -> bytes:
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise UsageError(
            f"{location} is not a data: URL of an image", got=head[:60], expected="data:image/png;base64,…"
        )
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"the data: URL of {location} is not valid base64", got=error) from error


def _load(name: str, folder: Path, location: str) -> tuple[bytes, str]:
    """Read an image's file; return its content and its name."""
    if "://" in name and not name.startswith("file://"):
        hint = "download the images, and write their paths into the rows"
        raise UsageError(f"{location} is on the web", got=name[:80], expected=_FORMS, hint=hint)
    path = folder / Path(name.removeprefix("file://")).expanduser()
    try:
        return path.read_bytes(), path.name
    except (OSError, ValueError) as error:
        got = f"{str(path)[:MAX_NAME_CHARS]}: {getattr(error, 'strerror', None) or error}"
        expected = f"a file; relative paths begin at {folder.absolute()}"
        hint = "base64 needs data:image/png;base64, before it" if len(name) > MAX_NAME_CHARS else ""
        raise UsageError(f"{location} cannot be read", got=got, expected=expected, hint=hint) from error


def _check(data: bytes, location: str) -> str:
    """Return the media type of an image.

    Raises:
        UsageError: the image is broken or incomplete.
    """
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as opened:
            kind = opened.format or ""
            if kind == "PNG":
                opened.verify()  # checksums of all chunks
            else:
                opened.draft("L", (1, 1))  # decodes JPEG files at an eighth of their size
                opened.load()
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        is_unknown = isinstance(error, UnidentifiedImageError)
        got = f"{len(data):,} bytes: {f'they begin with {data[:8]!r}' if is_unknown else error}"
        raise UsageError(f"{location} is not a valid image", got=got, expected="PNG, JPEG or WebP") from error
    return Image.MIME.get(kind, f"image/{kind.lower()}")
