"""What comes out of a container: its standard output and its standard error in frames of one stream."""

from __future__ import annotations

import asyncio
import struct

_HEAD = struct.Struct(">BxxxI")
_OUTPUT = 1
_MOST_WORDS = 4000


class Frames:
    """Standard output, as if it came alone; the beginning of standard error is kept.

    Args:
        stream: From the daemon: frames of a byte that tells the stream (1 is output, 2 errors), three zeros, four bytes
            of size, and the content.
    """

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._output = bytearray()
        self._words = bytearray()

    @property
    def words(self) -> str:
        """What was written to standard error."""
        return self._words.decode(errors="replace").strip()

    async def readexactly(self, size: int) -> bytes:
        """The next bytes of standard output.

        Raises:
            asyncio.IncompleteReadError: it ended before.
        """
        while len(self._output) < size:
            kind, length = _HEAD.unpack(await self._stream.readexactly(_HEAD.size))
            content = await self._stream.readexactly(length)
            if kind == _OUTPUT:
                self._output += content
            else:
                self._words += content[: max(_MOST_WORDS - len(self._words), 0)]
        wanted = bytes(self._output[:size])
        del self._output[:size]
        return wanted
