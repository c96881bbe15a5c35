"""Keeps what a tool raises from stopping more than its call: the program, the event loop, or the episode's task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from agentrl.errors import is_addressed_to, running_task

T = TypeVar("T")
GRACE_S = 1.0
"""Seconds that a call which is cancelled has to end; then it is left behind."""


class ToolFault(Exception):
    """A tool raised what means something to Python or to the event loop.

    Args:
        cause: What it raised.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


@contextmanager
def contained() -> Iterator[None]:
    """Run a tool in the event loop. A cancellation of the task that runs it passes, and so does Ctrl-C.

    Raises:
        ToolFault: the tool raised what would stop more than its call, such as ``SystemExit``.
    """
    task = running_task()
    try:
        yield
    except StopIteration as error:
        raise ToolFault(error) from error
    except Exception:
        raise
    except BaseException as error:
        if is_addressed_to(task, error):
            raise
        raise ToolFault(error) from error


def contained_in_thread(call: Callable[[], T]) -> T:
    """What a call gives, made in a thread of its own, where nobody is cancelled and no Ctrl-C arrives.

    Raises:
        ToolFault: see above; or the tool raised what only the main thread should hear.
    """
    try:
        return call()
    except StopIteration as error:
        raise ToolFault(error) from error
    except Exception:
        raise
    except BaseException as error:
        raise ToolFault(error) from error


async def ended_in_time(work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. When this task is cancelled, the work is too, and what it says then counts no more."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_look_at)
        await asyncio.wait({task}, timeout=GRACE_S)
        raise
    return task.result()


def _look_at(task: asyncio.Task[Any]) -> None:
    """An exception that nobody looks at would be logged."""
    if not task.cancelled():
        task.exception()
