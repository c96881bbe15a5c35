"""Read-only tables on disk that are mapped into memory, so that processes share them and open them instantly."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import UsageError

Rows: TypeAlias = NDArray[np.int32]


def save_array(folder: Path, name: str, array: NDArray[Any]) -> None:
    """Write an array."""
    np.save(folder / f"{name}.npy", array)


def map_array(folder: Path, name: str) -> NDArray[Any]:
    """Return an array that `save_array` wrote.

    Raises:
        UsageError: its file is broken.
    """
    path = folder / f"{name}.npy"
    try:
        return np.asarray(np.load(path, mmap_mode="r"))  # np.memmap itself is slow to index
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(f"{path} cannot be read", got=error, hint=f"delete {folder}: it is rebuilt") from error


class Texts(Sequence[bytes]):
    """Texts by number.

    Args:
        folder: Folder that `save` wrote.
        name: Name of the table.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._bytes = map_array(folder, f"{name}.bytes")
        self._starts = map_array(folder, f"{name}.starts")

    @staticmethod
    def save(folder: Path, name: str, texts: Iterable[bytes]) -> None:
        """Write texts one after the other; none is kept in memory."""
        starts = [0]
        with (folder / f"{name}.bytes").open("wb") as file:
            for text in texts:
                starts.append(starts[-1] + file.write(text))
        content = np.memmap(folder / f"{name}.bytes", np.uint8, "r") if starts[-1] else np.zeros(0, np.uint8)
        save_array(folder, f"{name}.bytes", content)
        save_array(folder, f"{name}.starts", np.array(starts, np.int64))
        (folder / f"{name}.bytes").unlink()

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._bytes[self._starts[index] : self._starts[index + 1]].tobytes()

    def find(self, text: str) -> int | None:
        """Return the number of a text in a sorted table; ``None`` if it is not in the table."""
        wanted = text.encode()
        index = bisect.bisect_left(self, wanted)
        return index if index < len(self) and self[index] == wanted else None


class Span(NamedTuple):
    """A range of an array."""

    start: int
    stop: int


class Groups:
    """Numbers of products by a term that they contain, an attribute, a category or another name.

    Args:
        folder: Folder that `save` wrote.
        name: Name of the table.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.names = Texts(folder, name)
        self.rows: Rows = map_array(folder, f"{name}.rows")
        self._ends = map_array(folder, f"{name}.ends")

    @staticmethod
    def save(folder: Path, name: str, groups: Mapping[str, Iterable[int]]) -> None:
        """Write groups; their names are sorted."""
        names = sorted(groups, key=str.encode)
        members = [np.fromiter(groups[key], np.int32) for key in names]
        Groups.save_arrays(folder, name, names, np.concatenate([np.zeros(0, np.int32), *members]), map(len, members))

    @staticmethod
    def save_arrays(folder: Path, name: str, names: Iterable[str], rows: Rows, sizes: Iterable[int]) -> None:
        """Write groups whose names are already sorted.

        Args:
            folder: Folder of the table.
            name: Name of the table.
            names: Names of the groups, sorted by their bytes.
            rows: The members, one group after the other.
            sizes: Size of each group.
        """
        Texts.save(folder, name, map(str.encode, names))
        save_array(folder, f"{name}.rows", rows)
        save_array(folder, f"{name}.ends", np.cumsum([0, *sizes], dtype=np.int64))

    def span(self, name: str) -> Span:
        """Return the range of a group's members in `rows`; empty if the group does not exist."""
        index = self.names.find(name)
        return Span(0, 0) if index is None else Span(int(self._ends[index]), int(self._ends[index + 1]))

    def members(self, name: str) -> Rows:
        """Return the members of a group."""
        return self.rows[slice(*self.span(name))]
