"""Continuation of an episode from one of its turns: earlier turns are repeated, later ones are sampled again.

The agent loop runs from its start. An engine in front of the real one gives the recorded answers in the first turns,
whose prompts must be the recorded ones, token by token:

    agent loop ─► ContinuedPolicy ─► ContinuingEngine ─┬─► recorded turns: recorded answers
                                                       └─► later turns: the real engine

The environment begins with the task and its seed, and takes the recorded actions again. If it has snapshots, and the
first episode was played in this process (`EnvironmentRecord`), it takes no action: a snapshot is restored, and its
recorded results are returned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from agentrl.agent_loop import Conversation
from agentrl.engine import GenerateRequest, Generation, PolicyEngine, StopReason
from agentrl.engine.forwarding import ForwardingEngine
from agentrl.errors import EnvironmentFailure, UsageError
from agentrl.message import Message
from agentrl.remote.env_methods import PARTS, RESET, RESTORE, SNAPSHOT
from agentrl.rollout.env_pool import EnvHandle
from agentrl.rollout.env_workers import EnvBackend, ForwardingBackend
from agentrl.rollout.policies import EngineEpisodePolicy, EpisodePolicy, EpisodeView
from agentrl.rollout.runner import EpisodeRunner, PolicyWrapper
from agentrl.task import Task
from agentrl.tool import Tool
from agentrl.trajectory import SOLE_ROLE, BranchPoint, Source, TokenSequence, Trajectory, Turn

NEIGHBOURS = 12
"""Number of tokens that a message shows before and after the first differing one."""
NOT_RECORDED = frozenset({RESET.name, SNAPSHOT.name, RESTORE.name, PARTS.name})
"""Methods of an environment that are always called, and never recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """One turn of a finished episode."""

    prompt_ids: list[int]
    """Tokens that were sent to the engine."""
    images: tuple[str, ...]
    """Checksums of the images among them."""
    generation: Generation


def repeatable_turns(trajectory: Trajectory) -> int:
    """Return the number of first turns of an episode that can be repeated: those before an aborted one.

    No turn of an episode without sampled tokens can be repeated, as a scripted policy or a text service played it.

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


def recorded_answers(trajectory: Trajectory, turns: int) -> list[RecordedTurn]:
    """Return the first turns of an episode.

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


def _answer(sequence: TokenSequence, turn: Turn) -> RecordedTurn:
    """Return a turn; the tokens of an answer that is not trained were recorded without their numbers."""
    sampled = sequence.sources[turn.start : turn.end] == Source.SAMPLED
    start = turn.start + int(np.argmax(sampled))  # after a prefill
    ids, own = sequence.ids_list(), slice(start, turn.end)
    return RecordedTurn(
        prompt_ids=ids[:start],
        images=tuple(placed.image.checksum for placed in sequence.images if placed.end <= start),
        generation=Generation(
            token_ids=ids[own],
            logprobs=np.nan_to_num(sequence.logprobs[own]).tolist(),
            versions=np.maximum(sequence.versions[own], 0).tolist(),
            stop_reason=StopReason(turn.stop_reason),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentCall:
    """Call of an environment's method, with its result."""

    method: str
    arguments: tuple[Any, ...]
    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of an environment before a turn."""

    calls: int
    """Number of recorded calls before it."""
    state: Any


@dataclass(slots=True)
class EnvironmentRecord:
    """Calls of one episode on its environment, with snapshots before some turns.

    Args:
        wants: Returns True for the turns before which a snapshot is taken.
    """

    wants: Callable[[int], bool]
    calls: list[EnvironmentCall] = field(default_factory=list)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    """Snapshots by the number of turns before them."""
    is_possible: bool | None = None
    """True if the environment has snapshots, and no tools, whose calls are not recorded; ``None`` until known."""

    def clear(self) -> None:
        """Forget an earlier attempt at the episode."""
        self.calls.clear()
        self.snapshots.clear()

    async def add_snapshot(self, environment: EnvHandle, turn: int) -> None:
        """Take a snapshot before `turn` if it is wanted and possible."""
        if not self.wants(turn) or turn in self.snapshots:  # a request that is sent again
            return
        if self.is_possible is None:
            parts = await environment.call(PARTS)
            self.is_possible = {SNAPSHOT.name, RESTORE.name} <= parts and "tools" not in parts
        if self.is_possible:
            self.snapshots[turn] = Snapshot(calls=len(self.calls), state=await environment.call(SNAPSHOT))


class RecordingBackend(ForwardingBackend):
    """Backend that records the calls of an environment."""

    def __init__(self, backend: EnvBackend, record: EnvironmentRecord) -> None:
        super().__init__(backend)
        self._record = record

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Call a method, and record it."""
        result = await self.backend.call(method, *arguments, deadline_s=deadline_s, what=what)
        if method not in NOT_RECORDED and self._record.is_possible is not False:
            self._record.calls.append(EnvironmentCall(method=method, arguments=arguments, result=result))
        return result


class RepeatingBackend(ForwardingBackend):
    """Backend that restores the state after an environment's first calls at once, and returns their recorded results.

    Args:
        backend: Access to the environment, which is reset.
        calls: Calls before the snapshot.
        state: The snapshot.
    """

    def __init__(self, backend: EnvBackend, calls: Sequence[EnvironmentCall], state: Any) -> None:
        super().__init__(backend)
        self._calls, self._state = list(reversed(calls)), state
        self._is_restored = False

    @property
    def calls_left(self) -> int:
        """Number of recorded calls that were not made yet."""
        return len(self._calls)

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Return the recorded result of the next call, or call the method after the last recorded one.

        Raises:
            EnvironmentFailure: the call is another one than the recorded one.
        """
        if not self._is_restored:
            self._is_restored = True
            state = copy.deepcopy(self._state)  # the environment may change what it is given
            await super().call(RESTORE.name, state, deadline_s=deadline_s, what=f"a restored snapshot before {what}")
        if method in NOT_RECORDED or not self._calls:
            return await super().call(method, *arguments, deadline_s=deadline_s, what=what)
        known = self._calls.pop()
        if (known.method, known.arguments) != (method, arguments):
            raise EnvironmentFailure(
                "the agent loop does not repeat its calls of the environment",
                got=f"{method}{arguments!r:.200}",
                expected=f"{known.method}{known.arguments!r:.200}",
                hint="an agent loop must depend on nothing but the episode",
            )
        return known.result


class ContinuingEngine(ForwardingEngine):
    """Engine that gives the recorded answers of an episode's first turns; another one samples the rest.

    Args:
        engine: Samples the turns after the recorded ones.
        answers: Recorded turns.
        parent: Id of the recorded episode, for messages.
        decode: Returns the text of tokens.
        records: Record to which the episode's calls of its environment and the snapshots are added.
        restores: Record of the recorded episode, from which the environment is restored if it has a snapshot.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        answers: Sequence[RecordedTurn],
        *,
        parent: str,
        decode: Callable[[Sequence[int]], str],
        records: EnvironmentRecord | None = None,
        restores: EnvironmentRecord | None = None,
    ) -> None:
        super().__init__(engine)
        self._answers = answers
        self._parent = parent
        self._decode = decode
        self._records = records
        self._restores = restores
        self._repeating: RepeatingBackend | None = None
        self._episode: EpisodeView | None = None

    @property
    def version(self) -> int:
        """Newest version of the weights, or of the recorded tokens."""
        recorded = (max(answer.generation.versions, default=0) for answer in self._answers)
        return max(self._engine.version, *recorded, 0)

    def begin(self, episode: EpisodeView) -> None:
        """Begin the only episode of this engine, before its first turn."""
        if self._episode is not None:
            return
        self._episode, environment = episode, episode.environment
        snapshot = None if self._restores is None else self._restores.snapshots.get(len(self._answers))
        if snapshot is not None and self._restores is not None:
            calls = self._restores.calls[: snapshot.calls]
            nearest = _nearest(environment)  # a journal in front of it records the repeated calls, too
            nearest.backend = self._repeating = RepeatingBackend(nearest.backend, calls, snapshot.state)
        elif self._records is not None:
            self._records.clear()
            environment.backend = RecordingBackend(environment.backend, self._records)

    def end(self, environment: EnvHandle) -> None:
        """End the episode: the environment's calls are no longer recorded or repeated."""
        if self._repeating is not None:
            _nearest(environment, self._repeating).backend = self._repeating.backend
        elif isinstance(environment.backend, RecordingBackend):
            environment.backend = environment.backend.backend

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the recorded answer of a repeated turn, or sample a new one.

        Raises:
            EnvironmentFailure: the prompt of a repeated turn is not the recorded one, or a snapshot cannot be restored.
        """
        assert self._episode is not None
        turn = len(self._episode.turns.trajectory.turns)
        if turn < len(self._answers):
            self._check_prompt(request, turn)
            return self._answers[turn].generation
        if self._repeating is not None and (left := self._repeating.calls_left):
            raise EnvironmentFailure(
                "the agent loop does not repeat its calls of the environment",
                got=f"{left} fewer calls than in {self._parent}",
                expected="the same calls",
                hint="an agent loop must depend on nothing but the episode",
            )
        if self._repeating is None and self._records is not None:
            await self._records.add_snapshot(self._episode.environment, turn)
        return await self._engine.generate(request)

    def _check_prompt(self, request: GenerateRequest, turn: int) -> None:
        """Check that the prompt of a repeated turn is the recorded one.

        Raises:
            EnvironmentFailure: it is not; the message shows the first difference.
        """
        known, ids = self._answers[turn], list(request.prompt_ids)
        images = tuple(placed.image.checksum for placed in request.images)
        if ids == known.prompt_ids and images == known.images:
            return
        got, expected = f"images {images}", f"images {known.images}"
        if ids != known.prompt_ids:
            pairs = zip(ids, known.prompt_ids, strict=False)
            first = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            shown = slice(max(0, first - NEIGHBOURS), first + NEIGHBOURS)
            got, expected = (f"… {self._decode(one[shown])!r} …" for one in (ids, known.prompt_ids))
        raise EnvironmentFailure(
            f"episode {self._parent} cannot be repeated: the prompt after turn {turn} differs from the recorded one",
            got=got,
            expected=expected,
            hint="environment, tools and agent loop must be those of the episode, and deterministic for its seed; "
            "run: agentrl env check NAME",
        )

    async def close(self) -> None:
        """Release nothing: the engine serves other episodes."""
        return


def _nearest(environment: EnvHandle, backend: EnvBackend | None = None) -> EnvHandle | ForwardingBackend:
    """Return what calls `backend`, by default the environment's own backend behind all that forward calls."""
    found: EnvHandle | ForwardingBackend = environment
    while found.backend is not backend and isinstance(found.backend, ForwardingBackend):
        found = found.backend
    return found


class ContinuedPolicy(EngineEpisodePolicy):
    """Policy of one episode, whose first turns are recorded ones.

    Args:
        policy: Policy that samples the other turns.
        continuation: Recorded turns.
    """

    def __init__(self, policy: EngineEpisodePolicy, continuation: Continuation) -> None:
        self._continuing = ContinuingEngine(
            policy.engine,
            continuation.answers,
            parent=continuation.parent_id,
            decode=policy.renderer.encoder.decode,
            records=continuation.records,
            restores=continuation.restores,
        )
        self._branches_from = continuation.branches_from
        super().__init__(self._continuing, policy.renderer, policy.sampling, trains=policy.trains)

    def open(self, episode: EpisodeView, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """Return a conversation on the token ledger."""
        self._continuing.begin(episode)
        episode.turns.trajectory.branches_from = self._branches_from
        return super().open(episode, messages, tools)

    async def end(self, episode: EpisodeView) -> None:
        """End the episode's sessions in the engine."""
        self._continuing.end(episode.environment)
        await super().end(episode)


class Continuation(PolicyWrapper):
    """First turns of episodes, and the environment's record.

    Args:
        parent: Episode whose first turns are repeated; ``None`` to play from the start.
        turns: Number of repeated turns.
        records: Record to which the environment's calls and snapshots are added, for continuations of these episodes.
        restores: Record of the parent's environment, if it was played in this process.
        inner: Another wrapper of the policy, such as few-shot examples.

    Raises:
        UsageError: the parent's turns cannot be repeated.
    """

    def __init__(
        self,
        parent: Trajectory | None,
        turns: int,
        *,
        records: EnvironmentRecord | None = None,
        restores: EnvironmentRecord | None = None,
        inner: PolicyWrapper | None = None,
    ) -> None:
        self.answers: Sequence[RecordedTurn] = () if parent is None else recorded_answers(parent, turns)
        self.parent_id = "" if parent is None else parent.id
        self.branches_from = None if parent is None else BranchPoint(parent=parent.id, turn=turns)
        self.records, self.restores = records, restores
        self._inner = inner

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
    records: EnvironmentRecord | None = None,
    restores: EnvironmentRecord | None = None,
) -> EpisodeRunner:
    """Return a copy of a runner whose episodes begin with the first turns of `parent`; see `Continuation`.

    Raises:
        UsageError: the parent's turns cannot be repeated.
    """
    other = copy.copy(runner)
    other.few_shot = Continuation(parent, turns, records=records, restores=restores, inner=runner.few_shot)
    return other
