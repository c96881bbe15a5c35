"""Threads that compute parts of a step at the same time."""

import threading

import pytest
import torch

from agentrl.models.threads import ThreadWorkers


def test_parts_run_concurrently_and_results_keep_their_order():
    lanes, meeting = ThreadWorkers(3), threading.Barrier(3, timeout=60)
    before = torch.get_num_threads()

    def compute(part):
        meeting.wait()
        return part, threading.current_thread().name

    results = lanes.run(compute, ["a", "b", "c"])
    assert [part for part, _ in results] == ["a", "b", "c"]
    assert len({name for _, name in results} - {threading.current_thread().name}) == 3
    assert torch.get_num_threads() == before
    lanes.close()


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_each_lane_takes_its_share_of_the_threads(four_threads):
    lanes = ThreadWorkers(2)
    assert lanes.run(lambda _: torch.get_num_threads(), ["a", "b"]) == [2, 2]
    torch.ones(100, 100) @ torch.ones(100, 100)
    assert torch.get_num_threads() == 4
    lanes.close()
    assert lanes.run(lambda _: torch.get_num_threads(), ["a", "b"]) == [2, 2]
    lanes.close()


def test_an_error_is_raised_when_no_part_runs_any_more():
    lanes, failed, ended = ThreadWorkers(2), threading.Event(), []

    def compute(part):
        if part == "bad":
            failed.set()
            raise ArithmeticError("bad")
        failed.wait(20)
        ended.append(part)

    with pytest.raises(ArithmeticError):
        lanes.run(compute, ["bad", "good"])
    assert ended == ["good"]
    lanes.close()
