"""What calls of tools share over all episodes of a run: limits, and the results of pure tools."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from agentrl.tool import Tool, ToolResult

KEPT_RESULTS = 4096
"""Results of one pure tool that are kept, the latest used ones."""
Sleep: TypeAlias = Callable[[float], Awaitable[Any]]


class Gate:
    """Lets calls of one tool through, as its limits allow.

    Args:
        max_concurrent: Most calls inside; ``None`` for any number.
        max_per_second: Calls begin at least ``1 / max_per_second`` seconds after one another.
        clock: Seconds that only grow.
        sleep: Waits for some seconds.
    """

    def __init__(
        self, max_concurrent: int | None, max_per_second: float | None, clock: Callable[[], float], sleep: Sleep
    ) -> None:
        self._places = contextlib.nullcontext() if max_concurrent is None else asyncio.Semaphore(max_concurrent)
        self._interval_s = 0.0 if max_per_second is None else 1 / max_per_second
        self._next = clock()
        self._clock = clock
        self._sleep = sleep

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Wait for the turn of a call; the block is the call."""
        async with self._places:
            if self._interval_s:
                now = self._clock()
                begins = max(now, self._next)
                self._next = begins + self._interval_s
                if begins > now:
                    await self._sleep(begins - now)
            yield


class ToolDesk:
    """One per run; episodes of all environments call through it.

    Args:
        clock: Seconds that only grow.
        sleep: Waits for some seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, sleep: Sleep = asyncio.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._gates: dict[tuple[str, int | None, float | None], Gate] = {}
        self._kept: WeakKeyDictionary[Tool, OrderedDict[str, ToolResult]] = WeakKeyDictionary()

    def gate(self, tool: Tool) -> Gate | None:
        """Where calls of the tool wait; ``None`` for a tool without limits."""
        limits = (tool.rules.max_concurrent, tool.rules.max_per_second)
        if limits == (None, None):
            return None
        key = (tool.name, *limits)
        if key not in self._gates:
            self._gates[key] = Gate(*limits, self._clock, self._sleep)
        return self._gates[key]

    def find(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult | None:
        """What a pure tool said to these arguments before."""
        if not tool.rules.pure:
            return None
        kept = self._kept.get(tool, OrderedDict())
        key = _key(arguments)
        if key in kept:
            kept.move_to_end(key)
        return kept.get(key)

    def keep(self, tool: Tool, arguments: Mapping[str, Any], result: ToolResult) -> None:
        """Remember what a pure tool says; other tools' results are not kept."""
        if not tool.rules.pure:
            return
        kept = self._kept.setdefault(tool, OrderedDict())
        kept[_key(arguments)] = result
        if len(kept) > KEPT_RESULTS:
            kept.popitem(last=False)


def _key(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True, default=repr)
