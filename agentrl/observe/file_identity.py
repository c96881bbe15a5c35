"""Digests of files and folders, which show whether a file has changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

WHOLE_BYTES = 64 * 2**20
"""Maximum size of files that are read in full; the digest of a larger one covers its modification time and samples."""
SAMPLES = 256
"""Number of samples that are read from a larger file, at equal distances; the last one ends at the file's end."""
SAMPLE_BYTES = 4096
MAX_FILES = 10_000
"""Maximum number of files in a folder that are read, in the order of their names."""


def file_digest(path: Path) -> str:
    """Return a digest of a file's content; for a large file, of its size, modification time and samples.

    Raises:
        OSError: the file cannot be read.
    """
    status = path.stat()
    digest = hashlib.blake2b(str(status.st_size).encode(), digest_size=8)
    with path.open("rb") as file:
        if status.st_size <= WHOLE_BYTES:
            while block := file.read(2**20):
                digest.update(block)
            return digest.hexdigest()
        digest.update(str(status.st_mtime_ns).encode())
        for number in range(SAMPLES):
            file.seek((status.st_size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def folder_digest(folder: Path) -> str:
    """Return a digest of the names and contents of the files in a folder and its subfolders, without hidden ones.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in islice(_files(folder), MAX_FILES):
        digest.update(f"{file.relative_to(folder).as_posix()} {file_digest(file)}\n".encode())
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        visible = sorted(name for name in names if not name.startswith("."))
        yield from (Path(parent, name) for name in visible if Path(parent, name).is_file())
