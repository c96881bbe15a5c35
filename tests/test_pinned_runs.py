"""Runs whose engine and trainer have cores of their own."""

import os
import threading

import pytest
import torch
from support.waiting import join

from agentrl.algorithms.policy_losses import ppo
from agentrl.algorithms.traits import advantage_weighted
from agentrl.models.cores import divide_cores
from agentrl.models.threads import compute_on
from agentrl.observe.progress import RunWatcher
from agentrl.runs.rl import train

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def in_new_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    join(thread)
    return found[0]


def affinity():
    return sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cores", "count", "parts"),
    [([4, 5, 6], 2, [(4,), (5, 6)]), ([1, 0], 2, [(1,), (0,)]), (None, 2, [(), ()]), ([3, 4], 1, [(3, 4)])],
)
def test_cores_are_divided_evenly(cores, count, parts):
    assert divide_cores(cores, count) == parts


def test_work_runs_on_its_cores_with_as_many_threads():
    def work():
        inside = compute_on(CORES[:1], lambda: (affinity(), torch.get_num_threads()))
        return inside, affinity()

    before = torch.get_num_threads()
    assert in_new_thread(work) == ((CORES[:1], 1), CORES)
    assert in_new_thread(torch.get_num_threads) == torch.get_num_threads() == before


SEEN = []


@advantage_weighted
def recording_loss(tokens):
    SEEN.append(affinity())
    return ppo(tokens)


class Watcher(RunWatcher):
    def __init__(self):
        self.seen = []

    def on_step(self, step, metrics):
        self.seen.append((affinity(), torch.get_num_threads()))


def test_engine_and_trainer_of_a_run_have_cores_of_their_own(tiny_run):
    SEEN.clear()
    before, watcher = (affinity(), torch.get_num_threads()), Watcher()
    run = tiny_run(
        "rollout.max_staleness=1",
        "trainer.steps=2",
        f"engine.cpus=[{CORES[0]}]",
        f"trainer.cpus=[{CORES[1]}]",
        f"algorithm.loss={__name__}:recording_loss",
    )
    assert train(run, watcher=watcher).step == 2
    assert watcher.seen == [(CORES[:1], 1)] * 2
    assert SEEN
    assert all(cores == CORES[1:2] for cores in SEEN)
    assert (affinity(), torch.get_num_threads()) == before
