"""Servers that accept connections and never answer, and the tasks of a run, which are fetched without blocking it."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from served_worlds import STAIRS
from support import SLACK

from agentrl.env.lookup import resolve_environment
from agentrl.errors import EnvironmentFailure, Outcome, UsageError
from agentrl.remote import client
from agentrl.remote.link import Link, RequestTimeout
from agentrl.rollout.events import RolloutCounters
from agentrl.rollout.scheduler import GroupScheduler
from agentrl.rollout.task_order import FETCHED_AHEAD, TaskSampler
from agentrl.rollout.waits import WaitTracker
from agentrl.trajectory import Trajectory


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of a socket that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield "http://127.0.0.1:{1}".format(*listening.getsockname())


def test_a_silent_server_is_named_with_the_question_and_the_seconds(mute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_ANSWER_S", 0.1)
    with pytest.raises(UsageError) as failed:
        resolve_environment(mute)
    assert str(failed.value) == (
        f"no environment server answers at {mute}: got no answer to GET /health in 0.1 s; 1 tries in 0.1 s. It accepts "
        "connections but does not answer: restart it, or check the address"
    )


async def test_unanswered_request_is_retried_until_the_timeout(mute: str) -> None:
    link = Link(mute)
    with pytest.raises(RequestTimeout, match=rf"{mute} is silent: got no answer to GET /x in 0.05 s; [2-9] tries"):
        await link.ask("GET", "/x", patience_s=0.2, answer_s=0.05)
    await link.close()


def test_ctrl_c_ends_a_program_that_waits_for_a_silent_server() -> None:
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a script may ignore it
    program += "from agentrl.remote import client; client.FIRST_ANSWER_S = 3600; "
    program += "client.remote_spec(sys.argv[1])"
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(100)
        words = [sys.executable, "-c", program, "http://127.0.0.1:{1}".format(*listening.getsockname())]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as waiting:
            connection, _ = listening.accept()
            with connection:
                assert connection.recv(1024).startswith(b"GET /health"), "now it waits for the answer"
                waiting.send_signal(signal.SIGINT)
                _, said = waiting.communicate(timeout=10 * SLACK)
    assert "KeyboardInterrupt" in said


class Player:
    """Stands in for a runner: its episodes end at once."""

    scores_groups = False

    def __init__(self) -> None:
        self.waits, self.counters = WaitTracker(), RolloutCounters()

    async def score_group(self, trajectories: Any, task: Any) -> None:
        pass

    async def run(self, task: Any, *, group_id: str, member: int, seed: int, in_group: bool = False) -> Trajectory:
        made = Trajectory(id=f"{group_id}/{member}.0", task_id=task.id, environment="w", seed=0, group_id=group_id)
        made.outcome, made.reward = Outcome.FINISHED, 1.0
        return made


def scheduler_of(source: Any, **options: Any) -> GroupScheduler:
    tasks = TaskSampler({"": source}, seed=7, **options)
    return GroupScheduler({"": Player()}, tasks, group_size=1, batch=4)  # type: ignore[dict-item]


def taken(route: str) -> int:
    """Number of tasks that a request asks for; 0 for other requests."""
    found = re.search(r"/tasks/\w+\?start=\d+&count=(\d+)", route)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("shuffle", [True, False])
async def test_tasks_are_fetched_in_sampling_order(serve: Any, proxy: Any, shuffle: bool) -> None:
    between = proxy(serve(STAIRS).url)
    asked: list[int] = []
    between.loses = lambda route: asked.append(taken(route))
    spec = await asyncio.to_thread(resolve_environment, between.url)
    source = await asyncio.to_thread(spec.tasks, "valid")
    asked.clear()
    far, near = scheduler_of(source, shuffle=shuffle), scheduler_of(STAIRS.tasks("valid"), shuffle=shuffle)
    for version in range(80):  # 320 draws of 250 tasks
        far.set_version(version)
        near.set_version(version)
        groups, expected = await far.next_batch(), await near.next_batch()
        assert [group.task.id for group in groups] == [group.task.id for group in expected]
        assert far.tasks.state_dict() == near.tasks.state_dict()
    await far.close()
    assert sum(asked) <= 250 - client.TASKS_PER_PAGE + (FETCHED_AHEAD if not shuffle else 0), "each task once"


async def test_a_resumed_run_fetches_the_tasks_of_its_groups_without_blocking(serve: Any, proxy: Any) -> None:
    between = proxy(serve(STAIRS).url)
    spec = await asyncio.to_thread(resolve_environment, between.url)
    first = scheduler_of(await asyncio.to_thread(spec.tasks, "valid"))
    await first.next_batch()
    first.set_version(1)
    first.start_episodes()
    state = first.state_dict()
    await first.close()
    resumed = scheduler_of(await asyncio.to_thread(spec.tasks, "valid"))
    await resumed.fetch_saved(state)
    between.swallows = lambda route: bool(taken(route))
    resumed.load_state_dict(state)
    assert [group["place"] for group in resumed.state_dict()["unfinished"]] == [4, 5, 6, 7]
    await resumed.close()


async def test_a_draw_outside_a_scheduler_fetches_its_task(serve: Any, proxy: Any) -> None:
    spec = await asyncio.to_thread(resolve_environment, serve(STAIRS).url)
    source = await asyncio.to_thread(spec.tasks, "valid")
    source._rows.clear()
    far, near = (TaskSampler({"": each}, seed=7) for each in (source, STAIRS.tasks("valid")))
    assert far.next() is None
    assert far.state_dict() == near.state_dict(), "a draw that has to wait changes nothing"
    assert [(await far.draw()).task.id for _ in range(70)] == [(await near.draw()).task.id for _ in range(70)]


async def test_a_frozen_server_blocks_neither_the_event_loop_nor_the_end_of_the_run(serve: Any, proxy: Any) -> None:
    between = proxy(serve(STAIRS).url)
    spec = await asyncio.to_thread(resolve_environment, between.url)
    source = await asyncio.to_thread(spec.tasks, "valid")
    source._rows.clear()
    thaw = threading.Event()
    between.swallows = lambda route: thaw.wait(200) and False
    try:
        scheduler = scheduler_of(source)
        batch = asyncio.create_task(scheduler.next_batch())
        longest, last = 0.0, time.monotonic()
        for _ in range(20):
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert not batch.done()
        batch.cancel()
        await asyncio.wait_for(scheduler.close(), 30)
        assert longest < 30
    finally:
        thaw.set()


async def test_unresponsive_server_ends_the_run_and_is_named(
    serve: Any, proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TASKS_S", 0.1)
    between = proxy(serve(STAIRS).url)
    spec = await asyncio.to_thread(resolve_environment, between.url)
    source = await asyncio.to_thread(spec.tasks, "valid", patience_s=0.1)
    source._rows.clear()
    thaw = threading.Event()
    between.swallows = lambda route: thaw.wait(200) and False
    scheduler = scheduler_of(source)
    try:
        with pytest.raises(EnvironmentFailure, match=rf"{between.url} is silent: got no answer to GET /v1/tasks/valid"):
            await asyncio.wait_for(scheduler.next_batch(), 60)
    finally:
        thaw.set()
        await scheduler.close()


async def test_too_few_tasks_from_a_server_are_an_environment_failure(serve: Any, proxy: Any) -> None:
    spec = await asyncio.to_thread(resolve_environment, serve(STAIRS).url)
    source = await asyncio.to_thread(spec.tasks, "valid")
    with pytest.raises(EnvironmentFailure, match="wrong number of tasks of valid, from index 3 of 250: got 1"):
        source._keep(3, 2, {"total": 250, "tasks": [{}]})
    with pytest.raises(EnvironmentFailure, match="did not send tasks"):
        source._keep(3, 2, ["no"])
