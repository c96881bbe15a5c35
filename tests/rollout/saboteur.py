"""An environment that raises anything at any place; a module of its own so that worker processes can import it."""

import asyncio

import gymnasium

import agentrl


class Strange(BaseException):
    """Is not even an `Exception`."""


class Mute(Exception):
    """Has no text."""

    def __str__(self):
        raise SystemExit(0)


FAULTS = {
    "error": ValueError("boom"),
    "exit": SystemExit(0),
    "interrupt": KeyboardInterrupt(),
    "cancelled": asyncio.CancelledError(),
    "closed": GeneratorExit(),
    "stop": StopIteration(),
    "stop_async": StopAsyncIteration(),
    "recursion": RecursionError(),
    "memory": MemoryError(),
    "strange": Strange("odd"),
    "mute": Mute(),
    "timeout": TimeoutError(),
    "task": None,
    "self": None,
}
"""What is raised; ``task``: the cancellation of a task that the code started; ``self``: it cancels its own task."""
ASYNCHRONOUS = ("task", "self")
PLACES = ("reset", "step", "discard", "state_key", "tools", "action_hint")


async def go_wrong(fault):
    """Raise what `fault` says."""
    if fault == "task":
        own = asyncio.create_task(asyncio.sleep(3600))
        own.cancel()
        await own
    if fault == "self":
        asyncio.current_task().cancel()
        await asyncio.sleep(3600)
    raise FAULTS[fault]


class Saboteur(gymnasium.Env):
    """Raises its task's fault at its task's place."""

    observation_space = action_space = gymnasium.spaces.Text(100)
    fault = place = "none"

    def reset(self, *, seed=None, options=None):
        self.fault, self.place = options["fault"], options["place"]
        self._pass("reset")
        return "Hello.", {}

    def step(self, action):
        self._pass("step")
        if self.place == "discard":
            raise ValueError("first this")
        return "Bye.", 1.0, True, False, {}

    def state_key(self):
        self._pass("state_key")
        return "here"

    @property
    def tools(self):
        self._pass("tools")
        return ()

    @property
    def action_hint(self):
        self._pass("action_hint")
        return ""

    def close(self):
        self._pass("discard")

    def _pass(self, place):
        if place == self.place:
            raise FAULTS[self.fault]


class AsyncSaboteur(agentrl.AsyncEnv):
    """The same, in coroutines."""

    fault = place = "none"

    async def reset(self, *, seed=None, options=None):
        self.fault, self.place = options["fault"], options["place"]
        await self._pass("reset")
        return "Hello.", {}

    async def step(self, action):
        await self._pass("step")
        if self.place == "discard":
            raise ValueError("first this")
        return "Bye.", 1.0, True, False, {}

    async def state_key(self):
        await self._pass("state_key")
        return "here"

    async def close(self):
        await self._pass("discard")

    async def _pass(self, place):
        if place == self.place:
            await go_wrong(self.fault)


def unmade(fault):
    """Make nothing."""
    raise FAULTS[fault]
