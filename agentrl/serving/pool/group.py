"""Group of a pool's servers for weight sync, and the monitor that checks servers and recovers lost ones.

    SERVING ── a connection broke ──► SUSPECT ── it answers the check ──► SERVING
       │                                 │ it does not
       └── no answer, stale, refuses ────┴──► LOST ── recovered, with verified current weights ──► SERVING
           weights                              └── several failed attempts in a row, or ──► REMOVED
                                                    no answer for `lost_timeout_s`

There is one monitor task per server. A lost server serves again only after it has the current weights. Changes of
weights and members run one at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

from agentrl.engine import Capabilities, InferenceServer
from agentrl.errors import AgentRLError, EngineError, ServersLost, TrainingError, UsageError
from agentrl.errors.deadlines import async_boundary
from agentrl.serving.pool.member import Member, MemberState, PoolSettings, end, first_of

BUSY_LOOP_S = 0.1
"""Delay of the event loop from which a missed deadline is attributed to the loop, and the check is repeated."""
MAX_CHECKS = 3
LOST_REPORT_S = 30.0
"""Seconds between messages about a lost server."""

_log = logging.getLogger(__name__)


Restart: TypeAlias = Callable[[int], Awaitable[InferenceServer]]
"""Function that kills a launched server, by its index, and returns a new, connected one; or raises `EngineError`."""
Action: TypeAlias = Callable[[InferenceServer], Awaitable[object]]
Deliver: TypeAlias = Callable[[Mapping[str, Any] | None, int], Awaitable[object]]
CLEANING_S = 15.0
"""Seconds that an abandoned call may take to clean up before its server is recovered."""
WAIT_REPORT_S = 10.0
"""Interval in seconds between two messages about a wait."""


class ServerMonitor:
    """Monitor that checks the servers of a group and recovers lost ones."""

    def __init__(self, group: PoolGroup, restart: Restart | None) -> None:
        self._group = group
        self._settings = group.settings
        self._restart = restart
        self.bring_up_to_date: Action | None = None
        """Function that sends a server the current weights and verifies them."""
        self.changes_running = 0
        """Number of running weight changes. Meanwhile servers may be too busy to answer; the change has a deadline."""

    async def run(self, member: Member) -> None:
        """Check a member and recover it when it is lost, until it is removed."""
        while member.state is not MemberState.REMOVED:
            await self._watch(member)
            await self._bring_back(member)

    def lose(self, member: Member, why: object) -> None:
        """Mark a server as lost, and move its requests to other servers."""
        if member.state.is_active:
            waits = "" if self._restart else f" (waiting up to {self._settings.lost_timeout_s:g} s for its return)"
            self._group.say(f"server {member.server.url} is lost: {why}{waits}")
            member.lose(str(why))
            self._group.notify_change()

    def suspect(self, member: Member) -> None:
        """Mark a server whose connection broke as suspect: it is checked at once and gets no requests until then."""
        if member.state is MemberState.SERVING:
            member.state = MemberState.SUSPECT
            member.wake.set()
            self._group.notify_change()

    async def _watch(self, member: Member) -> None:
        while member.state.is_active:
            await self._check(member)
            self._group.notify_change()
            if member.state.is_active:
                await self._sleep(member, self._settings.check_every_s)

    async def _sleep(self, member: Member, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await member.wake.wait()
        except TimeoutError:
            pass
        member.wake.clear()

    async def _check(self, member: Member) -> None:
        fault = await self._find_fault(member.server)
        if self.changes_running or not member.state.is_active:
            return
        if fault is not None:
            self.lose(member, fault)
            return
        try:
            async with async_boundary(EngineError, "reading its load", deadline_s=self._settings.health_timeout_s):
                if member.state is MemberState.SUSPECT:
                    await self._clear_suspicion(member)
                reading = await member.server.load()
        except AgentRLError as error:
            _log.info("the load of server %s cannot be read: %s", member.server.url, error)
            return
        if member.state.is_active and not self._group.is_paused:  # requests held by a pause look like a queue
            member.reading = reading
            member.concurrency.read(reading, in_flight=member.in_flight)

    async def _clear_suspicion(self, member: Member) -> None:
        """Return a suspect server that answers to service, unless it is a new process with other weights."""
        version = await member.server.weight_version()
        if self._group.changing.locked() or member.state is not MemberState.SUSPECT:
            return
        if version == self._group.version:
            member.state = MemberState.SERVING
        else:
            self.lose(member, f"it serves weights of version {version} instead of {self._group.version}")

    async def _find_fault(self, server: InferenceServer) -> str | None:
        """Return why a server cannot serve; ``None`` if it reports in time that it is healthy."""
        deadline_s, clock = self._settings.health_timeout_s, asyncio.get_running_loop().time
        for _ in range(MAX_CHECKS):
            began = clock()
            try:
                async with async_boundary(EngineError, "a health check", deadline_s=deadline_s + BUSY_LOOP_S / 2):
                    if await server.is_healthy(deadline_s=deadline_s):
                        return None
            except EngineError as error:
                _log.info("server %s did not answer a health check: %s", server.url, error)
            except AgentRLError as error:
                return str(error)
            seconds = clock() - began
            if seconds < deadline_s:
                return "its health route cannot be reached, or reports a failure"
            if seconds < deadline_s + BUSY_LOOP_S:
                break
        return f"its health route did not answer within {deadline_s:g} s"

    async def _bring_back(self, member: Member) -> None:
        """Retry until the server serves again or is removed."""
        wait_s, clock = self._settings.retry_s, asyncio.get_running_loop().time
        began = reported = clock()
        while member.state is MemberState.LOST:
            lost_s, most_s = clock() - began, self._settings.lost_timeout_s
            if member.attempts >= self._settings.attempts:
                self._give_up(member, f"{member.attempts} attempts to recover it")
                return
            if self._restart is None and lost_s >= most_s:
                self._give_up(member, f"{lost_s:.0f} s without an answer (engine.lost_timeout_s)")
                return
            if self._restart is None and clock() - reported >= LOST_REPORT_S:
                reported = clock()
                why = f"retrying until {most_s:g} s: {member.why}"
                self._group.say(f"server {member.server.url} has not answered for {lost_s:.0f} s; {why}")
            try:
                if await self._attempt(member):
                    return
            except TrainingError as error:
                self._group.fail(error)
                self._give_up(member, "a failed recovery")
                return
            except AgentRLError as error:
                self._group.say(f"server {member.server.url} could not be recovered: {error}")
                wait_s = min(2 * wait_s, self._settings.max_retry_s)
            await asyncio.sleep(wait_s)

    def _give_up(self, member: Member, after: str) -> None:
        self._group.say(f"server {member.server.url} is removed after {after}")
        member.state = MemberState.REMOVED
        self._group.notify_change()

    async def _attempt(self, member: Member) -> bool:
        server = member.server
        if self._restart is None:
            if await self._find_fault(server) is not None:
                return False
            member.attempts += 1
        else:
            member.attempts += 1
            server = await self._restart_server(self._restart, member)
        async with self._group.changing:
            await self._prepare(server)
            member.join(server)
        self._group.say(f"server {server.url} serves again with weights of version {self._group.version}")
        self._group.notify_change()
        return True

    async def _restart_server(self, restart: Restart, member: Member) -> InferenceServer:
        with suppress(EngineError):  # the server is lost already
            async with async_boundary(EngineError, "closing it", deadline_s=self._settings.control_timeout_s):
                await member.server.close()
        what = f"the restart of server {member.server.url}"
        async with async_boundary(EngineError, what, deadline_s=self._settings.connect_timeout_s):
            server = await restart(member.index)
        member.server = server
        return server

    async def _prepare(self, server: InferenceServer) -> None:
        """Send a server the current weights and verify them; then pause or resume it like the pool."""
        if self.bring_up_to_date is not None:
            await self.bring_up_to_date(server)  # has its own deadlines
        what = f"the recovery of server {server.url}"
        async with async_boundary(EngineError, what, deadline_s=self._settings.control_timeout_s):
            if self.bring_up_to_date is None and (version := await server.weight_version()) != self._group.version:
                raise EngineError(
                    f"{server.url} has weights of another version", got=version, expected=self._group.version
                )
            await (server.pause() if self._group.is_paused else server.resume())


class PoolGroup:
    """Servers of a pool, which all have the same weights; an `agentrl.weights.contract.ServerGroup`.

    Args:
        servers: At least one; connected by `start`, closed by `close`.
        settings: Deadlines and limits.
        restart: Restarts a launched server; without it, the pool waits for lost servers to return.
        version: Initial weight version of the servers.
        on_change: Called when a server joins or leaves, or its request limit changes.
        on_failure: Called with the error when no request can be served any more.
        say: Called with messages for the user: losses, recoveries, long waits.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        settings: PoolSettings,
        *,
        restart: Restart | None,
        version: int,
        on_change: Callable[[], None],
        on_failure: Callable[[AgentRLError], None],
        say: Callable[[str], None],
    ) -> None:
        if not servers:
            raise UsageError("a pool needs servers", got="none", expected="at least one")
        self.settings = settings
        self.changing = asyncio.Lock()
        self.version = version
        self.is_paused = False
        self.members: list[Member] = []
        self._initial = list(servers)
        self._on_change = on_change
        self._on_failure = on_failure
        self.say = say
        self._failure: AgentRLError | None = None
        self._changed = asyncio.Event()
        self._deliver: Deliver | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.monitor = ServerMonitor(self, restart)

    @property
    def servers(self) -> list[InferenceServer]:
        """Servers that are serving or suspect."""
        if not self.members:
            return self._initial
        return [member.server for member in self.members if member.state.is_active]

    async def start(self) -> Capabilities:
        """Connect to all servers, start their monitors, and return their common capabilities."""
        await asyncio.gather(*map(self._connect, self._initial))
        capabilities = common_capabilities([server.capabilities for server in self._initial])
        self.members = [
            Member.of(index, server, self.settings, time.monotonic) for index, server in enumerate(self._initial)
        ]
        self._tasks = [
            asyncio.create_task(self.monitor.run(member), name=f"monitor of {member.server.url}")
            for member in self.members
        ]
        return capabilities

    async def _connect(self, server: InferenceServer) -> None:
        deadline_s = self.settings.connect_timeout_s
        async with self._saying(f"waiting for {server.url}", deadline_s):
            await server.connect(deadline_s=deadline_s)

    @asynccontextmanager
    async def _saying(self, what: str, deadline_s: float) -> AsyncIterator[None]:
        """Report periodically that the block is still waiting."""

        async def say() -> None:
            waited_s = 0.0
            while True:
                await asyncio.sleep(WAIT_REPORT_S)
                waited_s += WAIT_REPORT_S
                self.say(f"{what}: {waited_s:.0f} s of at most {deadline_s:.0f} s")

        saying = asyncio.create_task(say(), name=what)
        try:
            yield
        finally:
            saying.cancel()

    def notify_change(self) -> None:
        """Announce a change; the group fails if all servers are removed."""
        self._changed.set()
        self._on_change()
        if self.members and all(member.state is MemberState.REMOVED for member in self.members):
            whys = "; ".join(f"{member.server.url}: {member.why}" for member in self.members)
            hint = "start the servers again, then repeat the command, or resume the run: agentrl train --resume RUN"
            self.fail(ServersLost("no server is left", got=whys, hint=hint))

    def fail(self, error: AgentRLError) -> None:
        """Stop serving with an error; later errors are ignored."""
        if self._failure is None:
            self._failure = error
            self._changed.set()
            self._on_failure(error)

    async def pause(self) -> None:
        """Pause every server; servers that fail to do so are marked as lost."""
        self.is_paused = True
        await self.each(lambda server: server.pause(), what="pause", deadline_s=self.settings.control_timeout_s)

    async def resume(self) -> None:
        """Resume every server; servers that fail to do so are marked as lost."""
        await self.each(lambda server: server.resume(), what="resume", deadline_s=self.settings.control_timeout_s)
        self.is_paused = False
        self.notify_change()

    async def change(self, action: Action, *, what: str, deadline_s: float) -> None:
        """Run `each`, ignoring failed health checks: the action may keep servers too busy to answer them."""
        self.monitor.changes_running += 1
        try:
            await self.each(action, what=what, deadline_s=deadline_s)
        finally:
            self.monitor.changes_running -= 1

    async def each(self, action: Action, *, what: str, deadline_s: float) -> None:
        """Run an action on all servers at once; those that fail or miss the deadline are marked as lost.

        A `TrainingError` or `UsageError` is raised instead, as every server would raise it.
        """
        members = [member for member in self.members if member.state.is_active]
        calls = (self._on(member, action, what, deadline_s) for member in members)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def _on(self, member: Member, action: Action, what: str, deadline_s: float) -> None:
        call = asyncio.ensure_future(action(member.server))
        try:
            async with async_boundary(EngineError, f"{what} of {member.server.url}", deadline_s=deadline_s):
                await first_of(call, member.gone)
                if call.done():
                    call.result()
        except (TrainingError, UsageError):
            raise
        except AgentRLError as error:
            self.monitor.lose(member, error)
        finally:
            await end(call, within_s=CLEANING_S)

    def remove(self, server: InferenceServer, why: object) -> None:
        """Mark a server as lost, so that it serves again only with verified current weights."""
        for member in self.members:
            if member.server is server:
                self.monitor.lose(member, why)

    def publish(self, version: int) -> None:
        """Record the weight version of all servers."""
        self.version = version

    def connect_sync(self, *, deliver: Deliver, bring_up_to_date: Action) -> None:
        """Register the functions that send weights to all servers and to a recovered one."""
        self._deliver = deliver
        self.monitor.bring_up_to_date = bring_up_to_date

    async def deliver(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Send weights to all servers through weight sync; raises `EngineError` if none is connected."""
        if self._deliver is None:
            raise EngineError("weights reach servers through weight sync", got="a pool without one")
        await self._deliver(weights, version)

    async def wait_for_server(self, *, deadline_s: float) -> None:
        """Wait until a server is available; raises `EngineError` at the deadline, `ServersLost` if all are removed."""
        what = "no server is available; waiting for one to return"
        async with (
            async_boundary(EngineError, "the return of a server", deadline_s=deadline_s),
            self._saying(what, deadline_s),
        ):
            while not self.servers:
                if self._failure is not None:
                    raise self._failure
                self._changed.clear()
                await self._changed.wait()

    async def stop(self) -> None:
        """Stop all monitors and mark all servers as lost."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self.members:
            member.lose("closed")

    async def close(self) -> None:
        """Close the connections to the servers."""
        servers = [member.server for member in self.members] or self._initial
        await asyncio.gather(*(server.close() for server in servers), return_exceptions=True)


def common_capabilities(found: Sequence[Capabilities]) -> Capabilities:
    """Return the capabilities that all servers share; raises `UsageError` if their vocabularies differ."""
    sizes = {capabilities.vocab_size for capabilities in found}
    if len(sizes) > 1:
        raise UsageError("the servers serve different models", got=f"vocabularies of {sorted(sizes)} tokens")
    return Capabilities(
        max_context=min(capabilities.max_context for capabilities in found),
        vocab_size=sizes.pop(),
        logprobs=all(capabilities.logprobs for capabilities in found),
        seeded=all(capabilities.seeded for capabilities in found),
        routed_experts=all(capabilities.routed_experts for capabilities in found),
        structures=all(capabilities.structures for capabilities in found),
        first_tokens=all(capabilities.first_tokens for capabilities in found),
        images=all(capabilities.images for capabilities in found),
    )
