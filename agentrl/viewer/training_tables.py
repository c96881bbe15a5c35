"""Reading of the trainer's values for each token and episode: the Parquet files in a run's folder ``tokens``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.viewer.sources import OpenedFolders, SourceFolder

FOLDER = "tokens"
OVERLAYS = (
    *("advantage", "episode_return", "engine_logprob", "trainer_logprob", "ratio", "entropy", "clipped", "masked_by"),
)
"""Columns of a token."""
LATER_STEPS = 8
"""Number of step files after the episode's own in which it may have trained, in asynchronous training."""
_STEP = re.compile(r"(step|episodes)-(\d{6,12})\.parquet")


def steps_with_tables(source: SourceFolder) -> list[int]:
    """Return the steps whose tokens are stored, in order."""
    folder = source.path / FOLDER
    if not folder.is_dir():
        return []
    found = (_STEP.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(one[2]) for one in found if one is not None and one[1] == "step")


def read_token_rows(
    folders: OpenedFolders, source: SourceFolder, step: int, episode: str
) -> Mapping[str, list[Any]] | None:
    """Read the rows of an episode's tokens.

    Args:
        folders: Opened folders.
        source: The run.
        step: Step during which the episode ended; in asynchronous training it trains at a later one.
        episode: Id of the episode.

    Returns:
        Columns ``sequence``, ``position`` and those of `OVERLAYS`; ``None`` if the episode has no rows.

    Raises:
        UsageError: a file leads out of the opened folders.
        ValueError: a file is damaged.
        OSError: a file has been removed.
    """
    later = [one for one in steps_with_tables(source) if one >= step][: 1 + LATER_STEPS]
    for one in later:
        rows = _read(folders.check(source.path / FOLDER / f"step-{one:06d}.parquet"), [episode])
        if rows["episode"]:
            return rows
    return None


def read_episode_rows(
    folders: OpenedFolders, source: SourceFolder, step: int, episodes: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Read the rows of episodes, by id: advantages, group statistics, staleness; see `read_token_rows`."""
    found: dict[str, dict[str, Any]] = {}
    for one in [one for one in steps_with_tables(source) if one >= step][: 1 + LATER_STEPS]:
        path = source.path / FOLDER / f"episodes-{one:06d}.parquet"
        if path.is_file() and (missing := [episode for episode in episodes if episode not in found]):
            columns = _read(folders.check(path), missing)
            for values in zip(*columns.values(), strict=True):
                row = dict(zip(columns, values, strict=True))
                found.setdefault(row["episode"], row)
    return found


def _read(path: Path, episodes: Sequence[str]) -> dict[str, list[Any]]:
    """Return the columns of the rows of some episodes."""
    import pyarrow.parquet as pq

    table = pq.read_table(path, filters=[("episode", "in", list(episodes))])
    columns: dict[str, list[Any]] = table.to_pydict()
    if "episode" not in columns:
        raise ValueError(f"{path.name} has no column episode")
    return columns
