"""Files that survive a kill at any moment and a full disk: atomic writes, and append-only JSON Lines."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from agentrl.errors import AgentRLError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WHEN_FULL = "free some space, then run the command again; a training run resumes with --resume RUN"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert the errors of writes to `path` in the block.

    Raises:
        UsageError: the disk is full, or the path cannot be written.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, shutil.Error) and isinstance(error.args[0], list):  # of copytree: a row for each file
            reason = str(error.args[0][0][-1])
        full = error.errno in _FULL or any(f"[Errno {number}]" in reason for number in _FULL)
        raise UsageError(
            f"cannot write {path}",
            got="no space left" if full else reason,
            expected="free disk space" if full else "a writable folder",
            hint=_WHEN_FULL if full else None,
        ) from error


def check_writable(path: Path) -> None:
    """Check that a result can later be written to `path`; changes nothing.

    Raises:
        UsageError: see `writing`; or the path is a folder.
    """
    if path.is_dir():
        raise UsageError(f"cannot write {path}", got="a folder", expected="a file's name")
    with writing(path):
        target = next(found for found in (path, *path.absolute().parents) if found.exists())
        if target != path and not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{target} is a file")
        if not os.access(target, os.W_OK):  # the exception does not contain the reason
            reason = errno.EROFS if os.statvfs(target).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(reason, os.strerror(reason))


def write_fully(descriptor: int, data: bytes) -> None:
    """Write all of `data`; after a short write, continue until the system reports an error."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(path: Path, data: bytes, *, makes_folder: bool = True) -> None:
    """Replace a file atomically and sync it to disk, so that it survives a power failure.

    Without `makes_folder`, a missing folder is an error.

    Raises:
        UsageError: see `writing`.
    """
    temporary = path.with_name(path.name + ".partial")
    with writing(path):
        if makes_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)


def write_output(path: Path, data: bytes) -> None:
    """Write a file that the user has named: regular files are replaced; links, pipes and devices are written to.

    Raises:
        UsageError: see `writing`; or the path is a folder.
    """
    if path.is_dir():
        raise UsageError(f"cannot write {path}", got="a folder", expected="a file's name")
    if path.exists() and not path.is_file():
        with writing(path), path.open("wb") as file:
            file.write(data)
    else:
        replace_file(path.resolve() if path.is_symlink() else path, data)


def first_free(paths: Iterable[Path]) -> Path:
    """Return the first path that does not exist."""
    return next(path for path in paths if not path.exists())


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_log = logging.getLogger(__name__)
_CHECKSUM = "checksum"
_MARKS = (b'"checksum"', b'"crc32:')
"""Parts of a checksum; a line that contains one of them had a checksum."""
_SEAL, _SEAL_SIZE = b',"checksum":"crc32:', 29
"""Beginning and size of the end of a record, as `encode_record` writes it."""
_SHOWN_LINES = 5
UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, AgentRLError)
"""Exceptions from reading the fields of a malformed record."""


class DamagedRecord(ValueError):
    """A record that differs from what was written."""


class JsonLinesWriter:
    """Writer that appends one line per record without buffering, so that lines survive a killed process.

    If an earlier process left an unfinished line, a line break is written first, so that the next line stays intact.

    Args:
        path: The file; created if needed.

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
            write_fully(self._descriptor, encode_record(record) + b"\n")

    @property
    def position(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def truncate(self, position: int) -> None:
        """Remove everything after a checkpoint's position.

        If the file is shorter, because another program truncated it, a warning is logged.
        """
        found = self.position
        if found < position:
            _log.warning("%s is truncated: only %d of %d bytes are left", self.path, found, position)
        with writing(self.path):
            os.ftruncate(self._descriptor, min(position, found))
            self._close_torn_line()

    def sync(self) -> None:
        """Sync the file to disk, so that it survives a power failure.

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
        """Check that the path still refers to the open file, so that nothing is written to a removed file."""
        try:
            if os.path.samestat(os.stat(self.path), self._opened):
                return
            got = "another file in its place"
        except OSError as error:
            got = f"{error.strerror}"
        raise UsageError(
            f"{self.path} was moved or removed during the run",
            got=got,
            expected="a folder that is not moved until its run ends",
            hint="move it back and resume it with --resume RUN, or resume it at its new path",
        )


class NumberedRecord(NamedTuple):
    """A record and its line number."""

    line: int
    """Line number, from 1."""
    record: dict[str, Any]


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the records of a file. Damaged lines are skipped, and named in a warning at the end."""
    damaged: list[int] = []
    for _, record in numbered_records(path, damaged):
        yield record
    warn_damaged(path, damaged)


def numbered_records(path: Path, damaged: list[int], *, containing: bytes = b"") -> Iterator[NumberedRecord]:
    """Read the records of a file with their line numbers.

    After a record with a checksum, a record without one counts as damaged.

    `damaged` receives the numbers of skipped lines; only lines with the bytes `containing` are read.
    """
    has_checksums = False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if containing not in line:
                continue
            try:
                yield NumberedRecord(number, decode_record(line, needs_checksum=has_checksums))
                has_checksums = has_checksums or _MARKS[1] in line
            except DamagedRecord:
                if line != b"\n":  # an empty line follows an unfinished one in a truncated file
                    damaged.append(number)


def warn_damaged(path: Path, lines: Sequence[int]) -> None:
    """Warn about skipped lines of a file, if there are any."""
    if lines:
        numbers = ", ".join(map(str, lines[:_SHOWN_LINES])) + (", …" if len(lines) > _SHOWN_LINES else "")
        what = "1 damaged record" if len(lines) == 1 else f"{len(lines)} damaged records"
        _log.warning("%s: skipped %s (%s %s)", path, what, "line" if len(lines) == 1 else "lines", numbers)


def encode_record(record: Mapping[str, Any], *, indent: bool = False) -> bytes:
    """Encode a record as a JSON object with its checksum.

    Args:
        record: JSON types; must not have a key ``checksum``.
        indent: True for several indented lines.
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


def decode_record(data: bytes, *, needs_checksum: bool = False) -> dict[str, Any]:
    """Decode the output of `encode_record`.

    Args:
        data: The JSON object.
        needs_checksum: True if a record without a checksum counts as damaged.

    Raises:
        DamagedRecord: the record is not valid JSON, or does not match its checksum.
    """
    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DamagedRecord("it is not JSON") from error
    if not isinstance(record, dict):
        raise DamagedRecord("it is not an object")
    checksum = record.pop(_CHECKSUM, None)
    if _is_unchanged(data):
        return record
    if checksum is None and not needs_checksum and not any(mark in data for mark in _MARKS):
        return record
    if checksum != _checksum(orjson.dumps(record)):
        raise DamagedRecord("its checksum differs")
    return record


def _is_unchanged(data: bytes) -> bool:
    """Verify the bytes that `encode_record` wrote, without encoding the record again."""
    end = len(data) - data.endswith(b"\n")
    seal = data[end - _SEAL_SIZE : end]
    if not seal.startswith(_SEAL):
        return False
    body = zlib.crc32(b"}", zlib.crc32(memoryview(data)[: end - _SEAL_SIZE]))
    return seal[len(_SEAL) :] == f'{body:08x}"}}'.encode()


def _checksum(body: bytes) -> str:
    return f"crc32:{zlib.crc32(body):08x}"


def _without_surrogates(value: Any) -> Any:
    """Return the value with lone surrogates, which UTF-8 cannot encode, as escape sequences."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_without_surrogates(name): _without_surrogates(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value
