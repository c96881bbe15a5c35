"""Continuation of episodes that were in flight when their run was killed: their journals are replayed.

The agent loop plays the episode again. The engine's recorded answers take the place of sampling, so the usual code
rebuilds the token ledger, with the same tokens, log-probabilities and weight versions. The environment gets the
recorded snapshot; without one, it takes the recorded actions again. Tools are called again. Everything that they return
is compared with the recorded hash. After the last recorded answer, the policy samples as usual.

If a result differs, a call fails, or the replay takes too long, the episode restarts with the same task and seed
(`agentrl.rollout.journal.CannotContinue`).
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agentrl.engine import GenerateRequest, Generation, PolicyEngine
from agentrl.engine.forwarding import ForwardingEngine
from agentrl.errors import AgentRLError, EnvironmentFailure, InfrastructureError, Outcome, UsageError
from agentrl.message import Content, TextPart, ToolCall
from agentrl.remote.env_methods import (
    ADMISSIBLE_ACTIONS,
    METHODS,
    RESET,
    RESTORE,
    SNAPSHOT,
    STATE_KEY,
    STEP,
    ResetResult,
    StepReply,
)
from agentrl.remote.wire import read_tool_result, to_json, write_tool_result
from agentrl.rollout.env_workers import EnvBackend, ForwardingBackend
from agentrl.rollout.episode import RuntimeEpisode
from agentrl.rollout.journal import CannotContinue, EpisodeJournal, JournalFolder
from agentrl.rollout.journal_file import Record, fingerprint
from agentrl.rollout.runner import Assignment, EpisodeRunner
from agentrl.rollout.tools import CallTool, ToolCallResult
from agentrl.tool import Tool
from agentrl.trajectory import Trajectory

T = TypeVar("T")
MAX_STATE_CHARS = 1 << 16
"""Maximum number of characters of a recorded result or snapshot; larger ones are not recorded, but actions replayed."""
_log = logging.getLogger(__name__)
_CHANGES = frozenset({RESET.name, STEP.name})
_READS = frozenset({ADMISSIBLE_ACTIONS.name, STATE_KEY.name})


class JournaledEngine(ForwardingEngine):
    """Engine whose answers are recorded, and replayed in episodes that are continued.

    Args:
        engine: Engine that samples.
        journals: Journals by the ids of their trajectories; requests of other episodes pass unchanged.
    """

    def __init__(self, engine: PolicyEngine, journals: Mapping[str, EpisodeJournal]) -> None:
        super().__init__(engine)
        self._journals = journals

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the recorded answer, or sample one and record it."""
        journal = self._journals.get(request.session_id.rpartition("/")[0])
        if journal is None:
            return await self._engine.generate(request)
        answer = journal.take_answer(request)
        if answer is None:
            answer = await self._engine.generate(request)
            journal.add_answer(request, answer)
        return answer


@dataclass(slots=True)
class SnapshotSupport:
    """Support of snapshots by the environments of a run; lost with the first failure."""

    is_available: bool = True


class JournaledBackend(ForwardingBackend):
    """Access to an environment whose results are recorded; a recorded episode is restored or replayed first.

    Args:
        backend: Access to the environment.
        journal: Journal of the episode.
        snapshots: Shared by the episodes of an environment.
    """

    def __init__(self, backend: EnvBackend, journal: EpisodeJournal, snapshots: SnapshotSupport) -> None:
        super().__init__(backend)
        self._journal = journal
        self._snapshots = snapshots
        self.own_tools: frozenset[str] = frozenset()
        """Names of the environment's own tools, once it is reset."""
        self._keeps_states = True
        """False if the episode's states are too large, or if it restores snapshots itself."""
        self._state: str | None = None
        """Recorded state after the latest repeated call, while the environment itself is not in this state."""
        self._deadline_s = 0.0

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Call a method of the environment, or return what it returned before the kill."""
        self._journal.check()
        self._deadline_s = deadline_s
        call = functools.partial(self.backend.call, method, *arguments, deadline_s=deadline_s, what=what)
        if method == SNAPSHOT.name and self._state is not None:
            return json.loads(self._state)
        if method == RESTORE.name:
            self._keeps_states = False  # trial actions of the loop have to be replayed
        if method not in _CHANGES and not (method in _READS and self._records_reads):
            return await call()
        key = "" if method == RESET.name else fingerprint([method, *arguments])
        if (record := self._take(method, key)) is not None:
            return await self._repeat(method, record, call)
        self.check_restored()
        result = self._note_tools(await call())
        record = {"kind": "environment", "method": method, "key": key, "changes": method in _CHANGES}
        record["seen"] = fingerprint(_observation(result))
        await self.add_state(record, lambda: METHODS[method].result.write(result))
        if method in _CHANGES or "result" in record:
            self._journal.write(record)
        return result

    def check_restored(self) -> None:
        """Check before a new call that no recorded change is left, after which a snapshot would be restored."""
        recorded = self._journal.recorded
        if recorded is not None and recorded.restores and recorded.changes:
            raise self._journal.fail("the agent loop took a different action")

    def _note_tools(self, result: Any) -> Any:
        if isinstance(result, ResetResult):
            self.own_tools = frozenset(tool.name for tool in result.tools)
        return result

    @property
    def _takes_snapshots(self) -> bool:
        return self._keeps_states and self._snapshots.is_available

    @property
    def _records_reads(self) -> bool:
        recorded = self._journal.recorded
        has_calls = recorded is not None and (recorded.restores or recorded.changes > 0)
        return recorded.restores if recorded is not None and has_calls else self._takes_snapshots

    def _take(self, method: str, key: str) -> Record | None:
        """Return the record of the next call; ``None`` if the environment must be called."""
        recorded = self._journal.recorded
        if recorded is None or not recorded.calls:
            return None
        record = recorded.calls.popleft()
        if (record["method"], record["key"]) != (method, key):
            raise self._journal.fail("the agent loop took a different action")
        return record

    async def _repeat(self, method: str, record: Record, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return the recorded result if the environment will be restored; otherwise repeat the call and compare."""
        recorded = self._journal.recorded
        assert recorded is not None
        result: Any = None
        if not recorded.restores or method == RESET.name:
            failed = "the environment failed during the replay"
            result = self._note_tools(await within_limit(self._journal, call, failed))
        if not recorded.restores:
            if fingerprint(_observation(result)) != record["seen"]:
                raise self._journal.fail("the environment returned a different observation or state")
            return result
        known = METHODS[method].result.read(json.loads(record["result"]))
        if isinstance(known, ResetResult):
            known = replace(known, tools=result.tools)
        if record["changes"]:
            await self.note_change(record, known.state_key)
        return known

    async def note_change(self, record: Record, state_key: str | None = None) -> None:
        """Restore the snapshot after the last recorded change.

        Args:
            record: Record of a change that was not repeated.
            state_key: Key of the state after the change, if it is known.
        """
        recorded = self._journal.recorded
        assert recorded is not None
        recorded.changes -= 1
        self._state = record["snapshot"] if recorded.changes else None
        if recorded.changes or recorded.snapshot is None:
            return
        restore = functools.partial(
            self.backend.call,
            RESTORE.name,
            json.loads(recorded.snapshot),
            deadline_s=self._deadline_s,
            what=f"restoring the environment of {self._journal.id}",
        )
        failed = "their environment could not be restored"
        try:
            key = await within_limit(self._journal, restore, failed)
        except UsageError as error:
            raise self._journal.fail(failed) from error
        if state_key is not None and key != state_key:
            raise self._journal.fail("the restored environment had a different state")

    async def add_state(self, record: Record, write: Callable[[], Any]) -> None:
        """Add a result and the environment's state to a record, if the environment takes snapshots.

        Args:
            record: Record to complete.
            write: Returns the result as JSON types.
        """
        if not self._takes_snapshots:
            return
        try:
            texts = {"result": to_json(write()).decode()}
            if record["changes"]:
                what = f"a snapshot of the environment of {self._journal.id}"
                state = await self.backend.call(SNAPSHOT.name, deadline_s=self._deadline_s, what=what)
                texts["snapshot"] = json.dumps(state)
        except UsageError:  # there is no snapshot()
            self._snapshots.is_available = False
            return
        except (AgentRLError, TypeError, ValueError, RecursionError) as error:
            self._snapshots.is_available = False
            _log.warning("environment snapshots are disabled because one failed: %s", error)
            return
        if sum(map(len, texts.values())) > MAX_STATE_CHARS:
            self._keeps_states = False
            return
        record.update(texts)


async def within_limit(journal: EpisodeJournal, call: Callable[[], Awaitable[T]], failed: str) -> T:
    """Repeat a call of a recorded episode within the time of its replay.

    Raises:
        CannotContinue: the call failed, for the reason `failed`, or the time is over.
    """
    scope = asyncio.timeout(max(0.0, journal.remaining_s))
    try:
        async with scope:
            return await call()
    except InfrastructureError as error:
        if journal.failure is not None:
            raise
        raise journal.fail(failed) from error
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise journal.fail("their replay took too long") from error


def _observation(result: Any) -> Any:
    """Return the part of a result that a replay must reproduce, as JSON types."""
    if isinstance(result, ResetResult):
        tools = [tool.name for tool in result.tools]
        return [_content(result.observation), result.action_hint, tools, result.state_key]
    if isinstance(result, StepReply):
        step = result.result
        return [_content(step.observation), step.reward, step.terminated, step.truncated, result.state_key]
    return result


def _content(content: Content) -> Any:
    if isinstance(content, str):
        return content
    return [part.text if isinstance(part, TextPart) else {"image": part.checksum} for part in content]


class JournaledTools:
    """Calls of an episode's tools, which are recorded; those of a recorded episode are repeated and compared.

    Args:
        call: Calls a tool of the episode.
        journal: Journal of the episode.
        environment: Access to the environment.
    """

    def __init__(self, call: CallTool, journal: EpisodeJournal, environment: JournaledBackend) -> None:
        self._call = call
        self._journal = journal
        self._environment = environment

    async def carry_out(self, call: ToolCall, tools: Mapping[str, Tool]) -> ToolCallResult:
        """Call a tool, or return what it returned before the kill if the environment will be restored."""
        journal, tool = self._journal, tools.get(call.name)
        journal.check()
        key = fingerprint([call.name, dict(call.arguments)])
        is_own = tool is not None and call.name in self._environment.own_tools
        record = self._take(key)
        if record is None:
            if is_own:
                self._environment.check_restored()
            called = await self._call(call, tools)
            record = {"kind": "tool", "key": key, "seen": _seen(called), "changes": is_own}
            if is_own:
                await self._environment.add_state(record, lambda: write_tool_result(called.result))
                record["failed"] = called.failed
            journal.write(record)
            return called
        if is_own and journal.recorded is not None and journal.recorded.restores:
            await self._environment.note_change(record)
            result = read_tool_result(json.loads(record["result"]))
            return ToolCallResult(tool=tool, result=result, failed=record["failed"])
        repeat = functools.partial(self._call, call, tools)
        called = await within_limit(journal, repeat, f"the tool {call.name} failed during the replay")
        if _seen(called) != record["seen"]:
            raise journal.fail(f"the tool {call.name} returned a different result")
        return called

    def _take(self, key: str) -> Record | None:
        """Return the record of a call, in any order of parallel calls; ``None`` without a record."""
        tools = self._journal.recorded.tools if self._journal.recorded is not None else []
        found = next((record for record in tools if record["key"] == key), None)
        if found is not None:
            tools.remove(found)
        return found


def _seen(called: ToolCallResult) -> str:
    result = called.result
    ending = (result.stop, result.truncated, result.success)
    return fingerprint([_content(result.content), result.reward, *ending, called.failed])


class JournaledRunner(EpisodeRunner):
    """Runner that keeps journals of its episodes, and continues those that were in flight when the run was killed.

    Its observer begins and ends the journals (`agentrl.runs.record.JournalingRecorder`).

    Args:
        journals: Journals of the run.
        parts: Arguments of `EpisodeRunner`.
    """

    def __init__(self, *, journals: JournalFolder, **parts: Any) -> None:
        super().__init__(**parts)
        self._journals = journals
        self._snapshots = SnapshotSupport()

    def _first_attempt(self, one: Assignment) -> int:
        return self._journals.claim(one.id)

    async def _run_attempt(self, one: Assignment, attempt: int) -> Trajectory:
        try:
            return await super()._run_attempt(one, attempt)
        except CannotContinue as reason:
            self._journals.note_restarted(str(reason))
            return await super()._run_attempt(one, attempt)

    async def _run_loop(self, episode: RuntimeEpisode) -> Outcome:
        journal = self._journals.active.get(episode.turns.trajectory.id)
        if journal is None:
            return await super()._run_loop(episode)
        if not self.loop.is_deterministic:
            journal.stop(f"the agent loop {type(self.loop).__name__} cannot be replayed")
            return await super()._run_loop(episode)
        journal.start(episode.turns.budget)
        episode.environment = copy.copy(episode.environment)
        episode.environment.backend = backend = JournaledBackend(episode.environment.backend, journal, self._snapshots)
        episode.carry_out = JournaledTools(episode.carry_out, journal, backend).carry_out
        try:
            outcome = await super()._run_loop(episode)
        except EnvironmentFailure:
            journal.check()  # the loop may have failed because of the error
            raise
        journal.check()  # the loop may have caught the error
        return outcome
