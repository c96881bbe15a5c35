"""Tokens of a sequence as columns, with the trainer's values for them.

The trainer writes them to Parquet files in the run's folder ``tokens``, with one row per token or per episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.errors import UsageError
from agentrl.observe.token_table import episode_file, read_episode_rows, read_token_rows, steps, token_file
from agentrl.trajectory import Source, TokenSequence, Trajectory
from agentrl.viewer.decoding import TokenDecoder
from agentrl.viewer.sources import OpenedFolders, SourceFolder

SOURCES = [source.name.lower() for source in Source]
"""Names of the values of `Source`."""
MAX_TOKENS = 20_000
"""Maximum number of tokens in one answer."""
_NUMBERS = ("advantage", "ratio", "entropy", "trainer_logprob", "episode_return", "engine_logprob")

TokenRows = Mapping[str, Sequence[Any]]
"""Rows of `find_token_rows`."""
OVERLAYS = (
    *("advantage", "episode_return", "engine_logprob", "trainer_logprob", "ratio", "entropy", "clipped", "masked_by"),
)
"""Columns with one value per token."""
LATER_STEPS = 8
"""Number of later step files to search, because asynchronous training may train an episode at a later step."""


def token_columns(
    trajectory: Trajectory,
    rows: TokenRows | None,
    decoder: TokenDecoder | None,
    *,
    number: int,
    start: int,
    end: int,
) -> dict[str, Any]:
    """Return the tokens `start` to `end` of a sequence as columns of equal lengths.

    Args:
        trajectory: The episode.
        rows: Rows of the episode in the trainer's table, if there are any.
        decoder: Decoder of its tokens; without one, token ids are shown.
        number: Number of the sequence.
        start: Index of the first token.
        end: Index after the last token.

    Raises:
        UsageError: there is no such sequence.
    """
    if number >= len(trajectory.sequences):
        raise UsageError("no such sequence", got=number, expected=f"less than {len(trajectory.sequences)}")
    sequence = trajectory.sequences[number]
    end = min(end, len(sequence), start + MAX_TOKENS)
    start = min(start, end)
    part = slice(start, end)
    ids = sequence.token_ids[part].tolist()
    logprobs = sequence.logprobs[part]
    special = decoder.special if decoder is not None else frozenset()
    return {
        "sequence": number,
        "from": start,
        "total": len(sequence),
        "text": [f"⟨{one}⟩" for one in ids] if decoder is None else _text(sequence, ids, start, decoder),
        "id": ids,
        "source": sequence.sources[part].tolist(),
        "sources": SOURCES,
        "special": [int(one in special) for one in ids],
        "trained": sequence.loss_mask[part].astype(np.int8).tolist(),
        "logprob": logprobs.astype(np.float64),
        "version": [None if one < 0 else one for one in sequence.versions[part].tolist()],
        "turn": _turns(sequence, start, end),
        "images": [
            {
                "start": placed.start,
                "end": placed.end,
                "text": placed.image.alternative,
                "checksum": placed.image.checksum,
            }
            for placed in sequence.images
            if placed.start < end and placed.end > start
        ],
        **_overlays(rows, number, start, end),
    }


def _text(sequence: TokenSequence, ids: list[int], start: int, decoder: TokenDecoder) -> list[str]:
    """Return the text of tokens; empty for image tokens."""
    text = decoder.pieces(ids)
    for placed in sequence.images:
        for position in range(max(placed.start, start), min(placed.end, start + len(ids))):
            text[position - start] = ""
    return text


def _turns(sequence: TokenSequence, start: int, end: int) -> list[int | None]:
    """Return the number of the turn whose answer contains each token."""
    found: list[int | None] = [None] * (end - start)
    for turn in sequence.turns:
        first, last = max(turn.start, start), min(turn.end, end)
        found[first - start : last - start] = [turn.index] * max(0, last - first)
    return found


def _overlays(rows: TokenRows | None, number: int, start: int, end: int) -> dict[str, Any]:
    if rows is None:
        return dict.fromkeys(OVERLAYS)
    sequences, positions = np.asarray(rows["sequence"], np.int64), np.asarray(rows["position"], np.int64)
    chosen = np.flatnonzero((sequences == number) & (positions >= start) & (positions < end))
    places = positions[chosen] - start
    found: dict[str, Any] = {}
    for name in OVERLAYS:
        if name not in rows:
            found[name] = None
        elif name in _NUMBERS:
            values: npt.NDArray[np.float64] = np.full(end - start, np.nan)
            column = np.array([np.nan if one is None else one for one in rows[name]], dtype=np.float64)
            values[places] = column[chosen]
            found[name] = values
        else:
            listed: list[Any] = [0 if name == "clipped" else None] * (end - start)
            for place, row in zip(places.tolist(), chosen.tolist(), strict=True):
                listed[place] = int(bool(rows[name][row])) if name == "clipped" else rows[name][row]
            found[name] = listed
    return found


def find_token_rows(folders: OpenedFolders, source: SourceFolder, step: int, episode: str) -> TokenRows | None:
    """Read the rows of an episode's tokens.

    Args:
        folders: Opened folders.
        source: The run.
        step: Step during which the episode started; in asynchronous training it trains at a later one.
        episode: Id of the episode.

    Returns:
        Columns ``sequence``, ``position`` and those of `OVERLAYS`; ``None`` if the episode has no rows.

    Raises:
        UsageError: a file is damaged, or is outside the opened folders.
    """
    for one in _steps_since(source, step):
        folders.check(token_file(source.path, one))
        if (table := read_token_rows(source.path, one, episode)) is not None:
            rows: TokenRows = table.to_pydict()
            return rows
    return None


def find_episode_rows(
    folders: OpenedFolders, source: SourceFolder, step: int, episodes: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Read the rows of episodes, by id: advantages, group statistics, staleness; see `find_token_rows`."""
    found: dict[str, dict[str, Any]] = {}
    for one in _steps_since(source, step):
        if missing := [episode for episode in episodes if episode not in found]:
            folders.check(episode_file(source.path, one))
            rows = read_episode_rows(source.path, one, missing)
            found |= {row["episode"]: row for row in (() if rows is None else rows.to_pylist())}
    return found


def _steps_since(source: SourceFolder, step: int) -> list[int]:
    return [one for one in steps(source.path) if one >= step][: 1 + LATER_STEPS]
