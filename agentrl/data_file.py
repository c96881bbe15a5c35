"""Rows of users' data files: JSON Lines, a JSON array of objects, or Parquet.

Lines end only at line feeds: the separators U+2028, U+2029 and U+0085 may occur in a JSON text. Byte order marks,
UTF-16 with its mark, and gzip are supported. A null counts as a missing column, because merged data sets fill missing
columns with nulls.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from agentrl.errors import UsageError

_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_WIDE = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Encodings with a byte order mark at the start of a file; longer marks first."""
_EXPECTED = "one JSON object per line, an array of objects, or Parquet"


class Row(NamedTuple):
    """A row of a data file."""

    place: str
    """File and line (in Parquet and arrays: row), for messages."""
    values: Mapping[str, Any]
    """Values by column, nulls included."""
    number: int
    """Number of the line, counted from 1; in Parquet and arrays, of the row."""

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
    """Read the rows of a file, in its order; empty lines are skipped.

    Args:
        path: The file; its content determines the format.
        what: Kind of file, for messages.

    Raises:
        UsageError: the file cannot be read, or a row is not an object; the message names the line.
    """
    file = Path(path).expanduser()
    try:
        with file.open("rb") as opened:
            head = opened.read(4)
        if head == _PARQUET or file.suffix == ".parquet":
            yield from _parquet_rows(file)
        else:
            yield from _json_rows(_lines(file, head), file)
    except (OSError, EOFError, zlib.error) as error:
        got = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {what} {path}", got=got, expected=_EXPECTED) from error


def _json_rows(lines: Iterator[str], file: Path) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if line.lstrip().startswith("["):
            yield from _array_rows("".join([line, *lines]), number, file)
            return
        place = f"{file} line {number}"
        yield Row(place, _object(_parse(line, place), place), number)


def _array_rows(text: str, line: int, file: Path) -> Iterator[Row]:
    """Read the rest of a file, which is an array that begins at a line."""
    for number, value in enumerate(_parse(text, str(file), first_line=line), start=1):
        place = f"{file} row {number}"
        yield Row(place, _object(value, place), number)


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


def _decode(data: bytes, encoding: str, place: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02x}, which is not {encoding.upper().removesuffix('-SIG')}"
        raise UsageError(f"{place} is not text", got=got, expected=f"{_EXPECTED}, in UTF-8") from error


def _parquet_rows(file: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet  # slow to import, and rarely needed

    try:
        rows = parquet.read_table(file).to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        raise UsageError(f"{file} cannot be read as Parquet", got=error) from error
    for number, row in enumerate(rows, start=1):
        yield Row(f"{file} row {number}", row, number)


def _parse(text: str, place: str, *, first_line: int | None = None) -> Any:
    """Parse a user's JSON.

    Args:
        text: One value.
        place: File and line, for messages.
        first_line: Number of the first line, if there are several.

    Raises:
        UsageError: not valid JSON, or a value that Python cannot represent.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = place if first_line is None else f"{place} line {first_line + error.lineno - 1}"
        _refuse(where, f"{error.msg} at column {error.colno}", error)
    except RecursionError as error:
        _refuse(place, "values that are nested too deeply", error)
    except ValueError as error:  # Python does not convert longer numbers
        _refuse(place, "a whole number of more than 4,300 digits", error)


def _refuse(place: str, got: str, error: Exception) -> NoReturn:
    raise UsageError(f"{place} is not valid JSON", got=got, expected=_EXPECTED) from error


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{place} is not an object", got=type(value).__name__, expected='{"column": value, …}')
    return value
