"""Server-sent events: what has changed, so that open pages ask again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import orjson

MOST_LISTENERS = 100
"""Maximum number of open event streams."""
GATHER_S = 0.2
"""Seconds for which equal events are gathered: an index is built in many small chunks."""
BEAT_S = 15.0
"""Seconds after which a comment is sent, so that a closed connection is noticed."""


class EventHub:
    """Distributor of events to the open pages. `publish` may be called in any thread; the rest in the event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: dict[asyncio.Event, str | None] = {}
        self._waiting: dict[asyncio.Event, dict[tuple[str, str], dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self) -> None:
        """Use the running event loop."""
        self._loop = asyncio.get_running_loop()

    def publish(self, kind: str, source: str, body: dict[str, Any]) -> None:
        """Send an event to the pages that listen to the source, or to all; of equal ones the newest counts."""
        with self._lock:
            loop = self._loop
            if loop is None or self._is_closed:
                return
            woken = [one for one, wanted in self._listeners.items() if wanted is None or source in ("", wanted)]
            for listener in woken:
                self._waiting[listener][kind, source] = body
        for listener in woken:
            try:
                loop.call_soon_threadsafe(listener.set)
            except RuntimeError:  # the loop has closed meanwhile
                return

    async def listen(self, source: str | None) -> AsyncIterator[bytes]:
        """Yield the events of one source or of all, as they are sent, until `close`."""
        listener = asyncio.Event()
        with self._lock:
            if self._is_closed:
                return
            self._listeners[listener], self._waiting[listener] = source, {}
        try:
            yield b": connected\n\n"
            while not self._is_closed:
                try:
                    await asyncio.wait_for(listener.wait(), BEAT_S)
                except TimeoutError:
                    yield b": beat\n\n"
                    continue
                listener.clear()
                with self._lock:
                    events, self._waiting[listener] = self._waiting[listener], {}
                if events:
                    yield b"".join(_encode(kind, key, body) for (kind, key), body in events.items())
                    await asyncio.sleep(GATHER_S)
        finally:
            with self._lock:
                del self._listeners[listener], self._waiting[listener]

    @property
    def is_full(self) -> bool:
        """True if no other page can listen."""
        return len(self._listeners) >= MOST_LISTENERS

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        for listener in list(self._listeners):
            listener.set()


def _encode(kind: str, source: str, body: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"source": source or None, **body}))
