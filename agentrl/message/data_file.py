"""User data files (JSON Lines, a JSON array of objects, Parquet, or Arrow): their rows, and the messages in a row.

Lines end only at line feeds: the separators U+2028, U+2029 and U+0085 may occur in a JSON text. Byte order marks,
UTF-16 with its mark, and gzip are supported. Merged data sets fill missing columns and keys with nulls, and pandas with
NaN, so both count as missing: a NaN is read as a null. Whole floats in a column of Parquet with gaps become integers,
because pandas stores integers with gaps as floats. Numbers in JSON are read as they are written, row by row.
"""

from __future__ import annotations

import ast
import codecs
import gzip
import io
import json
import logging
import math
import re
import tokenize
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

from agentrl.errors import UsageError
from agentrl.message import Content, Message, Role, ToolCall
from agentrl.message.data_source import data_files
from agentrl.tool.json_schema import accepts_null

_GZIP, _PARQUET, _ARROW = b"\x1f\x8b", b"PAR1", b"ARROW1"
_log = logging.getLogger(__name__)
_WIDE = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Encodings with a byte order mark at the start of a file; longer marks first."""
_EXPECTED = "one JSON object per line, an array of objects, or Parquet"
_CONSTANTS: Mapping[str, float] = {"Infinity": math.inf, "-Infinity": -math.inf}
"""Values of the constants that Python writes although they are not JSON; NaN is read as null."""
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+")
_NUMPY_ARRAY = re.compile(r"""\[\s*(['"]).*\1\s*\]""", re.DOTALL)
_NUMPY_MESSAGES = re.compile(
    r"""(?:array\()?\[\s*\{\s*(['"])(?:role|content)\1\s*:.*\]\s*(?:,\s*dtype=object\))?\s*""", re.DOTALL
)
ToolSchema = Mapping[str, Any]
MEDIA_COLUMNS = (
    *("images", "image", "videos", "video", "audios", "audio"),
    *("multi_modal_data", "multi_modal_inputs"),
)
"""Columns of a row, and keys of a message, with media that are not shown to the model."""
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message with the reasoning before its answer, in order of preference."""
TEXT_TYPES = (None, "text", "input_text", "output_text")
MEDIA_KEYS = (*MEDIA_COLUMNS, "image_url", "video_url", "audio_url", "input_audio", "file")
"""Keys of a message part, next to its ``text``, with other media."""


MAX_WHOLE_FLOAT = 2.0**53
"""Magnitude from which floats do not represent every whole number."""


class Row(NamedTuple):
    """A row of a data file."""

    location: str
    """File and line (in Parquet and arrays: row), for messages."""
    values: Mapping[str, Any]
    """Values by column, including nulls."""
    number: int
    """Line number, from 1 (in Parquet and arrays, the row number), counted over all files."""
    folder: Path = Path()
    """Folder of the file, to which paths are relative."""

    @property
    def columns(self) -> list[str]:
        """Columns with a value."""
        return [name for name, value in self.values.items() if value is not None]

    def first(self, *names: str) -> Any:
        """Return the first value among some columns that is not null; ``None`` if all are null.

        >>> Row("f line 1", {"answer": None, "solution": 0}, 1).first("answer", "solution")
        0
        """
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)


def read_rows(path: str | Path, what: str = "file") -> Iterator[Row]:
    """Read the rows of one or several files in order; empty lines are skipped.

    Args:
        path: File, folder, pattern, or address of a data set; see `agentrl.message.data_source`. The content of a file
            determines its format.
        what: Kind of the file, for messages.

    Raises:
        UsageError: a file cannot be read, or a row is not an object; the message names the line.
    """
    before = number = 0
    for file in data_files(path, what):
        for row in _rows_of(file, path, what):
            number = before + row.number
            yield row._replace(number=number, folder=file.parent.absolute())
        before = number


def _rows_of(file: Path, path: str | Path, what: str) -> Iterator[Row]:
    try:
        with file.open("rb") as opened:
            head = opened.read(6)
        if file.suffix in (".csv", ".tsv"):
            given = "FILE, sep='\\t'" if file.suffix == ".tsv" else "FILE"
            raise UsageError(
                f"{what} {path} is a {file.suffix[1:].upper()} file",
                expected=_EXPECTED,
                hint=f"convert it: pandas.read_csv({given}).convert_dtypes().to_json('rows.jsonl', orient='records', "
                "lines=True)",
            )
        if head[:4] == _PARQUET or file.suffix == ".parquet":
            yield from _parquet_rows(file)
        elif head == _ARROW or file.suffix == ".arrow":
            yield from _arrow_rows(file, is_stream=head != _ARROW)
        else:
            yield from _json_rows(_lines(file, head), file)
    except (OSError, EOFError, zlib.error) as error:
        got = getattr(error, "strerror", None) or error
        name = path if Path(path).expanduser() == file else f"{path} ({file.name})"
        raise UsageError(f"cannot read {what} {name}", got=got, expected=_EXPECTED, hint=_hub_hint(path)) from error


def _hub_hint(path: str | Path) -> str | None:
    """Suggest an address of the hub for a missing file whose name could be that of a data set on it."""
    could_be = _HUB_NAME.fullmatch(str(path)) is not None and not Path(path).parent.exists()
    return f"for a data set of the Hugging Face hub, write hf://datasets/{path}/FILES" if could_be else None


def _json_rows(lines: Iterator[str], file: Path) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if line.lstrip().startswith("["):
            yield from _array_rows("".join([line, *lines]), number, file)
            return
        location = f"{file} line {number}"
        values = _object(_parse(line, location), location)
        yield Row(location, _with_whole_characters(values, location) if _ESCAPED_HALF.search(line) else values, number)


def _array_rows(text: str, line: int, file: Path) -> Iterator[Row]:
    """Read the rest of a file that contains an array."""
    has_halves = _ESCAPED_HALF.search(text)
    for number, value in enumerate(_parse(text, str(file), first_line=line), start=1):
        location = f"{file} row {number}"
        values = _object(value, location)
        yield Row(location, _with_whole_characters(values, location) if has_halves else values, number)


def _with_whole_characters(values: Mapping[str, Any], location: str) -> Mapping[str, Any]:
    """Replace lone surrogates, which UTF-8 and tokenizers do not support, with question marks, and log a warning."""
    halves = _HALF.search(json.dumps(values, ensure_ascii=False))
    if halves is None:
        return values
    _log.warning(
        "%s has half of a character, \\u%04x, which is read as a question mark; a text that was cut in the middle of "
        "an emoji has one",
        location,
        ord(halves[0]),
    )
    return json.loads(_HALF.sub("?", json.dumps(values, ensure_ascii=False)))  # type: ignore[no-any-return]


def _lines(file: Path, head: bytes) -> Iterator[str]:
    """Decode the lines of a file, which end at line feeds."""
    with gzip.open(file) if head.startswith(_GZIP) else file.open("rb") as stream:
        mark = stream.read(4)
        stream.seek(0)
        encoding = next((name for start, name in _WIDE if mark.startswith(start)), "")
        if encoding:
            yield from _decode(stream.read(), encoding, str(file)).split("\n")
            return
        for number, line in enumerate(stream, start=1):
            yield _decode(line, "utf-8" if number > 1 else "utf-8-sig", f"{file} line {number}")


def _decode(data: bytes, encoding: str, location: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02x}, which is not {encoding.upper().removesuffix('-SIG')}"
        raise UsageError(f"{location} is not text", got=got, expected=f"{_EXPECTED}, in UTF-8") from error


def _parquet_rows(file: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet  # slow to import, and rarely needed

    try:
        rows = _table_rows(parquet.read_table(file))
    except (ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        raise UsageError(f"{file} cannot be read as Parquet", got=error) from error
    for number, row in enumerate(rows, start=1):
        yield Row(f"{file} row {number}", row, number)


def _table_rows(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a `pyarrow.Table`; maps become objects.

    Raises:
        KeyError: a map has a key twice.
    """
    if any("[ns" in str(kind) for kind in table.schema.types):
        table = table.cast(_in_microseconds(table.schema), safe=False)  # the resolution of Python's times
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    if not any(name in str(kind) for kind in table.schema.types for name in ("float", "double")):
        return rows
    rows = [{name: _without_nans(value) for name, value in row.items()} for row in rows]
    for name in table.column_names:
        if _is_whole_with_gaps([row[name] for row in rows]):
            for row in rows:
                row[name] = None if row[name] is None else int(row[name])
    return rows


def _is_whole_with_gaps(column: Sequence[Any]) -> bool:
    """Return True if a column has gaps, and otherwise only floats without fractions.

    Such a column was one of whole numbers, which pandas cannot store with gaps.
    """
    values = [value for value in column if value is not None]
    are_whole = all(isinstance(one, float) and one.is_integer() and abs(one) < MAX_WHOLE_FLOAT for one in values)
    return are_whole and 0 < len(values) < len(column)


def _in_microseconds(kind: Any) -> Any:
    """Return a schema, field or type of Arrow with microseconds in place of nanoseconds."""
    import pyarrow

    if isinstance(kind, pyarrow.Schema):
        return pyarrow.schema([_in_microseconds(field) for field in kind], kind.metadata)
    if isinstance(kind, pyarrow.Field):
        return kind.with_type(_in_microseconds(kind.type))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([_in_microseconds(field) for field in kind])
    if pyarrow.types.is_large_list(kind):
        return pyarrow.large_list(_in_microseconds(kind.value_field))
    if pyarrow.types.is_fixed_size_list(kind):
        return pyarrow.list_(_in_microseconds(kind.value_field), kind.list_size)
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(_in_microseconds(kind.value_field))
    if pyarrow.types.is_timestamp(kind) and kind.unit == "ns":
        return pyarrow.timestamp("us", kind.tz)
    if pyarrow.types.is_duration(kind) and kind.unit == "ns":
        return pyarrow.duration("us")
    return pyarrow.time64("us") if kind == pyarrow.time64("ns") else kind


def _without_nans(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {name: _without_nans(item) for name, item in value.items()}
    return [_without_nans(item) for item in value] if isinstance(value, list) else value


def _arrow_rows(file: Path, *, is_stream: bool) -> Iterator[Row]:
    """Read a file that was saved by the library datasets."""
    from pyarrow import ArrowException, ipc, memory_map  # slow to import, and rarely needed

    try:
        with memory_map(str(file)) as opened:
            table = (ipc.open_stream(opened) if is_stream else ipc.open_file(opened)).read_all()
            rows = _table_rows(table)
    except (ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        raise UsageError(f"{file} cannot be read as Arrow", got=error) from error
    for number, row in enumerate(rows, start=1):
        yield Row(f"{file} row {number}", row, number)


class UniqueIds:
    """Check that no two rows of a file have the same id.

    Args:
        what: Kind of the file and its name, for messages: ``the file of prompts train.jsonl``.
    """

    def __init__(self, what: str) -> None:
        self._what, self._locations = what, dict[str, str]()

    def add(self, identity: str, location: str) -> None:
        """Add the id of a row.

        Raises:
            UsageError: an earlier row has the same id.
        """
        first = self._locations.setdefault(identity, location)
        if first is not location:
            raise UsageError(
                f"{self._what} has two rows with the same id",
                got=f"{identity[:80]!r} in {first} and {location}",
                expected="unique ids",
                hint="without a column id, a row has its number: remove or rename it",
            )


def write_dataset(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write rows as a Parquet file with the columns of all rows.

    Raises:
        OSError: the file cannot be written.
    """
    from pyarrow import Table, parquet  # slow to import, and rarely needed

    columns = list(dict.fromkeys(name for row in rows for name in row))
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(Table.from_pylist([{name: row.get(name) for name in columns} for row in rows]), file)


def _parse(text: str, location: str, *, first_line: int | None = None) -> Any:
    """Parse a user's JSON; if the text has several lines, `first_line` is the number of the first.

    Raises:
        UsageError: not valid JSON, or a value that Python cannot represent.
    """
    try:
        return json.loads(text, parse_constant=_CONSTANTS.get, object_pairs_hook=_unique)
    except _RepeatedKey as error:
        raise UsageError(f"{location} has an object with a key twice", got=error, expected="unique keys") from error
    except json.JSONDecodeError as error:
        where = location if first_line is None else f"{location} line {first_line + error.lineno - 1}"
        _refuse(where, f"{error.msg.removesuffix(' at')} at column {error.colno}", error)
    except RecursionError as error:
        _refuse(location, "values that are nested too deeply", error)
    except ValueError as error:  # Python does not convert longer numbers
        _refuse(location, "a whole number of more than 4,300 digits", error)


class _RepeatedKey(ValueError):
    """A key that an object has twice, of which Python would silently drop one value."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKey(repr(next(name for name in names if names.count(name) > 1)))
    return found


def _refuse(location: str, got: str, error: Exception) -> NoReturn:
    raise UsageError(f"{location} is not valid JSON", got=got, expected=_EXPECTED) from error


def _object(value: Any, location: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{location} is not an object", got=type(value).__name__, expected='{"column": value, …}')
    return value


def refuse_media(values: Mapping[str, Any], location: str, columns: Sequence[str] = MEDIA_COLUMNS) -> None:
    """Check that a row has no images, videos or sounds in `columns`, which are not shown to the model.

    Raises:
        UsageError: a column contains media.
    """
    for name in columns:
        if _is_filled(values.get(name)):
            raise UsageError(
                f"{location} has a column {name}",
                got=f"{name}, which the model would not see",
                expected="messages with text only",
                hint=f"remove the column {name} and the rows that need it; environments can show images",
            )


def _is_filled(value: Any) -> bool:
    """Return True if a value contains anything except nulls, which merging data sets creates."""
    if isinstance(value, dict | list):
        return any(map(_is_filled, value.values() if isinstance(value, dict) else value))
    return bool(value)


def message_rows(value: Any, location: str = "a row") -> Any:
    """Parse messages that a data set stores as JSON or Python text; return other values unchanged.

    Raises:
        UsageError: the text is an array of messages that NumPy wrote, which cannot be read.
    """
    rows = list_in_text(value)
    if isinstance(rows, str) and _NUMPY_MESSAGES.fullmatch(rows):
        raise UsageError(
            f"{location} has messages as text that is neither JSON nor Python",
            got=f"{rows!r:.80}",
            expected='[{"role": …, "content": …}, …]',
            hint="pandas.to_csv writes arrays like this: write the data set as Parquet or JSON Lines",
        )
    are_messages = isinstance(rows, list) and all(
        isinstance(row, dict) and row.keys() >= {"role", "content"} for row in rows
    )
    return rows if rows and are_messages else value


def list_in_text(value: Any) -> Any:
    """Parse a list that a data set or CSV file stores as JSON or Python text; return other values unchanged.

    >>> list_in_text('["a", "b"]'), list_in_text("['a']"), list_in_text("a")
    (['a', 'b'], ['a'], 'a')

    Arrays that NumPy wrote have no commas, so that Python would concatenate their strings; they are unchanged, too.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    found: Any = None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError, tokenize.TokenError):
            tree = ast.parse(value.strip(), mode="eval")
            texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            tokens = tokenize.generate_tokens(io.StringIO(value.strip()).readline)
            if sum(token.type == tokenize.STRING for token in tokens) == len(texts):
                found = ast.literal_eval(tree)
    return found if isinstance(found, list) else value


def texts_of(value: Any) -> tuple[str, ...]:
    """Return the texts of a column: a list of texts without its nulls, the list in a text, or one text.

    Raises:
        ValueError: anything else, or an array that NumPy wrote.
    """
    found = list_in_text(value)
    if isinstance(found, str):
        if _NUMPY_ARRAY.fullmatch(found.strip()):
            raise ValueError("an array that NumPy wrote without commas")
        return (found,)
    kept = [one for one in found if one is not None] if isinstance(found, list) else [found]
    if not all(isinstance(one, str) for one in kept):
        raise ValueError(f"{value!r:.80}, not texts")
    return tuple(kept)


def read_tools(found: Any, location: str) -> tuple[ToolSchema, ...]:
    """Read the schemas of a conversation's tools: a list, or its JSON text.

    A schema may be JSON text, and may lack the level ``function``.

    Raises:
        UsageError: the value is neither.
    """
    try:
        tools = json.loads(found) if isinstance(found, str) and found else found or []
        schemas = [_schema(json.loads(tool) if isinstance(tool, str) else tool) for tool in tools]
        if isinstance(tools, list) and all(isinstance(schema["function"]["name"], str) for schema in schemas):
            return tuple(schemas)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        pass
    expected = '[{"function": {"name": …}}]'
    raise UsageError(f"{location}: tools are not a list of schemas", got=str(found)[:80], expected=expected)


def _schema(tool: Any) -> Any:
    schema = _without_nulls(tool)
    is_bare = "function" not in schema and isinstance(schema.get("parameters"), dict)
    return {"type": "function", "function": schema} if is_bare else schema


def _without_nulls(value: Any) -> Any:
    """Remove the keys of a schema whose values are null because data sets were merged."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def read_messages(
    rows: Sequence[Any],
    location: str,
    *,
    tools: Sequence[ToolSchema] = (),
    read_content: Callable[[Any, str], Content] | None = None,
) -> Iterator[Message]:
    """Read messages.

    Args:
        rows: The messages.
        location: Location of the row, for messages.
        tools: Schemas of the tools, which determine nulls in arguments.
        read_content: Returns the content of a message; the default reads text only.

    Raises:
        UsageError: a message is not valid.
    """
    names: dict[str, str] = {}
    unanswered: list[str] = []
    content_of = read_content or _text
    for row in rows:
        if not isinstance(row, dict) or row.get("role") not in get_args(Role):
            raise UsageError(
                f"{location}: a message has no known role", got=str(row)[:80], expected=", ".join(get_args(Role))
            )
        refuse_media(row, f"{location}: a message")
        if row.get("function_call"):
            raise UsageError(f"{location}: a message has a function_call", got="function_call", expected="tool_calls")
        given = row.get("tool_calls") or []
        if not isinstance(given, list):
            raise UsageError(f"{location}: tool_calls are not a list", got=str(given)[:80], expected="a list of calls")
        calls = tuple(_call(call, tools, location) for call in given)
        names |= {call.id: call.name for call in calls if call.id}
        next_name = unanswered.pop(0) if row["role"] == "tool" and unanswered else None
        if row["role"] != "tool":
            unanswered = [call.name for call in calls]
        answered = _optional_text(row, "tool_call_id", location)
        called = names.get(answered) if answered else next_name  # without ids, results follow the order of the calls
        name = _optional_text(row, "name", location) or called
        thoughts = (_optional_text(row, name, location) for name in THINKING_KEYS)
        yield Message(
            role=row["role"],
            content=content_of(row.get("content"), location),
            tool_calls=calls,
            tool_call_id=answered,
            name=name if row["role"] == "tool" else None,
            reasoning=next(filter(None, thoughts), None),
        )


def _optional_text(row: Mapping[str, Any], name: str, location: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{location}: {name} of a message is not text", got=str(value)[:80], expected="text")
    return value


def _text(content: Any, location: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if not all(map(_is_text, parts)):
        raise UsageError(
            f"{location}: a message is not text",
            got=str(content)[:80],
            expected="text, or parts with text: conversations with images are not supported",
        )
    return "".join(part["text"] for part in parts)


def _is_text(part: Any) -> bool:
    """Return True if the type of a message part is text; other parts may have a ``text``, too."""
    if not isinstance(part, dict) or part.get("type") not in TEXT_TYPES or not isinstance(part.get("text"), str):
        return False
    return not any(_is_filled(part.get(name)) for name in MEDIA_KEYS)


def _call(call: Any, tools: Sequence[ToolSchema], location: str) -> ToolCall:
    """Read a tool call, with arguments as JSON text or as an object."""
    try:
        function: Mapping[str, Any] = call["function"]
        name, arguments = function["name"], function.get("arguments") or {}
        parsed = dict(json.loads(arguments) if isinstance(arguments, str) else arguments)
        if not isinstance(name, str):
            raise TypeError("the name is not text")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{location}: a tool call cannot be read",
            got=str(call)[:80],
            expected='{"function": {"name", "arguments"}}',
        ) from error
    return ToolCall(name=name, arguments=_drop_nulls(parsed, name, tools), id=str(call.get("id") or ""))


def _drop_nulls(arguments: dict[str, Any], tool: str, tools: Sequence[ToolSchema]) -> dict[str, Any]:
    """Drop nulls that the tool does not accept; in merged data sets, they stand for columns of other rows."""
    parameters = next((one["function"].get("parameters") for one in tools if one["function"]["name"] == tool), None)
    if not isinstance(parameters, dict):
        return arguments
    properties = parameters.get("properties") or {}
    return {
        name: value
        for name, value in arguments.items()
        if value is not None or (name in properties and accepts_null(properties[name], parameters))
    }
