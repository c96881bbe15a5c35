"""File operations of the supervisor, in the sandbox: it reads and writes files for the host.

Each operation runs in a separate process, with the permissions of commands.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing it takes as long as starting Python
    from typing import Any

PIECE = 65536


def _read_file(request: dict[str, Any]) -> None:
    path, most = request["path"], request["most"]
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    _require_plain(fd, path)
    if os.fstat(fd).st_size > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes", path)
    while data := os.read(fd, PIECE):
        most -= len(data)
        if most < 0:
            raise OSError(errno.EFBIG, f"larger than {request['most']} bytes", path)
        _write_all(1, data)


def _write_file(request: dict[str, Any]) -> None:
    path = request["path"]
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
    _require_plain(fd, path)
    os.ftruncate(fd, 0)
    try:
        while data := os.read(0, PIECE):
            _write_all(fd, data)
    except OSError as error:
        error.filename = path
        raise
    if request["executable"]:
        os.fchmod(fd, 0o755)


def _list_folder(request: dict[str, Any]) -> None:
    with os.scandir(request["path"]) as entries:
        for entry in entries:
            kind = b"d" if entry.is_dir() else b"f"
            _write_all(1, kind + os.fsencode(entry.name) + b"\0")


def _require_plain(fd: int, path: str) -> None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder", path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", path)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


ACTIONS = {"read": _read_file, "write": _write_file, "list": _list_folder}
