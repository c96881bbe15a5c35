"""Whole runs on two and four simulated nodes, compared with one machine."""

import pytest

from agentrl.observe.metrics import read_metrics
from agentrl.runs.rl import train

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
COMPARED = ("reward/mean", "train/loss", "train/grad_norm", "train/entropy", "tokens/sampled")


def test_ranks_on_one_node_train_and_an_engine_on_the_other_samples(nodes, placed, tiny_run, story):
    run, told = tiny_run(*placed, "trainer.processes=2", "trainer.steps=2"), story()
    assert train(run, watcher=told).step == 2
    lines = read_metrics(run.folder.metrics_file)
    assert all(line["sync/probe_difference"] < 1e-4 for line in lines)
    assert all(line["train/grad_norm"] > 0 for line in lines)
    places = told.places()
    assert places["rank 0"] == places["rank 1"] != places["server-0"]
    assert (run.folder.logs / "rank-1.log").is_file()
    assert not list(run.folder.path.glob(".cluster-*"))


@pytest.mark.parametrize("processes", [1, 2])
def test_two_nodes_and_one_machine_reach_the_same(nodes, placed, tiny_run, processes):
    ranks = f"trainer.processes={processes}"
    alone = tiny_run("trainer.steps=2", name="alone")
    train(alone)
    attached = tiny_run(*placed, ranks, "trainer.steps=2", name="attached")
    train(attached)
    check_equal(alone, attached)


def test_four_nodes_and_one_machine_reach_the_same(nodes, spare_node, tiny_run, story):
    """Two ranks and two engines are on nodes of their own, and environments are on two of them."""
    for _ in range(2):
        spare_node()
    own = ("environment.isolation=process", "environment.workers=2", "trainer.steps=2")
    alone = tiny_run(*own, name="alone")
    train(alone)
    settings = f"address: '{nodes.address}', strategy: strict_spread, engines: 2, environments: 2, timeout_s: 120"
    spread, told = tiny_run(*own, f"cluster={{{settings}}}", "trainer.processes=2", name="spread"), story()
    train(spread, watcher=told)
    places = told.places()
    assert len({places[name] for name in ("rank 0", "rank 1", "server-0", "server-1")}) == 4
    assert places["environments-0"] != places["environments-1"]
    check_equal(alone, spread)


def check_equal(here, there):
    lines = [read_metrics(run.folder.metrics_file) for run in (here, there)]
    for one, other in zip(*lines, strict=True):
        for name in COMPARED:
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
