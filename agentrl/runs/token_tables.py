"""Token tables of a run: selection of the episodes, and the thread that writes the files.

    scheduler ─► EpisodeRecorder.on_group_end ─► drop ─┐
    trainer.step ─► StepReport.tokens ─────────► write ┴─► thread ─► RUN/tokens/

No call waits for the disk. If a table cannot be written, the run continues with a warning.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from agentrl.errors import described_error
from agentrl.errors.foreign import DaemonThreads
from agentrl.observe.token_table import TokenColumns, episode_table, remove_steps_after, token_table, write_step
from agentrl.observe.trajectory_store import GroupEnd
from agentrl.rollout.groups import Group
from agentrl.training.report import StepReport
from agentrl.trajectory import Trajectory

MAX_PENDING = 3
"""Maximum number of steps that wait for the disk; further ones are left out."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTables:
    """Inputs of a step's tables."""

    step: int
    episodes: Mapping[str, Trajectory]
    """Episodes of the step's groups by id, with experts."""
    columns: tuple[TokenColumns, ...]
    adapters: Mapping[str, int]
    """Versions of several adapters at the start of the step."""


class TokenTables:
    """Writer of a run's token tables.

    Tables of steps after `step` are removed; `chosen` is ``observe.tokens``.
    """

    def __init__(
        self, run: Path, chosen: int | Literal["all", "none"], *, step: int, say: Callable[[str], None]
    ) -> None:
        self._run, self._chosen, self._say = run, chosen, say
        self._threads = DaemonThreads("agentrl-token-tables", limit=1)
        self._pending: list[concurrent.futures.Future[None]] = []
        self._dropped: list[dict[str, Any]] = []
        """Rows of episodes that were dropped since the last step; only the thread uses them."""
        self._has_warned = False
        if chosen != "none":
            self._submit(functools.partial(remove_steps_after, run, step), "earlier tables")

    def drop(self, end: GroupEnd, episodes: Sequence[Trajectory]) -> None:
        """Note the end of a group; its episodes are listed in the next step's table unless they train."""
        if self._chosen != "none" and end is not GroupEnd.TRAINED:
            self._submit(functools.partial(self._add_dropped, end, list(episodes)), "dropped episodes")

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        report: StepReport,
        *,
        adapters: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Write the tables of a training step in the thread."""
        if self._chosen == "none":
            return
        self._pending = [future for future in self._pending if not future.done()]
        if len(self._pending) >= MAX_PENDING:
            self._warn(f"step {step}", f"{MAX_PENDING} steps already wait for the disk")
            return
        found = {one.id: one for group in groups for one in (*group.trajectories, *group.experts)}
        tables = _StepTables(step=step, episodes=found, columns=report.tokens, adapters=dict(adapters))
        self._pending.append(self._submit(functools.partial(self._write, tables), f"step {step}"))

    def close(self, within_s: float) -> None:
        """Wait until the last table is written, at most some seconds."""
        _, late = concurrent.futures.wait(self._pending, timeout=within_s)
        if late:
            self._warn("the last steps", f"the disk did not answer within {within_s:g} s")

    def _submit(self, work: Callable[[], None], what: str) -> concurrent.futures.Future[None]:
        return self._threads.submit(self._attempt, work, what)

    def _attempt(self, work: Callable[[], None], what: str) -> None:
        try:
            work()
        except Exception as error:  # tables must not end a run; the reason is shown once
            self._warn(what, described_error(error))

    def _warn(self, what: str, why: str) -> None:
        warn = _log.warning if self._has_warned else self._say
        self._has_warned = True
        warn(f"the token table of {what} could not be written, and the run continues without it: {why}")

    def _add_dropped(self, end: GroupEnd, episodes: Sequence[Trajectory]) -> None:
        self._dropped += [episode_row(one) | {"dropped": str(end)} for one in episodes]

    def _write(self, tables: _StepTables) -> None:
        if not self._run.is_dir():
            raise FileNotFoundError(f"{self._run} was moved or removed during the run")
        chosen = self._choose(tables)
        rows = step_rows(tables.step, tables.episodes, tables.columns, adapters=tables.adapters)
        rows = [row | {"has_tokens": row["episode"] in chosen} for row in rows]
        dropped, self._dropped = self._dropped, []
        tokens = [token_table(own, _sequences(own, tables.episodes, chosen)) for own in tables.columns]
        write_step(self._run, tables.step, tokens, episode_table([*rows, *dropped]))

    def _choose(self, tables: _StepTables) -> set[str]:
        trained = dict.fromkeys(name for own in tables.columns for name in own.episodes)
        if not isinstance(self._chosen, int):
            return set(trained)
        groups: dict[str, list[Trajectory]] = {}
        for name in trained:
            groups.setdefault(tables.episodes[name].group_id, []).append(tables.episodes[name])
        return choose_episodes(list(groups.values()), self._chosen)


def choose_episodes(groups: Sequence[Sequence[Trajectory]], most: int) -> set[str]:
    """Choose at most `most` episodes for a reader: whole groups, in turn the most mixed, the best and the worst one.

    If not even one group fits, the best and the worst episodes of the most mixed group are chosen.

    Returns:
        Ids of the episodes.
    """
    mixed = sorted(groups, key=lambda group: -(max(map(_reward, group)) - min(map(_reward, group))))
    best = sorted(groups, key=lambda group: -_mean_reward(group))
    chosen: set[str] = set()
    for group in itertools.chain.from_iterable(zip(mixed, best, reversed(best), strict=True)):
        if len(chosen | (own := {one.id for one in group})) <= most:
            chosen |= own
    if not chosen and mixed:
        ordered = sorted(mixed[0], key=_reward)
        chosen = {one.id for one in (*ordered[: most // 2], *ordered[len(ordered) - (most + 1) // 2 :])}
    return chosen


def _reward(episode: Trajectory) -> float:
    return episode.reward or 0.0


def _mean_reward(group: Sequence[Trajectory]) -> float:
    return math.fsum(map(_reward, group)) / len(group)


def _sequences(columns: TokenColumns, episodes: Mapping[str, Trajectory], chosen: set[str]) -> dict[int, int]:
    """Return the chosen episodes' sequences in the columns, each with its number within its episode."""
    found: dict[int, int] = {}
    for place, (name, turn) in enumerate(zip(columns.episodes, columns.first_turns, strict=True)):
        if name in chosen:
            sequences = enumerate(episodes[name].sequences)
            found[place] = next(number for number, own in sequences if any(one.index == turn for one in own.turns))
    return found


def step_rows(
    step: int, episodes: Mapping[str, Trajectory], columns: Sequence[TokenColumns], *, adapters: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the row of each episode of a step's groups.

    Args:
        step: Number of the step, from 1; its episodes were trained with the weights of version ``step - 1``.
        episodes: Episodes by id.
        columns: Tokens of the trained ones.
        adapters: Versions of several adapters at the start of the step.
    """
    trained = _join([_token_statistics(own) for own in columns])
    returns: dict[str, list[float]] = {}
    for name, found in trained.items():
        returns.setdefault(episodes[name].group_id, []).append(found["episode_return"])
    rows = []
    for name, episode in episodes.items():
        row = episode_row(episode) | {"staleness": episode.staleness(step - 1, adapters)}
        if name in trained:
            group = returns[episode.group_id]
            row |= trained[name] | {"group_mean": float(np.mean(group)), "group_std": float(np.std(group))}
        else:
            row["dropped"] = _why_left_out(episode)
        rows.append(row)
    return rows


def episode_row(episode: Trajectory) -> dict[str, Any]:
    """Return the columns of an episode's row that do not come from the trainer."""
    sampled = [versions for own in episode.sequences if (versions := own.versions[own.loss_mask]).size]
    member = episode.id.removeprefix(f"{episode.group_id}/").partition(".")[0]
    return {
        "episode": episode.id,
        "group": episode.group_id,
        "member": int(member) if member.isdecimal() else None,
        "environment": episode.environment,
        "task": episode.task_id,
        "outcome": None if episode.outcome is None else str(episode.outcome),
        "reward": episode.reward,
        "success": episode.success,
        "oldest_version": min((int(versions.min()) for versions in sampled), default=None),
        "newest_version": max((int(versions.max()) for versions in sampled), default=None),
        "sampled_tokens": sum(versions.size for versions in sampled),
        "trained_tokens": 0,
        "clipped_tokens": 0,
        "has_tokens": False,
    }


def _why_left_out(episode: Trajectory) -> str:
    """Return why the trainer left out an episode of a group that it trained on."""
    if episode.outcome is None or not episode.outcome.is_trainable:
        return str(episode.outcome or "unfinished")
    if episode.reward is None:
        return "no reward"
    return "alone in its group" if episode.sampled_tokens else "no sampled token"


_SUMMED = ("tokens", "computed", "trained_tokens", "clipped_tokens", "advantage", "ratio", "entropy")


def _token_statistics(columns: TokenColumns) -> dict[str, dict[str, float]]:
    """Return sums over the tokens of each episode, and the extremes of its advantages, by id."""
    names = dict.fromkeys(columns.episodes)
    place = {name: number for number, name in enumerate(names)}
    owner = np.repeat([place[name] for name in columns.episodes], columns.counts)
    computed = ~np.isnan(columns.ratio)
    weights = {
        "tokens": None,
        "computed": computed,
        "trained_tokens": columns.masked_by == 0,
        "clipped_tokens": columns.clipped,
        "advantage": columns.advantage,
        "ratio": np.nan_to_num(columns.ratio),
        "entropy": np.nan_to_num(columns.entropy),
    }
    sums = {name: np.bincount(owner, values, minlength=len(names)) for name, values in weights.items()}
    low, high = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(low, owner, columns.advantage)
    np.maximum.at(high, owner, columns.advantage)
    last = dict(zip(columns.episodes, columns.starts, strict=True))
    return {
        name: {key: float(values[number]) for key, values in sums.items()}
        | {"low": float(low[number]), "high": float(high[number])}
        | {"episode_return": float(columns.episode_return[last[name]])}
        for name, number in place.items()
    }


def _join(parts: Iterable[Mapping[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Join the statistics of several adapters or environments, and return the columns of each episode."""
    joined: dict[str, dict[str, float]] = {}
    for name, found in itertools.chain.from_iterable(part.items() for part in parts):
        known = joined.get(name)
        if known is not None:
            found = found | {key: known[key] + found[key] for key in _SUMMED}
            found |= {"low": min(known["low"], found["low"]), "high": max(known["high"], found["high"])}
        joined[name] = found
    return {
        name: {
            "episode_return": found["episode_return"],
            "advantage_mean": found["advantage"] / found["tokens"],
            "advantage_min": found["low"],
            "advantage_max": found["high"],
            "trained_tokens": int(found["trained_tokens"]),
            "clipped_tokens": int(found["clipped_tokens"]),
            "mean_ratio": found["ratio"] / found["computed"] if found["computed"] else None,
            "mean_entropy": found["entropy"] / found["computed"] if found["computed"] else None,
        }
        for name, found in joined.items()
    }
