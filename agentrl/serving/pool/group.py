"""The servers of a pool as weight sync sees them: who takes part, which version they have, and one change at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from agentrl.engine import Capabilities, InferenceServer
from agentrl.errors import AgentRLError, EngineError, TrainingError, UsageError, async_boundary
from agentrl.serving.pool.keeper import Keeper, Restart
from agentrl.serving.pool.member import Member, MemberState, PoolSettings, end, first_of

CLEANING_S = 15.0
"""For how long a call that is given up may clean up after itself before the server is brought back."""

SAID_EVERY_S = 10.0
"""Between two words about a wait that goes on."""

Action: TypeAlias = Callable[[InferenceServer], Awaitable[object]]
Deliver: TypeAlias = Callable[[Mapping[str, Any] | None, int], Awaitable[object]]


class PoolGroup:
    """Keeps servers, and their weights, together.

    Args:
        servers: At least one; connected by `start`, closed by `close`.
        settings: Deadlines and counts.
        restart: Starts a launched server again; without it, lost servers are waited for.
        version: Version of the weights that the servers start with.
        on_change: Told when a server comes, goes, or takes more or fewer requests.
        on_failure: Told when nothing can be served any more, and why.
        say: Told what a person should know: losses, returns, long waits.

    Attributes:
        changing: Held while weights change, and while a server comes back.
        version: Of the weights that every server that takes part samples with.
        is_paused: Whether requests are held.
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
        self._say = say
        self._failure: AgentRLError | None = None
        self._changed = asyncio.Event()
        self._deliver: Deliver | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.keeper = Keeper(
            settings=settings,
            restart=restart,
            changing=self.changing,
            version=lambda: self.version,
            is_paused=lambda: self.is_paused,
            on_change=self.changed,
            on_failure=self.fail,
            say=say,
        )

    @property
    def servers(self) -> list[InferenceServer]:
        """The servers that take part now."""
        if not self.members:
            return self._initial
        return [member.server for member in self.members if member.state.is_in]

    async def start(self) -> Capabilities:
        """Connect to all servers and begin to watch them; what they can do.

        Raises:
            UsageError: servers of different models, or one that cannot work.
            EngineError: one does not answer.
        """
        await asyncio.gather(*map(self._connect, self._initial))
        capabilities = common_capabilities([server.capabilities for server in self._initial])
        self.members = [
            Member.of(index, server, self.settings, time.monotonic) for index, server in enumerate(self._initial)
        ]
        self._tasks = [
            asyncio.create_task(self.keeper.tend(member), name=f"keeper of {member.server.url}")
            for member in self.members
        ]
        return capabilities

    async def _connect(self, server: InferenceServer) -> None:
        deadline_s = self.settings.connect_timeout_s
        async with self._saying(f"waiting for {server.url}", deadline_s):
            await server.connect(deadline_s=deadline_s)

    @asynccontextmanager
    async def _saying(self, what: str, deadline_s: float) -> AsyncIterator[None]:
        """Say now and then that the block still waits, and for how long it will."""

        async def say() -> None:
            waited_s = 0.0
            while True:
                await asyncio.sleep(SAID_EVERY_S)
                waited_s += SAID_EVERY_S
                self._say(f"{what}: {waited_s:.0f} s of at most {deadline_s:.0f} s")

        saying = asyncio.create_task(say(), name=what)
        try:
            yield
        finally:
            saying.cancel()

    def changed(self) -> None:
        """Tell everybody that something changed; the end, when no server is left."""
        self._changed.set()
        self._on_change()
        if self.members and all(member.state is MemberState.REMOVED for member in self.members):
            whys = "; ".join(f"{member.server.url}: {member.why}" for member in self.members)
            self.fail(EngineError("no server is left", got=whys))

    def fail(self, error: AgentRLError) -> None:
        """Stop serving with an error; the first one counts."""
        if self._failure is None:
            self._failure = error
            self._changed.set()
            self._on_failure(error)

    async def pause(self) -> None:
        """Hold all requests, on every server; one that cannot is taken out."""
        self.is_paused = True
        await self.each(_pause, what="pause", deadline_s=self.settings.control_timeout_s)

    async def resume(self) -> None:
        """Go on, on every server; one that cannot is taken out."""
        await self.each(_resume, what="resume", deadline_s=self.settings.control_timeout_s)
        self.is_paused = False
        self.changed()

    async def change(self, action: Action, *, what: str, deadline_s: float) -> None:
        """`each`, for what keeps a server too busy to answer: only this deadline watches it meanwhile."""
        self.keeper.changes_running += 1
        try:
            await self.each(action, what=what, deadline_s=deadline_s)
        finally:
            self.keeper.changes_running -= 1

    async def each(self, action: Action, *, what: str, deadline_s: float) -> None:
        """Do something on every server at once; those that fail or miss the deadline are taken out.

        Raises:
            TrainingError: raised by the action.
            UsageError: raised by the action; another server would not take it either.
        """
        members = [member for member in self.members if member.state.is_in]
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
            self.keeper.lose(member, error)
        finally:
            await end(call, within_s=CLEANING_S)

    def remove(self, server: InferenceServer, why: object) -> None:
        """Take a server out; it comes back when it has been given the current weights and they are verified."""
        for member in self.members:
            if member.server is server:
                self.keeper.lose(member, why)

    def publish(self, version: int) -> None:
        """All servers that take part have these weights now."""
        self.version = version

    def connect_sync(self, *, deliver: Deliver, bring_up_to_date: Action) -> None:
        """Weight sync says how weights reach all servers, and one that comes back."""
        self._deliver = deliver
        self.keeper.bring_up_to_date = bring_up_to_date

    async def deliver(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Let weight sync bring weights to all servers.

        Raises:
            EngineError: there is no weight sync.
        """
        if self._deliver is None:
            raise EngineError("weights reach servers through weight sync", got="a pool without one")
        await self._deliver(weights, version)

    async def wait_for_server(self, *, deadline_s: float) -> None:
        """Wait until a server takes part.

        Raises:
            EngineError: none does within the deadline, or ever will.
        """
        what = "no server is there; waiting for one to come back"
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
        """Stop watching; all servers are as good as lost."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self.members:
            member.lose("closed")

    async def close(self) -> None:
        """Let go of the servers."""
        servers = [member.server for member in self.members] or self._initial
        await asyncio.gather(*(server.close() for server in servers), return_exceptions=True)


async def _pause(server: InferenceServer) -> None:
    await server.pause()


async def _resume(server: InferenceServer) -> None:
    await server.resume()


def common_capabilities(found: Sequence[Capabilities]) -> Capabilities:
    """Return the capabilities that all servers have.

    Raises:
        UsageError: they serve different vocabularies.
    """
    sizes = {capabilities.vocab_size for capabilities in found}
    if len(sizes) > 1:
        raise UsageError("the servers serve different models", got=f"vocabularies of {sorted(sizes)} tokens")
    return Capabilities(
        max_context=min(capabilities.max_context for capabilities in found),
        vocab_size=sizes.pop(),
        logprobs=all(capabilities.logprobs for capabilities in found),
        seeded=all(capabilities.seeded for capabilities in found),
        routed_experts=all(capabilities.routed_experts for capabilities in found),
    )
