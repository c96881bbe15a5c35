import asyncio
import threading
from types import SimpleNamespace

import pytest

from agentrl.weights.collective import in_thread


async def test_work_in_a_thread_hands_over_its_result_and_its_error():
    assert await in_thread(lambda: 3) == 3
    assert await in_thread(lambda: threading.current_thread().daemon), "the process may end before it"
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_work_that_was_given_up_before_its_thread_ran_is_not_done(monkeypatch):
    targets, done = [], []

    def late_thread(target, **_):
        return SimpleNamespace(start=lambda: targets.append(target))

    monkeypatch.setattr("agentrl.weights.collective.threading", SimpleNamespace(Thread=late_thread))
    work = asyncio.create_task(in_thread(lambda: done.append(1)))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    targets[0]()
    assert done == []
