"""Files of tasks, one per split; no two splits may share a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agentrl.errors import UsageError

PLACE = "{split}"


class SplitFiles(Mapping[str, str]):
    """Hashable mapping from split to file."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = dict(files)

    def __getitem__(self, split: str) -> str:
        return self._files[split]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __hash__(self) -> int:
        return hash(frozenset(self._files.items()))


def files_by_split(given: str | Mapping[str, str], splits: Sequence[str], what: str) -> SplitFiles:
    """Return the file of each split that has one.

    Args:
        given: A name with ``{split}`` in it, or names by split.
        splits: The existing splits.
        what: Description of the files, for messages.

    Raises:
        UsageError: a split is unknown, or two splits have the same file.
    """
    if isinstance(given, str) and PLACE not in given:
        raise UsageError(
            f"all splits would share the {what}",
            got=given,
            expected=f"a name with {PLACE} in it, or a file for each split",
            hint=f"{{test: {given}}} makes it the test split",
        )
    files = {split: given.replace(PLACE, split) for split in splits} if isinstance(given, str) else dict(given)
    unknown = [split for split in files if split not in splits]
    if unknown or not files:
        raise UsageError(f"the {what} name an unknown split", got=", ".join(unknown), expected=", ".join(splits))
    seen: dict[Path, str] = {}
    for split, name in files.items():
        other = seen.setdefault(Path(name).expanduser().resolve(), split)
        if other != split:
            raise UsageError(f"{other} and {split} share the {what}", got=name, expected="a file for each split")
    return SplitFiles(files)


def file_of(files: Mapping[str, str], split: str, what: str) -> str:
    """Return the file of a split.

    Raises:
        UsageError: the split has none.
    """
    if split not in files:
        raise UsageError(f"split {split} has no file with {what}", got=", ".join(files), expected=split)
    return files[split]
