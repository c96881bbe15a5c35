"""Whole runs on two simulated nodes: ranks on one, an engine on the other."""

import pytest

from agentrl.observe.metrics import read_metrics
from agentrl.observe.progress import RunWatcher
from agentrl.runs.rl import train

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


class Listener(RunWatcher):
    """Remembers what a run says."""

    def __init__(self):
        self.said = []

    def on_message(self, text):
        self.said.append(text)


def test_ranks_on_one_node_train_and_an_engine_on_the_other_samples(nodes, placed, tiny_run):
    run, listener = tiny_run(*placed, "trainer.processes=2", "trainer.steps=2"), Listener()
    assert train(run, watcher=listener).step == 2
    lines = read_metrics(run.folder.metrics_file)
    assert all(line["sync/probe_difference"] < 1e-4 for line in lines)
    assert all(line["train/grad_norm"] > 0 for line in lines)
    where = dict(text.partition(", with")[0].split(" is on ") for text in listener.said if " is on node " in text)
    assert where["rank 0"] == where["rank 1"] != where["server-0"]
    assert (run.folder.logs / "rank-1.log").is_file()
    assert not list(run.folder.path.glob(".cluster-*"))


def test_a_cluster_and_one_machine_reach_the_same(nodes, placed, tiny_run):
    alone = tiny_run("trainer.steps=2", name="alone")
    train(alone)
    attached = tiny_run(*placed, "trainer.steps=2", name="attached")
    train(attached)
    for here, there in zip(*(read_metrics(run.folder.metrics_file) for run in (alone, attached)), strict=True):
        for name in ("reward/mean", "train/loss", "train/grad_norm", "train/entropy"):
            assert there[name] == pytest.approx(here[name], rel=1e-4, abs=1e-6), name
