"""Continuation of an episode from one of its turns: earlier turns are repeated, later ones are sampled again.

The agent loop runs from its start. As after a kill (`agentrl.rollout.journal_replay`), a journal gives the recorded
answers in the first turns, whose prompts must be the recorded ones, token by token; this journal is in memory:

    agent loop ─► ContinuedPolicy ─► JournaledEngine ─┬─► recorded turns: recorded answers
                                                      └─► later turns: the real engine

The environment begins with the task and its seed, and takes the recorded actions again. If it has snapshots, and the
first episode was played in this process (`EpisodeRecords`), it takes no action: the snapshot after the last one is
restored, and the recorded results are returned.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from agentrl.agent_loop import Conversation
from agentrl.engine import GenerateRequest, Generation, PolicyEngine, StopReason
from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.message import Message
from agentrl.remote.env_methods import RESET
from agentrl.rollout.env_pool import EnvHandle
from agentrl.rollout.env_workers import ForwardingBackend
from agentrl.rollout.journal import EpisodeJournal, answer_record
from agentrl.rollout.journal_file import Record, RecordedEpisode
from agentrl.rollout.journal_replay import JournaledBackend, JournaledEngine, SnapshotSupport
from agentrl.rollout.policies import EngineEpisodePolicy, EpisodePolicy, EpisodeView
from agentrl.rollout.runner import EpisodeRunner, PolicyWrapper
from agentrl.task import Task
from agentrl.tool import Tool
from agentrl.trajectory import SOLE_ROLE, BranchPoint, Source, TokenSequence, Trajectory, Turn

NEIGHBOURS = 12
"""Number of tokens that a message shows before and after the first differing one."""
REPEAT_S = 86_400.0
"""Seconds for the repeated turns of a continuation; the calls in them have deadlines of their own."""


def repeatable_turns(trajectory: Trajectory) -> int:
    """Return the number of first turns of an episode that can be repeated: those before an aborted one.

    Episodes without sampled tokens have none: they were played by a scripted policy or a chat service.

    Raises:
        UsageError: the episode has several roles.
    """
    if any(turn.role != SOLE_ROLE for turn in trajectory.turns):
        raise UsageError(
            f"episode {trajectory.id} has several roles, which may answer in a different order when it is repeated",
            got=", ".join(dict.fromkeys(turn.role for turn in trajectory.turns)),
            expected="an episode of one agent",
        )
    if not trajectory.sampled_tokens:
        return 0
    return sum(1 for _ in takewhile(lambda turn: turn.stop_reason != StopReason.ABORT, trajectory.turns))


def recorded_answers(trajectory: Trajectory, turns: int) -> list[Record]:
    """Return the answers of the first turns of an episode, as a journal records them, but with their prompts.

    Raises:
        UsageError: the episode has several roles, or one of these turns cannot be repeated.
    """
    possible = repeatable_turns(trajectory)
    if turns > possible:
        raise UsageError(
            f"episode {trajectory.id} cannot be continued from turn {turns}",
            got=f"{len(trajectory.turns)} turns"
            + ("" if possible == len(trajectory.turns) else f", of which the first {possible} can be repeated"),
            expected=f"a turn from 0 to {possible}",
        )
    return [_answer(sequence, turn) for sequence, turn in _turns_in_order(trajectory)[:turns]]


def _turns_in_order(trajectory: Trajectory) -> list[tuple[TokenSequence, Turn]]:
    found = [(sequence, turn) for sequence in trajectory.sequences for turn in sequence.turns]
    return sorted(found, key=lambda pair: pair[1].index)


def _answer(sequence: TokenSequence, turn: Turn) -> Record:
    """Return the record of a turn; an untrained answer was stored without log-probabilities and versions."""
    sampled = sequence.sources[turn.start : turn.end] == Source.SAMPLED
    start = turn.start + int(np.argmax(sampled))  # after a prefill
    ids, own = sequence.ids_list(), slice(start, turn.end)
    generation = Generation(
        token_ids=ids[own],
        logprobs=np.nan_to_num(sequence.logprobs[own]).tolist(),
        versions=np.maximum(sequence.versions[own], 0).tolist(),
        stop_reason=StopReason(turn.stop_reason),
    )
    images = tuple(placed.image.checksum for placed in sequence.images if placed.end <= start)
    return {**answer_record(generation), "prompt_ids": ids[:start], "images": images}


@dataclass(slots=True)
class EpisodeRecords:
    """Records in memory of the latest attempt at an episode, from which others continue it."""

    snapshots: SnapshotSupport = field(default_factory=SnapshotSupport)
    """Shared by the episodes of an environment."""
    records: list[Record] = field(default_factory=list)

    def calls_before(self, turn: int) -> deque[Record]:
        """Return the calls of the environment before a turn, which has been played, after the first reset."""
        answers, found = 0, deque[Record]()
        for number, record in enumerate(self.records):
            answers += record["kind"] == "answer"
            if answers > turn:
                break
            if record["kind"] == "environment":
                found.append({**record, "number": number})
        return found


class ContinuedJournal(EpisodeJournal):
    """Journal in memory of an episode that begins with the first turns of another one.

    Args:
        trajectory_id: Id of the trajectory.
        continuation: Recorded turns.
        decode: Returns the text of tokens.
    """

    def __init__(self, trajectory_id: str, continuation: Continuation, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__(trajectory_id, continuation.recorded_episode(), append=self._keep)
        self._parent, self._decode = continuation.parent_id, decode
        self._kept = continuation.records
        if self._kept is not None:
            self._kept.records.clear()  # of an earlier attempt

    def _keep(self, record: Record) -> None:
        if self._kept is not None:
            self._kept.records.append(record)

    @property
    def remaining_s(self) -> float:
        """Seconds left for the repeated turns."""
        return REPEAT_S

    def fail(self, reason: str, *, got: str = "", expected: str = "") -> EnvironmentFailure:
        """Note that the turns cannot be repeated, and return the error."""
        self.failure = EnvironmentFailure(
            f"episode {self._parent} cannot be repeated: {reason}",
            got=got,
            expected=expected,
            hint="environment, tools and agent loop must be those of the episode, and deterministic for its seed, "
            "which agentrl env check tests",
        )
        return self.failure

    def write(self, record: Record) -> None:
        """Keep a record; in repeated turns, those are calls of an environment that is not restored."""
        if self.recorded is None or not self.recorded.answers:
            self.end_replay()
        self._keep(record)

    def take_answer(self, request: GenerateRequest) -> Generation | None:
        """Return the recorded answer to a request, and keep it; ``None`` if the engine must answer.

        Raises:
            EnvironmentFailure: the prompt is not the recorded one; the message shows the first difference.
        """
        answers = self.recorded.answers if self.recorded is not None else ()
        record = answers[0] if answers else None
        answer = super().take_answer(request)
        if record is not None:
            self._keep(record)
        return answer

    def check_request(self, record: Record, request: GenerateRequest) -> None:
        """Check that the prompt of a repeated turn is the recorded one.

        Raises:
            EnvironmentFailure: it is not.
        """
        known, ids = record["prompt_ids"], list(request.prompt_ids)
        images = tuple(placed.image.checksum for placed in request.images)
        if ids == known and images == record["images"]:
            return
        got, expected = f"images {images}", f"images {record['images']}"
        if ids != known:
            pairs = zip(ids, known, strict=False)
            first = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            shown = slice(max(0, first - NEIGHBOURS), first + NEIGHBOURS)
            got, expected = (f"… {self._decode(one[shown])!r} …" for one in (ids, known))
        raise self.fail(f"the prompt after turn {self.turns} differs from the recorded one", got=got, expected=expected)


class ContinuedEngine(JournaledEngine):
    """Engine of a policy whose episode has a journal in memory."""

    def __init__(self, engine: PolicyEngine, answers: Sequence[Record]) -> None:
        self.journals: dict[str, EpisodeJournal] = {}
        super().__init__(engine, self.journals)
        self._recorded_version = max((version for answer in answers for version in answer["versions"]), default=0)

    @property
    def version(self) -> int:
        """Newest version of the weights, or of the recorded tokens."""
        return max(self._engine.version, self._recorded_version)

    async def close(self) -> None:
        """Release nothing: the engine serves other episodes."""
        return


def _nearest(environment: EnvHandle) -> EnvHandle | ForwardingBackend:
    """Return the innermost forwarding backend, which calls the environment's own backend."""
    found: EnvHandle | ForwardingBackend = environment
    while isinstance(found.backend, ForwardingBackend):
        found = found.backend
    return found


class ContinuedPolicy(EngineEpisodePolicy):
    """Policy of one episode, whose first turns are recorded ones.

    Args:
        policy: Policy that samples the other turns.
        continuation: Recorded turns.
    """

    def __init__(self, policy: EngineEpisodePolicy, continuation: Continuation) -> None:
        self._continued = ContinuedEngine(policy.engine, continuation.answers)
        self._continuation = continuation
        self._changed: EnvHandle | ForwardingBackend | None = None
        """Backend that calls the environment through the journal."""
        super().__init__(self._continued, policy.renderer, policy.sampling, trains=policy.trains)

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Return a conversation on the token ledger."""
        trajectory = episode.turns.trajectory
        if trajectory.id not in self._continued.journals:
            self._begin(episode)
        trajectory.branches_from = self._continuation.branches_from
        return super().open(episode, messages, tools)

    def _begin(self, episode: EpisodeView) -> None:
        """Begin the journal of the episode, whose environment is reset."""
        trajectory_id, continuation = episode.turns.trajectory.id, self._continuation
        journal = ContinuedJournal(trajectory_id, continuation, self.renderer.encoder.decode)
        self._continued.journals[trajectory_id] = journal
        snapshots = SnapshotSupport(is_available=False)  # no other episode continues from a continuation
        if journal.recorded is not None and journal.recorded.restores:
            self._changed = _nearest(episode.environment)  # the run's own journal, further out, records repeated calls
        elif continuation.records is not None and not episode.has_own_tools:  # whose calls it does not record
            self._changed, snapshots = episode.environment, continuation.records.snapshots
        if self._changed is not None:
            self._changed.backend = JournaledBackend(self._changed.backend, journal, snapshots)

    async def end(self, episode: EpisodeView) -> None:
        """End the episode's sessions in the engine."""
        if self._changed is not None and isinstance(self._changed.backend, JournaledBackend):
            self._changed.backend = self._changed.backend.backend
        await super().end(episode)


class Continuation(PolicyWrapper):
    """First turns of episodes, and the environment's records.

    Args:
        parent: Episode whose first turns are repeated; ``None`` to play from the start.
        turns: Number of repeated turns.
        records: Records to which those of the episode are added, for its continuations.
        restores: Records of the parent, if it was played in this process.
        inner: Another wrapper of the policy, such as few-shot examples.

    Raises:
        UsageError: the parent's turns cannot be repeated.
    """

    def __init__(
        self,
        parent: Trajectory | None,
        turns: int,
        *,
        records: EpisodeRecords | None,
        restores: EpisodeRecords | None,
        inner: PolicyWrapper | None,
    ) -> None:
        self.answers: Sequence[Record] = () if parent is None else recorded_answers(parent, turns)
        self.parent_id = "" if parent is None else parent.id
        self.branches_from = None if parent is None else BranchPoint(parent=parent.id, turn=turns)
        self.records, self._restores = records, restores
        self._inner = inner

    def recorded_episode(self) -> RecordedEpisode | None:
        """Return the records that an attempt replays, with calls of the environment only if it can be restored."""
        if self.branches_from is None:
            return None
        calls = deque[Record]() if self._restores is None else self._restores.calls_before(self.branches_from.turn)
        found = RecordedEpisode(id=self.parent_id, answers=deque(self.answers), calls=calls)
        found.choose_recovery()
        if found.restores and not any(record["method"] == RESET.name for record in calls):
            return found
        return RecordedEpisode(id=self.parent_id, answers=deque(self.answers))

    async def wrap(self, runner: EpisodeRunner, task: Task) -> EpisodePolicy:
        """Return the policy of one attempt at an episode."""
        assert isinstance(runner.policy, EngineEpisodePolicy)
        policy = ContinuedPolicy(runner.policy, self)
        if self._inner is None:
            return policy
        other = copy.copy(runner)
        other.policy = policy
        return await self._inner.wrap(other, task)


def continue_from(
    runner: EpisodeRunner,
    parent: Trajectory | None,
    turns: int,
    *,
    records: EpisodeRecords | None = None,
    restores: EpisodeRecords | None = None,
) -> EpisodeRunner:
    """Return a copy of a runner whose episodes begin with the first turns of `parent`; see `Continuation`.

    Raises:
        UsageError: the parent's turns cannot be repeated.
    """
    other = copy.copy(runner)
    other.policy_wrapper = Continuation(parent, turns, records=records, restores=restores, inner=runner.policy_wrapper)
    return other
