"""Journals of the episodes in flight, from which a killed run continues them (see `agentrl.rollout.journal_replay`)."""

from __future__ import annotations

import functools
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentrl.engine import GenerateRequest, Generation, StopReason
from agentrl.errors import AgentRLError, Outcome
from agentrl.models.routed_experts import routed_experts_from_record, routed_experts_record
from agentrl.rollout.budget import Budget
from agentrl.rollout.finished_episodes import group_position
from agentrl.rollout.journal_file import JournalWriter, Record, RecordedEpisode, file_name, read_journal, stop_record
from agentrl.trajectory import Trajectory, id_array

REPLAY_S = 60.0
"""Seconds that a replay may take beyond the episode's age at the kill."""
OTHER_REQUEST = "the agent loop made a different request"
_PLAIN = ("token_ids", "logprobs", "versions", "cached_tokens", "queue_s", "prefill_s", "decode_s", "resubmissions")


class CannotContinue(AgentRLError):
    """The reason why an episode cannot be continued; it starts again with the same task and seed."""


class EpisodeJournal:
    """Journal of one episode, which first replays records and then appends new ones.

    Args:
        trajectory_id: Id of the trajectory.
        recorded: Records to replay.
        append: Stores a new record.
        clock: Clock of the episodes.
        on_continued: Called with the number of replayed turns once they have been replayed.
    """

    def __init__(
        self,
        trajectory_id: str,
        recorded: RecordedEpisode | None,
        *,
        append: Callable[[Record], None],
        clock: Callable[[], float] = time.monotonic,
        on_continued: Callable[[int], None] = lambda turns: None,
    ) -> None:
        self.id = trajectory_id
        self.recorded = recorded
        """Records that the replay has not consumed; ``None`` once the episode has continued."""
        self.failure: AgentRLError | None = None
        self.added_s = 0.0
        """Seconds that the episode had taken before the kill, less those of its replay."""
        self._append, self._clock, self._on_continued = append, clock, on_continued
        self._budget: Budget | None = None
        self._earlier_s = 0.0 if recorded is None else recorded.seconds
        self._began = clock()
        self.turns = 0
        """Number of replayed turns."""
        self._is_stopped = False
        self._prompts: dict[str, tuple[int, Any]] = {}
        """Length and running hash of the latest prompt of each session."""

    def start(self, budget: Budget) -> None:
        """Start the clock of the episode, once it has its environment.

        Args:
            budget: Budget of the episode, which does not count the seconds of a replay, but those before the kill.
        """
        self._budget, self._began = budget, self._clock()

    @property
    def age_s(self) -> float:
        """Seconds of the episode, or of its replay until that has ended."""
        return self._clock() - self._began

    @property
    def remaining_s(self) -> float:
        """Seconds left for the replay."""
        return self._earlier_s + REPLAY_S - self.age_s

    def fail(self, reason: str) -> AgentRLError:
        """Record that the episode cannot be replayed, and return the error to raise."""
        self.failure = CannotContinue(reason)
        return self.failure

    def stop(self, reason: str) -> None:
        """Record that the episode cannot be continued from here on; nothing more is recorded."""
        self.write(stop_record(reason))
        self.close()

    def close(self) -> None:
        """Write no more records."""
        self._is_stopped = True

    def write(self, record: Record) -> None:
        """Write a record of something new; the replay is over.

        Raises:
            CannotContinue: recorded answers are left.
        """
        if self.recorded is not None and self.recorded.answers:
            raise self.fail(OTHER_REQUEST)
        self.end_replay()
        if not self._is_stopped and self.failure is None:
            record["at"] = round(self.age_s, 3)
            self._append(record)

    def end_replay(self) -> None:
        """Count the episode as continued, if it was replayed so far."""
        if self.recorded is not None and self.failure is None:
            self.recorded = None
            self.added_s = self._earlier_s - self.age_s
            self._began -= self.added_s
            if self._budget is not None:
                self._budget.add_elapsed(self.added_s)
            self._on_continued(self.turns)

    def take_answer(self, request: GenerateRequest) -> Generation | None:
        """Return the recorded answer to a request; ``None`` if the engine must answer.

        Raises:
            CannotContinue: another request was recorded.
        """
        self.check()
        if self.recorded is None or not self.recorded.answers:
            return None
        self.check_request(self.recorded.answers[0], request)
        self.turns += 1
        return _generation(self.recorded.answers.popleft())

    def check_request(self, record: Record, request: GenerateRequest) -> None:
        """Check that a recorded answer was given to this request.

        Raises:
            CannotContinue: another request was recorded.
        """
        size, digest = self._hash_prompt(request)
        if record["key"] != digest.hexdigest():
            raise self.fail(OTHER_REQUEST)
        self._prompts[request.session_id] = size, digest

    def add_answer(self, request: GenerateRequest, answer: Generation) -> None:
        """Record an answer of the engine."""
        if request.adapter is not None:
            self.stop("named adapters sampled their turns")
            return
        size, digest = self._hash_prompt(request)
        self._prompts[request.session_id] = size, digest
        self.write({**answer_record(answer), "key": digest.hexdigest()})

    def check(self) -> None:
        """Check that the episode can still be continued, in case its loop caught the error."""
        if self.failure is not None:
            raise self.failure

    def _hash_prompt(self, request: GenerateRequest) -> tuple[int, Any]:
        """Return the length and the hash of a prompt; of a known session, only new tokens are read."""
        ids = request.prompt_ids
        size, digest = self._prompts.get(request.session_id, (0, None))
        if digest is None or size > len(ids):
            size, digest = 0, hashlib.blake2b(digest_size=16)
        else:
            digest = digest.copy()
        digest.update(id_array(ids[size:]).tobytes())
        return len(ids), digest


def answer_record(answer: Generation) -> Record:
    """Return the record of an answer, without the key of its prompt."""
    plain = {name: getattr(answer, name) for name in _PLAIN}
    routes = answer.routed_experts
    more = {} if routes is None else {"routed_experts": routed_experts_record(0, routes)}
    return {"kind": "answer", "stop_reason": answer.stop_reason.value, **plain, **more}


def _generation(record: Mapping[str, Any]) -> Generation:
    routes = record.get("routed_experts")
    return Generation(
        **{name: record[name] for name in _PLAIN},
        stop_reason=StopReason(record["stop_reason"]),
        routed_experts=None if routes is None else routed_experts_from_record(routes),
    )


class JournalFolder:
    """Journals of a run's episodes in flight, by the ids of their trajectories.

    Args:
        path: The run's ``inflight``.
        clock: Clock of the episodes.
        say: Shows the user how many episodes were continued, and why others started again.
    """

    def __init__(self, path: Path, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        self.clock = clock
        self.writer = JournalWriter(path)
        self.active: dict[str, EpisodeJournal] = {}
        """Journals of the episodes that are being played."""
        self._path = path
        self._say = say
        self._recorded: dict[str, RecordedEpisode] = {}
        self._claimed: dict[str, RecordedEpisode] = {}
        self._unsettled = 0
        """Number of recorded episodes that have neither continued nor started again."""
        self._continued = self._turns = 0
        self._restarted: Counter[str] = Counter()
        self._reported = (0, 0, 0)
        self._is_reported = False

    def read(self, version: int) -> None:
        """Read the journals of a killed run.

        Args:
            version: Version of the checkpoint's weights.
        """
        for path in sorted(self._path.glob("*.jsonl")):
            found = read_journal(path, version=version)
            if found is not None and found.id:
                known = self._recorded.setdefault(found.player, found)
                if known.attempt < found.attempt:
                    self._recorded[found.player] = found
            elif found is not None:
                self._restarted[str(found.problem)] += 1
        needed = {file_name(found.id) for found in self._recorded.values()}
        for path in self._path.glob("*.jsonl"):
            if path.name not in needed:
                path.unlink()
        self._unsettled = len(self._recorded)

    def keep_groups_from(self, position: int, others: Iterable[str]) -> None:
        """Remove the journals of groups before `position`, except those of the groups `others`."""
        kept = set(others)
        for player, found in list(self._recorded.items()):
            if found.group_id not in kept and group_position(found.group_id) < position:
                self.forget(player)

    def forget(self, player: str) -> None:
        """Remove the journal of an episode that has ended."""
        found = self._recorded.pop(player, None)
        if found is not None:
            self.writer.remove(file_name(found.id))
            self._settle()

    def claim(self, player: str) -> int:
        """Return the number of an episode's first attempt: that of the attempt in flight at the kill."""
        found = self._recorded.pop(player, None)
        if found is None:
            return 0
        if found.problem is None:
            self._claimed[found.id] = found
        else:
            self.note_restarted(found.problem)
        return found.attempt

    def begin(self, trajectory_id: str) -> None:
        """Begin the journal of an episode, or continue one that was claimed."""
        recorded = self._claimed.pop(trajectory_id, None)
        if recorded is None:
            self.writer.begin(file_name(trajectory_id), {"kind": "start", "id": trajectory_id})
        self.active[trajectory_id] = EpisodeJournal(
            trajectory_id,
            recorded,
            append=functools.partial(self.writer.append, file_name(trajectory_id)),
            clock=self.clock,
            on_continued=self.note_continued,
        )

    def end_replay(self, trajectory: Trajectory) -> None:
        """Add the seconds before a kill to an episode that has ended, and count it as continued."""
        journal = self.active.get(trajectory.id)
        if journal is not None and trajectory.outcome is not Outcome.CANCELLED:
            journal.end_replay()
            trajectory.metrics["seconds"] = trajectory.metrics.get("seconds", 0.0) + journal.added_s

    def end(self, trajectory: Trajectory) -> None:
        """End the journal of an episode that is stored, and remove it unless the episode was cancelled."""
        journal = self.active.pop(trajectory.id, None)
        if journal is not None:
            journal.close()
        if trajectory.outcome is Outcome.CANCELLED:
            return
        self.writer.remove(file_name(trajectory.id))
        self.forget(trajectory.id.rpartition(".")[0])

    def note_continued(self, turns: int) -> None:
        """Count an episode that continues after a replay of `turns` turns."""
        self._continued += 1
        self._turns += turns
        self._settle()

    def note_restarted(self, reason: str) -> None:
        """Count an episode that starts again."""
        self._restarted[reason] += 1
        self._settle()

    def metrics(self) -> dict[str, float]:
        """Return the counts since the last call."""
        now = (self._continued, self._restarted.total(), self._turns)
        names = ("recovery/episodes_continued", "recovery/episodes_restarted", "recovery/turns_replayed")
        before, self._reported = self._reported, now
        return {name: float(count - last) for name, count, last in zip(names, now, before, strict=True)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is queued; journals of cancelled episodes are kept for a resumed run."""
        self._report()
        self.writer.close()

    def _settle(self) -> None:
        self._unsettled -= 1
        if self._unsettled == 0:
            self._report()

    def _report(self) -> None:
        """Report once how many recorded episodes continued or restarted, and why."""
        if self._is_reported:
            return
        self._is_reported = True
        parts = []
        if self._continued:
            parts.append(f"continued {self._continued} episodes in flight after their last turn ({self._turns} turns)")
        if self._restarted:
            reasons = "; ".join(f"{count} because {reason}" for reason, count in self._restarted.most_common())
            parts.append(f"restarted {self._restarted.total()} episodes in flight: {reasons}")
        if self._unsettled > 0:
            parts.append(f"did not reach {self._unsettled} episodes that were in flight")
        if parts:
            self._say("; ".join(parts))
