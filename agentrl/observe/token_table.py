"""Tables of a training step, next to the trajectory store: its sampled tokens, and its episodes.

    RUN/tokens/step-000012.parquet       one row per sampled token of the selected episodes of training step 12
    RUN/tokens/episodes-000012.parquet   one row per episode of the step, including dropped ones

Step 12 is the step of ``metrics.jsonl`` and of ``trajectories/step-000012.jsonl``. Files are replaced atomically, so a
killed run leaves only whole ones. `TOKENS` and `EPISODES` list the columns.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.errors import UsageError
from agentrl.observe.files import replace_file, writing
from agentrl.observe.run_folder import step_name, step_of

FOLDER = "tokens"
_SUFFIX = ".parquet"
_NAME = pa.dictionary(pa.int32(), pa.string())
_ROW_GROUP = 65_536

TOKENS = pa.schema(
    {
        "episode": _NAME,
        "sequence": pa.int16(),
        "position": pa.int32(),
        "token": pa.int32(),
        "advantage": pa.float32(),
        "episode_return": pa.float32(),
        "engine_logprob": pa.float32(),
        "trainer_logprob": pa.float32(),
        "ratio": pa.float32(),
        "entropy": pa.float32(),
        "clipped": pa.bool_(),
        "masked_by": _NAME,
    }
)
"""Columns of a step's tokens.

``sequence`` counts the sequences of the episode's trajectory, and ``position`` is an index into the sequence's ids.
``trainer_logprob`` is the trainer's before the step, at the sampling temperature. ``ratio``, ``entropy`` and
``clipped`` are those of the token's latest update. Numbers that the trainer did not compute are null; ``masked_by`` is
null if the token trained.
"""

EPISODES = pa.schema(
    {
        "episode": pa.string(),
        "group": pa.string(),
        "member": pa.int32(),
        "environment": _NAME,
        "task": pa.string(),
        "outcome": _NAME,
        "reward": pa.float64(),
        "success": pa.bool_(),
        "episode_return": pa.float64(),
        "advantage_mean": pa.float64(),
        "advantage_min": pa.float64(),
        "advantage_max": pa.float64(),
        "group_mean": pa.float64(),
        "group_std": pa.float64(),
        "staleness": pa.int32(),
        "oldest_version": pa.int32(),
        "newest_version": pa.int32(),
        "sampled_tokens": pa.int32(),
        "trained_tokens": pa.int32(),
        "clipped_tokens": pa.int32(),
        "mean_ratio": pa.float64(),
        "mean_entropy": pa.float64(),
        "dropped": _NAME,
        "has_tokens": pa.bool_(),
    }
)
"""Columns of a step's episodes.

``episode_return`` is the return after shaping, ``group_mean`` and ``group_std`` the mean and the standard deviation of
the returns of the group's trained episodes. ``dropped`` is the reason why the episode did not reach the trainer, else
null. ``has_tokens`` is true if the step's tokens include those of the episode.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """Values that a trainer computed for the sampled tokens of a step, sequence after sequence; arrays are [tokens].

    NaN stands for a number that was not computed.
    """

    episodes: Sequence[str]
    """Trajectory id of each sequence: [sequences]."""
    first_turns: Sequence[int]
    """Index within the episode of the turn of each sequence's first sampled token: [sequences]."""
    counts: npt.NDArray[np.integer[Any]]
    """Number of sampled tokens of each sequence: [sequences]."""
    position: npt.NDArray[np.integer[Any]]
    """Index of the token in its sequence."""
    token: npt.NDArray[np.integer[Any]]
    advantage: npt.NDArray[np.floating[Any]]
    episode_return: npt.NDArray[np.floating[Any]]
    engine_logprob: npt.NDArray[np.floating[Any]]
    trainer_logprob: npt.NDArray[np.floating[Any]]
    ratio: npt.NDArray[np.floating[Any]]
    entropy: npt.NDArray[np.floating[Any]]
    clipped: npt.NDArray[np.bool_]
    masked_by: npt.NDArray[np.uint8]
    """Number of the reason in `reasons`, from 1; 0 for trained tokens."""
    reasons: tuple[str, ...]

    @property
    def starts(self) -> npt.NDArray[np.integer[Any]]:
        """Index of each sequence's first token: [sequences]."""
        starts: npt.NDArray[np.integer[Any]] = np.cumsum(self.counts) - self.counts
        return starts


_COPIED = ("position", "token", "advantage", "episode_return", "engine_logprob", "trainer_logprob", "ratio", "entropy")


def token_table(columns: TokenColumns, sequences: Mapping[int, int]) -> pa.Table:
    """Return the rows of some sequences, ordered by episode and sequence.

    Args:
        columns: All tokens of the step.
        sequences: Sequences to include, with their numbers within their episodes.
    """
    names, starts = columns.episodes, columns.starts
    chosen = sorted(sequences, key=lambda one: (names[one], sequences[one]))
    if not chosen:
        return TOKENS.empty_table()
    counts = columns.counts[chosen]
    index = np.concatenate([np.arange(starts[one], starts[one] + columns.counts[one]) for one in chosen])
    ids = list(dict.fromkeys(names[one] for one in chosen))
    place = {name: number for number, name in enumerate(ids)}
    episode = np.repeat([place[names[one]] for one in chosen], counts)
    reason = columns.masked_by[index].astype(np.int32) - 1
    copied = {name: getattr(columns, name)[index] for name in _COPIED}
    return pa.table(
        {
            "episode": pa.DictionaryArray.from_arrays(pa.array(episode, pa.int32()), pa.array(ids, pa.string())),
            "sequence": np.repeat([sequences[one] for one in chosen], counts).astype(np.int16),
            **{name: pa.array(values, TOKENS.field(name).type, from_pandas=True) for name, values in copied.items()},
            "clipped": columns.clipped[index],
            "masked_by": pa.DictionaryArray.from_arrays(
                pa.array(reason, mask=reason < 0), pa.array(columns.reasons, pa.string())
            ),
        },
        schema=TOKENS,
    )


def episode_table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return a table of episodes; missing values are null."""
    return pa.Table.from_pylist([dict(row) for row in rows], schema=EPISODES)


def write_step(run: Path, step: int, tokens: Sequence[pa.Table], episodes: pa.Table) -> None:
    """Write the tables of a step, replacing those of an earlier attempt at it.

    Raises:
        UsageError: the disk is full, or the run's folder was moved.
    """
    with writing(run):
        (run / FOLDER).mkdir(exist_ok=True)
    joined = pa.concat_tables(tokens).unify_dictionaries() if tokens else TOKENS.empty_table()
    for file, table in ((token_file(run, step), joined), (episode_file(run, step), episodes)):
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer, compression="zstd", row_group_size=_ROW_GROUP)
        replace_file(file, buffer.getvalue().to_pybytes(), makes_folder=False)  # the run may have been moved


def remove_steps_after(run: Path, step: int) -> None:
    """Remove the tables of later steps, which a resumed run writes again."""
    for found in steps(run):
        if found > step:
            token_file(run, found).unlink(missing_ok=True)
            episode_file(run, found).unlink(missing_ok=True)


def token_file(run: Path, step: int) -> Path:
    """Return the path of a step's tokens."""
    return run / FOLDER / step_name(step, _SUFFIX)


def episode_file(run: Path, step: int) -> Path:
    """Return the path of a step's episodes."""
    return run / FOLDER / step_name(step, _SUFFIX).replace("step-", "episodes-")


def steps(run: Path) -> list[int]:
    """Return the steps that have tables, sorted."""
    folder = run / FOLDER
    names = (re.sub("^episodes-", "step-", file.name) for file in folder.glob(f"episodes-*{_SUFFIX}"))
    return sorted(step for name in names if (step := step_of(name, _SUFFIX)) is not None)


def read_token_rows(run: Path, step: int, episode: str) -> pa.Table | None:
    """Read the tokens of an episode, ordered by sequence and position; ``None`` if the step has none of it.

    Raises:
        UsageError: the table is damaged.
    """
    found = _read(token_file(run, step), [("episode", "=", episode)])
    return found if found is not None and found.num_rows else None


def read_episode_rows(run: Path, step: int, episodes: Collection[str] | None = None) -> pa.Table | None:
    """Read the episodes of a step, or some of them; ``None`` without a table.

    Raises:
        UsageError: the table is damaged.
    """
    return _read(episode_file(run, step), None if episodes is None else [("episode", "in", list(episodes))])


def _read(file: Path, where: list[tuple[str, str, Any]] | None) -> pa.Table | None:
    try:
        return pq.read_table(file, filters=where)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{file} cannot be read", got=reason, expected="a table of the trainer") from error
