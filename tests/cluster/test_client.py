"""A run of a process outside the cluster, through the client server of the head node (``ray://``)."""

import pytest

from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_a_run_from_outside_the_cluster(client_address, tiny_run, story):
    own = ("environment.isolation=process", "environment.workers=2", "trainer.steps=2")
    settings = f"address: '{client_address}', engine: {{CPU: 1, engine: 1}}, environments: 1, timeout_s: 120"
    run, told = tiny_run(*own, f"cluster={{{settings}}}", "trainer.processes=2", name="outside"), story()
    assert train(run, watcher=told).step == 2
    places = told.places()
    assert places.keys() == {"rank 1", "server-0", "environments-0"}
    alone = tiny_run(*own, name="alone")
    train(alone)
    for here, there in zip(*(read_metrics(one.folder.metrics_file) for one in (alone, run)), strict=True):
        for name in ("reward/mean", "train/loss", "train/grad_norm"):
            assert there[name] == pytest.approx(here[name], rel=1e-4, abs=1e-6), name
