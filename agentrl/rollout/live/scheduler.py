"""Scheduler of groups that clients start: each session of live traffic is a group of one episode.

Clients start episodes at any time, so staleness does not limit admission, and serving does not wait for the trainer. A
batch has the oldest rewarded sessions that are not too stale. Every session's end is a line of
``sessions.jsonl``, written before the client receives the answer to its feedback.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.agent_loop import AgentLoop
from agentrl.observe.files import JsonLinesWriter, read_json_lines
from agentrl.observe.progress import LiveStatus
from agentrl.observe.trajectory_store import GroupEnd
from agentrl.rollout.finished_episodes import RecoveredEpisodes, group_position
from agentrl.rollout.groups import Group
from agentrl.rollout.journal import JournalFolder
from agentrl.rollout.live.sessions import MAX_ENDED, LiveSessions, SessionEnd
from agentrl.rollout.scheduler import GroupScheduler

SESSIONS = "sessions.jsonl"


class LiveScheduler(GroupScheduler):
    """Scheduler of the sessions of live traffic.

    Args:
        *parts: Arguments of `GroupScheduler`.
        sessions: The agent loop, which serves the clients.
        folder: Folder of the run, for the file of ended sessions.
        **options: Keyword arguments of `GroupScheduler`.
    """

    def __init__(self, *parts: Any, sessions: AgentLoop, folder: Path, **options: Any) -> None:
        super().__init__(*parts, **options)
        assert isinstance(sessions, LiveSessions)
        self._sessions = sessions
        self._log = JsonLinesWriter(folder / SESSIONS)
        self._stored_ends = _read_ends(folder / SESSIONS)
        self._dropped = 0
        """Number of rewarded sessions that became too stale before a batch took them."""
        self._reported: Counter[str] = Counter()

    async def start(self) -> None:
        """Let clients connect.

        Raises:
            UsageError: the port is taken, or a key is missing.
        """
        ended, self._stored_ends = self._stored_ends, {}
        await self._sessions.start(self._begin_session, max_open=self.max_concurrent, ended=ended)

    def _start_groups(self) -> None:
        """Do nothing: clients start groups."""

    def _batch_words(self, batch: int) -> str:
        return f"{batch} rewarded sessions"

    def _begin_session(self, name: str) -> None:
        group = self._group_of(name)
        self._running[group.position] = group
        self._start_episode(group, 0)

    def _group_of(self, name: str) -> Group:
        group = self._next_group()
        assert group is not None, "tasks of live traffic are seeds"
        group.draw = replace(group.draw, task=replace(group.task, id=name))
        return group

    def _is_ready(self) -> bool:
        self._finished.sort(key=lambda group: group.position)
        return len(self._finished) >= self.batch

    def _complete(self, group: Group) -> None:
        del self._running[group.position]
        (episode,) = group.trajectories
        if not episode.is_trainable or not episode.sampled_tokens:
            is_expired = not episode.is_trainable and episode.error is None
            end = SessionEnd.EXPIRED if is_expired else SessionEnd.FAILED
            self._counters.groups_failed += end is SessionEnd.FAILED
            self.record_end(group, GroupEnd.EXPIRED if is_expired else GroupEnd.FAILED)
        elif self._is_fresh(group):
            end = SessionEnd.REWARDED
            self._finished.append(group)
        else:
            end = SessionEnd.STALE
        self._write_end(group, end)
        self._sessions.finish(group.task.id, end)

    def _write_end(self, group: Group, end: SessionEnd) -> None:
        (episode,) = group.trajectories
        record = {"session": group.task.id, "end": end, "time": time.time(), "version": self.version}
        record["opened"] = group.start_version
        if end in (SessionEnd.REWARDED, SessionEnd.STALE):
            age = episode.staleness(self.version, self._adapter_versions())
            record |= {"reward": episode.reward, "success": episode.success, "staleness": age}
        self._log.append(record)

    def _note_stale(self, age: int) -> None:
        """Count a stale session; unlike in other runs, many in a row do not end the run, because clients cause them."""
        self._counters.groups_stale += 1

    def _drop_stale(self) -> None:
        before = len(self._finished)
        super()._drop_stale()
        self._dropped += before - len(self._finished)

    def recover(self, episodes: RecoveredEpisodes, journals: JournalFolder | None = None) -> int:
        """Queue the rewarded sessions that a killed run had not trained on at its checkpoint.

        Sessions that were open are lost: the new process answers their clients' next requests. Tokens of weights that
        the kill has lost count as tokens of the checkpoint's weights.
        """
        open_at_checkpoint = {group.position: group for group in self._to_restart}
        self._to_restart.clear()
        recovered = 0
        for episode in sorted(episodes.take_all(), key=lambda one: group_position(one.group_id)):
            position = group_position(episode.group_id)
            group = open_at_checkpoint.pop(position, None)
            if group is None and position < self.tasks.position:
                continue  # trained before the checkpoint, or among the finished groups in it
            while group is None or group.position != position:
                group = self._next_group()
                assert group is not None, "tasks of live traffic are seeds"
            group.draw = replace(group.draw, task=replace(group.task, id=episode.task_id))
            for sequence in episode.sequences:
                sequence.limit_versions(self.version)
            episode.forget_messages()
            group.members[0] = episode
            end = SessionEnd.REWARDED if episode.sampled_tokens else SessionEnd.FAILED
            # Feedback that was refused as too late stays refused, although it is not too late for the checkpoint.
            if self._stored_ends.setdefault(episode.task_id, end) is SessionEnd.REWARDED and self._is_fresh(group):
                self._finished.append(group)
                recovered += 1
        return recovered

    def _restore(self, record: Mapping[str, Any]) -> Group:
        """Restore a group of a checkpoint; its session's name is its episode's task."""
        group = super()._restore(record)
        for episode in group.trajectories:
            group.draw = replace(group.draw, task=replace(group.task, id=episode.task_id))
            self._stored_ends.setdefault(episode.task_id, SessionEnd.REWARDED)
        return group

    def metrics(self) -> dict[str, float]:
        """Return counts since the last call, and the current numbers of sessions."""
        now = Counter(self._counts())
        found = {f"live/{name}": float(now[name] - self._reported[name]) for name in now}
        self._reported = now
        return found | {"live/open": float(self._sessions.open_sessions), "live/waiting": float(len(self._finished))}

    def _counts(self) -> dict[str, int]:
        counts = self._sessions.counts
        refused = {name: counts.refused[code] for name, code in _REFUSED_COUNTS.items()}
        others = sum(counts.refused.values()) - sum(refused.values())
        return {
            "opened": counts.opened,
            "answers": counts.answers,
            "rewarded": counts.ended[SessionEnd.REWARDED],
            "expired": counts.ended[SessionEnd.EXPIRED],
            "stale": counts.ended[SessionEnd.STALE],
            "dropped": self._dropped,
            **refused,
            "feedback_refused": others,
        }

    @property
    def live(self) -> LiveStatus | None:
        """State of the traffic, for the run's status; counts are since the start of the process."""
        if not self._sessions.url:
            return None
        open_, waiting = self._sessions.open_sessions, len(self._finished)
        return LiveStatus(url=self._sessions.url, open=open_, waiting=waiting, batch=self.batch, counts=self._counts())

    async def close(self) -> None:
        """Refuse new sessions, end the open ones, and wait until they have ended."""
        self._sessions.stop()
        await super().close()
        self._sessions.abandon_all()
        await self._sessions.close()
        self._log.close()


_REFUSED_COUNTS = {
    "feedback_duplicate": "duplicate_feedback",
    "feedback_unknown": "unknown_session",
    "feedback_late": "expired",
}
"""Error codes of refused feedback that are metrics of their own, by the metric's name."""


def first_step_to_read(folder: Path, step: int, max_staleness: int) -> int:
    """Return the first training step whose stored episodes a resumed run may train on.

    A session may be much older than its first answer, from which its staleness counts.

    Args:
        folder: Folder of the run.
        step: Training step of the checkpoint.
        max_staleness: Maximum staleness of a session.
    """
    oldest = first = step - max_staleness
    if (folder / SESSIONS).exists():
        for record in read_json_lines(folder / SESSIONS):
            if record["end"] == SessionEnd.REWARDED and record["version"] - record["staleness"] >= oldest:
                first = min(first, record["opened"] + 1)
    return first


def _read_ends(file: Path) -> dict[str, SessionEnd]:
    """Read how the latest sessions of earlier processes ended."""
    found: dict[str, SessionEnd] = {}
    for record in read_json_lines(file):
        name = record["session"]
        found.pop(name, None)
        found[name] = SessionEnd(record["end"])
        if len(found) > MAX_ENDED:
            del found[next(iter(found))]
    return found
