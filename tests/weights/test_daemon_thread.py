import asyncio
import threading

import pytest

from agentrl.errors.foreign import DaemonThreads
from agentrl.weights.collective import in_thread


async def test_work_in_a_thread_hands_over_its_result_and_its_error():
    assert await in_thread(lambda: 3) == 3
    assert await in_thread(lambda: threading.current_thread().daemon), "the process may end before it"
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_work_that_was_given_up_before_its_thread_ran_is_not_done(monkeypatch):
    monkeypatch.setattr("agentrl.weights.collective._THREADS", DaemonThreads("test", limit=1))
    release, done = threading.Event(), []
    first = asyncio.create_task(in_thread(release.wait))
    await asyncio.sleep(0)
    late = asyncio.create_task(in_thread(lambda: done.append("late")))
    await asyncio.sleep(0)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    release.set()
    assert await first
    assert await in_thread(lambda: done.append("next")) is None
    assert done == ["next"]
