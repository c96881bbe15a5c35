"""Sessions of live traffic that a run learns from: clients talk to the policy, and reward a session when it is over.

    first request of /s/NAME/v1 ──► session NAME, one episode ──► POST /s/NAME/feedback ──► trained if it is not too old
                                                               └► no request and no feedback for a while ──► expired

A session ends once. Its name is not used again, so that feedback cannot reach another conversation.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium

from agentrl.agent_loop import AgentLoop, Episode, EpisodeEnd
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import MAX_REWARD, EnvironmentFailure, Outcome, UsageError
from agentrl.gateway import (
    BadRequest,
    Gateway,
    GatewaySession,
    Unavailable,
    UntrainedRequestRules,
    Verify,
    read_feedback,
)
from agentrl.task import SeedTasks

NAME = re.compile(r"[\w.:@+-]{1,128}")
MAX_ENDED = 100_000
"""Number of ended sessions whose names are remembered."""
MIN_IDLE_S = 1.0
"""Seconds without a request after which a session may end to make room; a request that has just arrived may not have
begun yet."""
STOPPING = "the run is stopping: send the request again later"


class SessionEnd(enum.StrEnum):
    """Reason for the end of a session."""

    REWARDED = "rewarded"
    STALE = "stale"
    """Rewarded, but its answers were sampled by weights that are too old to train on."""
    EXPIRED = "expired"
    """No request and no feedback for too long."""
    FAILED = "failed"
    """Without training data: no trained answer, or a failed episode."""


REFUSED: Mapping[SessionEnd, tuple[int, str, str]] = {
    SessionEnd.REWARDED: (409, "duplicate_feedback", "already has feedback; the first one counts"),
    SessionEnd.STALE: (410, "stale", "was answered by weights that are too old to train on (rollout.max_staleness)"),
    SessionEnd.EXPIRED: (410, "expired", "got no request and no feedback for too long (agent.options.expires_s)"),
    SessionEnd.FAILED: (409, "nothing_to_train", "has no answer that can be trained on"),
}
"""Status, error code and reason of refused feedback, by the session's end."""


class NoEnvironment(gymnasium.Env[str, str]):
    """Environment of live traffic, without tasks of its own: clients bring theirs."""

    observation_space = action_space = gymnasium.spaces.Text(1)
    action_hint = "whatever the client requests"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Return nothing to observe."""
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode; the gateway's sessions take no actions."""
        return "", 0.0, True, False, {}


LIVE = EnvironmentSpec(name="live", make=NoEnvironment, tasks=SeedTasks, isolation=Isolation.INLINE)


@dataclass(frozen=True, slots=True)
class Feedback:
    """Feedback of a client."""

    reward: float
    success: bool | None


@dataclass(slots=True)
class OpenSession:
    """A session that has not ended."""

    ready: asyncio.Future[GatewaySession]
    """The gateway's session, once its episode has begun."""
    feedback: asyncio.Future[Feedback | None]
    """The feedback; ``None`` to let the session expire."""
    ended: asyncio.Future[SessionEnd]
    """Set once the episode is stored."""

    @property
    def idle_s(self) -> float:
        """Seconds without a request; 0 while one is answered, or before the first."""
        return self.ready.result().idle_s if self.ready.done() and not self.ready.exception() else 0.0


@dataclass(slots=True)
class SessionCounts:
    """Counts since the start of the process."""

    answers: int = 0
    opened: int = 0
    ended: Counter[SessionEnd] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Refused feedback by error code."""


class LiveSessions(AgentLoop):
    """Clients of a gateway open the episodes and reward them with ``POST ADDRESS/s/NAME/feedback``.

    Args:
        host: Address to listen on; one that other machines can reach requires a key.
        port: Port; 0 takes a free one.
        key_variable: Environment variable that holds the key that clients must send.
        feedback_key_variable: Environment variable that holds the key for feedback, if it differs from the clients'
            key: anyone who can send rewards decides what the policy learns.
        expires_s: Seconds without a request or feedback after which a session ends without a reward.
        side_models: Model names of requests that are not trained, such as those for titles.
        side_markers: Texts in a system message that mark such requests.
        forms: As in the loop ``external``: ``enforce`` refuses JSON schemas and forced calls in trained answers;
            ``free`` does not constrain the answers.
    """

    follow_ups = ("user", "tool")
    opens_with_task = False
    is_deterministic = False

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key_variable: str | None = None,
        feedback_key_variable: str | None = None,
        expires_s: float = 3600.0,
        side_models: Sequence[str] = (),
        side_markers: Sequence[str] = (),
        forms: Literal["enforce", "free"] = "enforce",
    ) -> None:
        if isinstance(expires_s, bool) or not isinstance(expires_s, int | float) or not expires_s > 0:
            raise UsageError("agent.options.expires_s is too small", got=expires_s, expected="more than 0 seconds")
        if forms not in ("enforce", "free"):
            raise UsageError("unknown agent.options.forms", got=forms, expected="enforce or free")
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise UsageError("agent.options.port is not a port number", got=port, expected="0 to 65535")
        self._host, self._port = host, port
        self._key_variable, self._feedback_key_variable = key_variable, feedback_key_variable
        self._expires_s = expires_s
        self._side_calls = UntrainedRequestRules.of(side_models, side_markers)
        self._holds_forms = forms == "enforce"
        self._warned: set[str] = set()
        self._gateway: Gateway | None = None
        self._begin: Callable[[str], None] | None = None
        self._open: dict[str, OpenSession] = {}
        self._ended: dict[str, SessionEnd] = {}
        self._max_open = 0
        self._is_stopping = False
        self.counts = SessionCounts()

    @property
    def url(self) -> str:
        """Address of the gateway; empty before it listens."""
        return "" if self._gateway is None else self._gateway.url

    @property
    def open_sessions(self) -> int:
        """Number of sessions that have not ended."""
        return len(self._open)

    def check_keys(self) -> None:
        """Check the address and the keys.

        Raises:
            UsageError: a variable is not set, or the address is not this machine's and no key is required.
        """
        key, _ = self._keys()
        if key is None and not _is_local(self._host):
            raise UsageError(
                "anyone who can reach this address could use and train the model",
                got=f"agent.options.host={self._host} without a key",
                expected="agent.options.key_variable, the name of an environment variable that holds a key",
            )

    def _keys(self) -> tuple[str | None, str | None]:
        found = []
        for option in ("key_variable", "feedback_key_variable"):
            variable = getattr(self, f"_{option}")
            if variable is not None and not os.environ.get(variable):
                raise UsageError(f"the environment variable {variable} is not set", expected=f"a key ({option})")
            found.append(None if variable is None else os.environ[variable])
        return found[0], found[1]

    async def start(self, begin: Callable[[str], None], *, max_open: int, ended: Mapping[str, SessionEnd]) -> None:
        """Start to listen.

        Args:
            begin: Starts the episode of a session; its task has the session's name as its id.
            max_open: Maximum number of open sessions; the one that was idle for longest makes room for a new one.
            ended: Sessions that ended before this process started.

        Raises:
            UsageError: the port is taken, or a key is missing.
        """
        self.check_keys()
        key, feedback_key = self._keys()
        self._begin, self._max_open, self._ended = begin, max_open, dict(ended)
        gateway = Gateway(
            host=self._host,
            port=self._port,
            key=key,
            opener=self._session_of,
            feedback=self._take_feedback,
            feedback_key=feedback_key,
        )
        try:
            await gateway.start()
        except UsageError as error:
            raise UsageError(error.what, got=error.got, hint="choose another agent.options.port or host") from error
        self._gateway = gateway

    def stop(self) -> None:
        """Open no more sessions; requests get an error after which clients retry."""
        self._is_stopping = True

    async def close(self) -> None:
        """Stop listening."""
        self.stop()
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await gateway.close()

    async def run(self, episode: Episode) -> None:
        """Keep a session open until it is rewarded or expires."""
        name = episode.task.id
        found = self._open.get(name)
        if found is None or found.ready.done():
            raise EnvironmentFailure("an episode of live traffic cannot be replayed", got=f"session {name}")
        await episode.reset()
        session = GatewaySession(
            episode, side_calls=self._side_calls, steps=False, holds_forms=self._holds_forms, warned=self._warned
        )
        found.ready.set_result(session)
        try:
            feedback = await self._wait_for_feedback(found, session)
        finally:
            await session.close()
            self.counts.answers += session.answers
        if feedback is None:
            episode.keep_log("no feedback")
            raise EpisodeEnd(Outcome.CANCELLED)
        episode.give_reward(feedback.reward, success=feedback.success)
        if session.outcome is not None:
            raise EpisodeEnd(session.outcome)

    async def _wait_for_feedback(self, found: OpenSession, session: GatewaySession) -> Feedback | None:
        while (left := self._expires_s - session.idle_s) > 0:
            done, _ = await asyncio.wait({found.feedback}, timeout=left)
            if done:
                return found.feedback.result()
        return None

    def finish(self, name: str, end: SessionEnd) -> None:
        """Note that a session has ended and is stored."""
        found = self._open.pop(name)
        self._remember(name, end)
        self.counts.ended[end] += 1
        if not found.ready.done():
            found.ready.set_exception(Unavailable("the session could not be opened"))
            found.ready.exception()  # mark it as retrieved if no request waits
        found.ended.set_result(end)

    def _remember(self, name: str, end: SessionEnd) -> None:
        self._ended[name] = end
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    async def _session_of(self, name: str | None, verify: Verify) -> list[GatewaySession]:
        """Find or open the session of a request, which `verify` checks before.

        Raises:
            BadRequest: the path has no valid name, the session has ended, or a malformed request would open one.
            Unavailable: the run is stopping, or there are too many sessions.
        """
        if name is None:
            raise BadRequest(
                "this gateway learns from sessions: use ADDRESS/s/NAME/v1 as the base address (Anthropic: "
                "ADDRESS/s/NAME), with a new NAME for each session",
                status=404,
                code="no_session",
            )
        _check_name(name)
        if name not in self._open and name not in self._ended:
            await verify()
        if (end := self._ended.get(name)) is not None:
            raise BadRequest(
                f"session {name} has ended ({end}): use a new name for each session", status=403, code="session_ended"
            )
        if name not in self._open:
            self._open_session(name)
        return [await asyncio.shield(self._open[name].ready)]

    def _open_session(self, name: str) -> None:
        if self._is_stopping or self._begin is None:
            raise Unavailable(STOPPING)
        if len(self._open) >= self._max_open:
            self._expire_one()
            if len([one for one in self._open.values() if not one.feedback.done()]) >= self._max_open:
                raise Unavailable(
                    f"{len(self._open)} sessions are open, the maximum (rollout.max_concurrent): try again later"
                )
        loop = asyncio.get_running_loop()
        self._open[name] = OpenSession(loop.create_future(), loop.create_future(), loop.create_future())
        self.counts.opened += 1
        self._begin(name)

    def _expire_one(self) -> None:
        """End the session that has been idle for longest, to make room."""
        idle = [one for one in self._open.values() if not one.feedback.done() and one.idle_s >= MIN_IDLE_S]
        if idle:
            max(idle, key=lambda one: one.idle_s).feedback.set_result(None)

    async def _take_feedback(self, name: str, body: Mapping[str, Any], is_retry: bool) -> Mapping[str, Any]:
        """Reward a session; return once its episode is stored.

        Raises:
            BadRequest: the feedback is malformed, or the session is unknown, has ended, or is not over.
            Unavailable: the run is stopping.
        """
        try:
            return await self._reward(name, body, is_retry)
        except BadRequest as error:
            self.counts.refused[error.code] += 1
            raise

    async def _reward(self, name: str, body: Mapping[str, Any], is_retry: bool) -> Mapping[str, Any]:
        _check_name(name)
        reward, success = read_feedback(body, MAX_REWARD)
        accepted = {"session": name, "status": "accepted"}
        found = self._open.get(name)
        if found is None:
            end = self._ended.get(name)
            if end is None:
                raise BadRequest(f"no session {name}: it never had a request", status=404, code="unknown_session")
            if end is SessionEnd.REWARDED and is_retry:
                return accepted  # the answer to the first attempt was lost
            raise _refusal(name, end)
        session = await asyncio.shield(found.ready)
        if self._is_stopping:
            raise Unavailable(STOPPING)
        if not found.feedback.done():
            if session.is_answering:
                raise BadRequest(
                    f"a request of session {name} is still being answered: send the feedback later",
                    status=409,
                    code="busy",
                )
            if not session.answers:
                raise BadRequest(f"session {name} has no answers", status=409, code="no_answers")
            found.feedback.set_result(Feedback(reward, success))
        elif not is_retry:
            raise _refusal(name, SessionEnd.REWARDED if found.feedback.result() else SessionEnd.EXPIRED)
        stopped = await _first_done(found.ended)
        if stopped is None:
            raise Unavailable(STOPPING)
        if stopped is not SessionEnd.REWARDED:
            raise _refusal(name, stopped)
        return accepted

    def abandon_all(self) -> None:
        """Answer waiting requests and feedback of sessions that the end of the run has cut off."""
        for found in self._open.values():
            if not found.ready.done():
                found.ready.set_exception(Unavailable(STOPPING))
                found.ready.exception()  # mark it as retrieved if no request waits
            found.ended.cancel()
        self._open.clear()


async def _first_done(ended: asyncio.Future[SessionEnd]) -> SessionEnd | None:
    """Wait until a session ends; return ``None`` if the run ends first."""
    await asyncio.wait({ended})
    return None if ended.cancelled() else ended.result()


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise BadRequest(
            "the session's name is not valid: expected 1 to 128 letters, digits and . _ : @ + -", code="invalid_session"
        )


def _refusal(name: str, end: SessionEnd) -> BadRequest:
    status, code, reason = REFUSED[end]
    return BadRequest(f"session {name} {reason}", status=status, code=code)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
