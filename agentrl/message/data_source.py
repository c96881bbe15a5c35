"""Data files behind a name: a file, a folder, a pattern, or files of a data set on the Hugging Face hub.

=============================================== =============================================================
``data/train.parquet``                          a file
``data/train``                                  all data files of a folder, in the order of their names
``data/train-*.parquet``                        the files that match a pattern, also ``data/*/train.jsonl``
``hf://datasets/org/name/data/train-*.parquet`` the same in a data set on the hub; ``org/name@revision`` pins one
=============================================== =============================================================

Files of the hub are downloaded to its cache; with ``HF_HUB_OFFLINE=1`` only the cache is used. ``HF_ENDPOINT`` is
another hub, and ``HF_TOKEN`` gives access to private data sets. Only files are read; no code of a data set is run.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import UsageError

HUB = re.compile(
    r"hf:/{1,2}(?:datasets/)?(?P<repository>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[\w.-]+|[^/@]+))?(?:/(?P<path>.*))?"
)
"""A data set on the hub; `Path` writes ``hf:/`` with one slash."""
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
"""Endings of data files; JSON may be compressed (``.jsonl.gz``)."""
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""Files that describe a data set."""
_SPLIT = re.compile(r"(?:^|[^a-z])(train|test|validation|valid|val|dev|eval)(?:[^a-z]|$)", re.IGNORECASE)
_SAME_SPLIT = {"validation": "valid", "val": "valid", "dev": "valid", "eval": "valid"}
_PART = re.compile(r"(.*-)(\d+)(-of-)(\d+)(\..*)")
"""Name of one of several files, such as ``train-00000-of-00002.parquet``."""
_PATTERN = re.compile(r"[*?\[]")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Start of an address; `Path` writes one slash."""
_SHOWN = 8
_MAX_PARTS = 100_000
_EXPECTED = "a file, a folder, or a pattern such as data/train-*.parquet"


def is_on_hub(name: str | Path) -> bool:
    """Return True if a name is an address of the hub, ``hf://…``."""
    return str(name).startswith(("hf://", "hf:/"))


def data_files(name: str | Path, what: str = "file") -> Sequence[Path]:
    """Return the data files behind a name, in order; a single file need not exist.

    Files of the hub are downloaded unless they are in its cache. Within a process, an address keeps its first revision.

    Args:
        name: File, folder, pattern, or address.
        what: Kind of the file, for messages.

    Raises:
        UsageError: there are no data files, they belong to several splits, the name is another address, or the hub
            cannot be reached.
    """
    if is_on_hub(name):
        return _hub_files(str(name), what)
    if _ADDRESS.match(str(name)):
        raise UsageError(
            f"the {what} is an address that cannot be read",
            got=str(name),
            expected=f"{_EXPECTED}; or hf://datasets/OWNER/NAME/FILES",
            hint="download it, and give its path",
        )
    return _local_files(Path(name).expanduser(), str(name), what)


def _existing(path: Path) -> Path:
    """Return the nearest existing folder above a path, in whose name brackets are not a pattern."""
    return next((folder for folder in path.parents if folder.exists()), Path())


def _local_files(path: Path, name: str, what: str) -> list[Path]:
    if path.is_dir():
        found = [file for file in sorted(path.iterdir()) if _is_data(file)]
    elif not path.exists() and _PATTERN.search(str(pattern := path.relative_to(base := _existing(path)))):
        found = _matching(base, str(pattern))
    else:
        return [path]
    if not found:
        inside = sorted(file.name for file in path.iterdir())[:_SHOWN] if path.is_dir() else []
        raise UsageError(
            f"no {what} in {name}",
            got=", ".join(inside) or ("an empty folder" if path.is_dir() else "nothing that matches"),
            expected=f"files that end with {', '.join(SUFFIXES)}",
        )
    _check_one_split(found, name)
    return found


def _matching(folder: Path, pattern: str) -> list[Path]:
    try:
        return [file for file in sorted(folder.glob(pattern)) if file.is_file()]
    except ValueError:  # ** next to other characters
        return []


def _is_data(file: Path) -> bool:
    name = file.name.removesuffix(".gz")
    return file.is_file() and name.endswith(SUFFIXES) and name not in _DESCRIPTIONS and not name.startswith((".", "_"))


def _check_one_split(files: Sequence[Path], name: str) -> None:
    """Check that no two files are named after different splits."""
    common = Path(os.path.commonpath([file.parent for file in files]))
    names = [str(file.relative_to(common)) for file in files]  # a pattern may match files in several folders
    splits = {split for one in names if (split := _split_of(one)) is not None}
    if len(splits) > 1:
        raise UsageError(
            f"{name} contains files of several splits",
            got=", ".join(file.name for file in files[:_SHOWN]),
            expected=f"{_EXPECTED}, with files of one split",
        )


def _split_of(name: str) -> str | None:
    found = _SPLIT.search(name)
    return None if found is None else _SAME_SPLIT.get(found[1].lower(), found[1].lower())


@functools.lru_cache(maxsize=64)
def _hub_files(name: str, what: str) -> tuple[Path, ...]:
    """Download the files of an address; cached, so that a process reads only one revision."""
    address = HUB.fullmatch(name)
    if address is None:
        raise UsageError(
            "the address of a data set is not valid",
            got=name,
            expected="hf://datasets/OWNER/NAME/FILES",
            hint=_EXPECTED,
        )
    repository, revision, path = address["repository"], address["revision"], (address["path"] or "").strip("/")
    from huggingface_hub import HfApi, snapshot_download  # slow to import, and rarely needed

    try:
        if not path:
            listed = HfApi().list_repo_files(repository, repo_type="dataset", revision=revision)
            raise _without_files(name, [file for file in listed if file.removesuffix(".gz").endswith(SUFFIXES)])
        wanted = [path, f"{path}/*"]
        folder = snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=wanted)
    except UsageError:
        raise
    except Exception as error:  # the library raises many types, including those of its HTTP library
        raise UsageError(
            f"cannot fetch {name}",
            got=(str(error).strip() or type(error).__name__).splitlines()[0],
            expected="a data set on the Hugging Face hub, or in its cache with HF_HUB_OFFLINE=1",
            hint="private and gated data sets need HF_TOKEN; HF_ENDPOINT is the address of another hub",
        ) from error
    found = _local_files(Path(folder) / path, name, what)
    if not found[0].exists():
        cached = sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*") if _is_data(file))
        raise _without_files(name, cached)
    _check_complete(found, name, "*" if (Path(folder) / path).is_dir() else Path(path).name)
    return tuple(found)


def _check_complete(files: Sequence[Path], name: str, pattern: str) -> None:
    """Check that no numbered file is missing, because the cache may be incomplete if the hub is offline."""
    names = {file.name for file in files}
    wanted = set[str]()
    parts = filter(None, map(_PART.fullmatch, names))
    for start, digits, of, total, end in {(one[1], len(one[2]), one[3], one[4], one[5]) for one in parts}:
        count = min(int(total), _MAX_PARTS)
        numbered = [f"{start}{number:0{digits}}{of}{total}{end}" for number in range(count + 1)]
        wanted |= {*(numbered[1:] if numbered[-1] in names else numbered[:-1])}  # from 0, or rarely from 1
    missing = sorted(one for one in wanted - names if fnmatch.fnmatchcase(one, pattern))
    if missing:
        raise UsageError(
            f"only a part of {name} is in the cache of the hub",
            got=f"{len(names)} files, without {', '.join(missing[:_SHOWN])}",
            expected="all of its files",
            hint="read it once with a connection to the hub",
        )


def _without_files(name: str, files: Sequence[str]) -> UsageError:
    more = ", …" if len(files) > _SHOWN else ""
    return UsageError(
        f"{name} matches no data file of the data set",
        got=f"a data set with {', '.join(files[:_SHOWN]) or 'no data files'}{more}",
        expected=f"{_EXPECTED}, after the name of the data set",
    )
