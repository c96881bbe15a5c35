"""Pace of episode starts: a thousand starts in one pass of the event loop would keep all other episodes waiting."""

from __future__ import annotations

import asyncio
from collections import deque

STARTS_PER_PASS = 128
"""Maximum number of starts in one pass; each takes some tenths of a millisecond."""


class StartPacer:
    """Pacer that lets a limited number of waiting tasks go on in each pass of the event loop, in order.

    Args:
        per_pass: Maximum number of tasks per pass.
    """

    def __init__(self, per_pass: int = STARTS_PER_PASS) -> None:
        self._per_pass = self._left = per_pass
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def wait(self) -> None:
        """Return at once if few tasks started in this pass, or else in a later one."""
        if self._left and not self._waiting:
            self._left -= 1
            self._schedule()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_pass)

    def _begin_pass(self) -> None:
        self._is_scheduled, self._left = False, self._per_pass
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # not cancelled
                turn.set_result(None)
                self._left -= 1
        if self._left < self._per_pass:
            self._schedule()
