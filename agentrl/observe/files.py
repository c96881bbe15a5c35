"""Files that survive a kill at any moment and a full disk: atomic writes, and append-only JSON lines."""

from __future__ import annotations

import errno
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from agentrl.errors import AgentRLError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WHEN_FULL = "make room, then run the command again; training goes on with: agentrl train --resume RUN"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Classify the errors of the enclosed writes to `path`.

    Raises:
        UsageError: the disk is full, or the path cannot be written.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in _FULL
        raise UsageError(
            f"cannot write {path}",
            got="no space left" if full else f"{error.strerror or error}",
            expected="free disk space" if full else "a writable folder",
            hint=_WHEN_FULL if full else None,
        ) from error


def check_writable(path: Path) -> None:
    """Check before long work that its result can be written to `path` at the end; changes nothing.

    Raises:
        UsageError: as `writing`, or the path is a folder.
    """
    if path.is_dir():
        raise UsageError(f"cannot write {path}", got="a folder", expected="a file's name")
    with writing(path):
        target = next(found for found in (path, *path.absolute().parents) if found.exists())
        if target != path and not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{target} is a file")
        if not os.access(target, os.W_OK):  # says no, and not why
            reason = errno.EROFS if os.statvfs(target).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(reason, os.strerror(reason))


def write_fully(descriptor: int, data: bytes) -> None:
    """Write all of `data`; a short write goes on until the system says why."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(path: Path, data: bytes) -> None:
    """Write a whole file so that readers see the old one or the new one, and so that it survives a power cut.

    A missing folder is made.

    Raises:
        UsageError: as `writing`.
    """
    temporary = path.with_name(path.name + ".partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)


def first_free(paths: Iterable[Path]) -> Path:
    """Return the first of some paths where nothing is."""
    return next(path for path in paths if not path.exists())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_log = logging.getLogger(__name__)
_CHECKSUM = "checksum"
_MARKS = (b'"checksum"', b'"crc32:')
"""A line that has either of them had a checksum."""
_SHOWN_LINES = 5
UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, AgentRLError)
"""What the fields of a record raise when they are not as this program writes them."""


class DamagedRecord(ValueError):
    """A record that is not what was written."""


class JsonLinesWriter:
    """Appends one line per record, straight to the operating system: what was appended survives a killed process.

    A line that an earlier process left unfinished is closed first, so that it spoils no later one.

    Args:
        path: The file; made if needed.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_open = False
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._opened = os.fstat(self._descriptor)
            self._is_open = True
            self._close_torn_line()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record.

        Raises:
            UsageError: the disk is full, or the file was moved or removed.
        """
        self._check_in_place()
        with writing(self.path):
            write_fully(self._descriptor, sealed(record) + b"\n")

    @property
    def position(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def truncate(self, position: int) -> None:
        """Forget what was written after a checkpoint's position.

        A file that is shorter, because another program has cut it, is kept with a warning.
        """
        found = self.position
        if found < position:
            _log.warning("%s has lost its end: %d of %d bytes are there", self.path, found, position)
        with writing(self.path):
            os.ftruncate(self._descriptor, min(position, found))
            self._close_torn_line()

    def sync(self) -> None:
        """Make what was appended survive a power cut.

        Raises:
            UsageError: the disk failed, or the file was moved or removed.
        """
        self._check_in_place()
        with writing(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)

    def _close_torn_line(self) -> None:
        size = self.position
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            write_fully(self._descriptor, b"\n")

    def _check_in_place(self) -> None:
        """Check that the path still leads to the open file, so that nothing is written where nobody looks."""
        try:
            if os.path.samestat(os.stat(self.path), self._opened):
                return
            got = "another file in its place"
        except OSError as error:
            got = f"{error.strerror}"
        raise UsageError(
            f"{self.path} was moved or removed while it is written",
            got=got,
            expected="a folder that stays where it is until its run ends",
            hint="move it back and go on with: agentrl train --resume RUN, or resume it where it is now",
        )


class NumberedRecord(NamedTuple):
    """A record, and where it stands."""

    line: int
    """From 1."""
    record: dict[str, Any]


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the records of a file. Damaged lines are left out, and named in a warning at the end."""
    damaged: list[int] = []
    for _, record in numbered_records(path, damaged):
        yield record
    warn_damaged(path, damaged)


def numbered_records(path: Path, damaged: list[int], *, containing: bytes = b"") -> Iterator[NumberedRecord]:
    """Read the records of a file with the numbers of their lines.

    After a record with a checksum, one without counts as damaged: it has lost its own.

    Args:
        path: The file.
        damaged: Gets the numbers of the lines that are left out.
        containing: Only lines with these bytes are read.
    """
    has_checksums = False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if containing not in line:
                continue
            try:
                yield NumberedRecord(number, unsealed(line, must_be_sealed=has_checksums))
                has_checksums = has_checksums or _MARKS[1] in line
            except DamagedRecord:
                if line != b"\n":  # which closes a torn line of a file that was cut at its end
                    damaged.append(number)


def warn_damaged(path: Path, lines: Sequence[int]) -> None:
    """Warn about the lines of a file that were left out, if any were."""
    if lines:
        shown = ", ".join(map(str, lines[:_SHOWN_LINES])) + (", …" if len(lines) > _SHOWN_LINES else "")
        what = "1 damaged record is" if len(lines) == 1 else f"{len(lines)} damaged records are"
        _log.warning("%s: %s left out (%s %s)", path, what, "line" if len(lines) == 1 else "lines", shown)


def sealed(record: Mapping[str, Any], *, indent: bool = False) -> bytes:
    """Write a record as a JSON object with its checksum.

    Args:
        record: JSON types; must not have a key ``checksum``.
        indent: Write it on several lines, for people.
    """
    try:
        body = orjson.dumps(record)
    except TypeError:
        record = _without_surrogates(record)
        body = orjson.dumps(record)
    checksum = _checksum(body)
    if indent:
        return orjson.dumps({**record, _CHECKSUM: checksum}, option=orjson.OPT_INDENT_2)
    return body[:-1] + (b"," if len(body) > 2 else b"") + f'"{_CHECKSUM}":"{checksum}"}}'.encode()


def unsealed(data: bytes, *, must_be_sealed: bool = False) -> dict[str, Any]:
    """Read what `sealed` wrote.

    Args:
        data: The JSON object.
        must_be_sealed: Whether a record without a checksum counts as damaged.

    Raises:
        DamagedRecord: it is not what was written.
    """
    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DamagedRecord("it is not JSON") from error
    if not isinstance(record, dict):
        raise DamagedRecord("it is not an object")
    told = record.pop(_CHECKSUM, None)
    if told is None and not must_be_sealed and not any(mark in data for mark in _MARKS):
        return record
    if told != _checksum(orjson.dumps(record)):
        raise DamagedRecord("its checksum differs")
    return record


def _checksum(body: bytes) -> str:
    return f"crc32:{zlib.crc32(body):08x}"


def _without_surrogates(value: Any) -> Any:
    """Return the same with lone surrogates, which UTF-8 cannot hold, written out."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_without_surrogates(name): _without_surrogates(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value
