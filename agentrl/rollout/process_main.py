"""The program of a worker process: reads calls from standard input, writes replies to what was standard output.

Whatever environments print goes to standard error. The process ends at once when its parent does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import sys
import threading
from queue import SimpleQueue
from typing import Any, BinaryIO

from agentrl.errors import AgentRLError, EnvironmentFailure, described_error
from agentrl.remote.tool import RemoteTool
from agentrl.rollout.process_worker import HEADER, LARGEST_REPLY, RemoteCall
from agentrl.rollout.resident import ResetResult, Resident


def main() -> None:
    """Serve calls until standard input ends."""
    calls, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # environments that read or print must not meet the pipes
    os.dup2(2, 1)
    sys.path[:] = pickle.load(calls)
    inbox: SimpleQueue[RemoteCall] = SimpleQueue()
    threading.Thread(target=_read, args=(calls, inbox), daemon=True).start()
    residents: dict[int, Resident] = {}
    loop = asyncio.new_event_loop()
    while True:
        _reply(replies, loop.run_until_complete(_serve(residents, inbox.get())))


def _read(calls: BinaryIO, inbox: SimpleQueue[RemoteCall]) -> None:
    while True:
        try:
            inbox.put(pickle.load(calls))
        except EOFError:
            os._exit(0)
        except BaseException as error:
            inbox.put(RemoteCall(-1, "unreadable", (described_error(error),)))


async def _serve(residents: dict[int, Resident], call: RemoteCall) -> tuple[bool, Any]:
    try:
        return True, await _perform(residents, call)
    except AgentRLError as error:
        return False, (type(error), str(error))
    except BaseException as error:  # nobody cancels or interrupts this process: it is the environment's own
        return False, (EnvironmentFailure, described_error(error))


async def _perform(residents: dict[int, Resident], call: RemoteCall) -> Any:
    if call.method == "make":
        residents[call.resident] = Resident(*call.arguments)
        return None
    if call.method == "unreadable":
        raise EnvironmentFailure(f"the worker cannot read the call ({call.arguments[0]})")
    result = await getattr(residents[call.resident], call.method)(*call.arguments)
    if call.method == "close":
        del residents[call.resident]
    if isinstance(result, ResetResult):
        return dataclasses.replace(result, tools=tuple(RemoteTool.describe(tool) for tool in result.tools))
    return result


def _reply(replies: BinaryIO, reply: tuple[bool, Any]) -> None:
    try:
        message = pickle.dumps(reply)
    except BaseException as error:
        text = f"what it returned cannot be sent to the runtime: {described_error(error)}"
        message = pickle.dumps((False, (EnvironmentFailure, text)))
    if len(message) > LARGEST_REPLY:
        text = f"what it returned has {len(message):,} bytes, expected at most {LARGEST_REPLY:,}"
        message = pickle.dumps((False, (EnvironmentFailure, text)))
    replies.write(HEADER.pack(len(message)) + message)
    replies.flush()


if __name__ == "__main__":
    main()
